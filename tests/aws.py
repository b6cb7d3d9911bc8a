"""Runs servers of SQS and S3, provided by moto in a thread of this process."""

from __future__ import annotations

import logging
import time
from typing import Any

import boto3
from moto.server import ThreadedMotoServer
from moto.sqs.models import sqs_backends

REGION = "us-east-1"


class Queues:
    """A server that exists within a `with` block; `settings` reach it from any process."""

    def __enter__(self) -> Queues:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        #: Settings of Celery's broker.
        self.settings: dict[str, Any] = {
            "broker_url": f"sqs://testing:testing@{host}:{port}",
            "broker_transport_options": {
                "region": REGION,
                "is_secure": False,
                "wait_time_seconds": 0,
                "polling_interval": 0.1,
            },
        }
        session = boto3.Session("testing", "testing", region_name=REGION)
        self.client: Any = session.client("sqs", endpoint_url=f"http://{host}:{port}")
        return self

    def messages(self, queue: str) -> int:
        """Returns the number of messages, including delivered and delayed ones."""
        url = self.client.get_queue_url(QueueName=queue)["QueueUrl"]
        response = self.client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])
        return sum(
            int(response["Attributes"][f"ApproximateNumberOfMessages{suffix}"])
            for suffix in ("", "NotVisible", "Delayed")
        )

    def hidden(self, queue: str) -> list[float]:
        """Returns the seconds after which each delivered message is delivered again."""
        ((_, account),) = sqs_backends.items()
        delivered = account[REGION].queues[queue].pending_messages
        return [message.visible_at / 1000 - time.time() for message in delivered]

    def __exit__(self, *_: object) -> None:
        self._server.stop()


class Bucket:
    """A bucket that exists within a `with` block; `settings` reach it from any process."""

    def __enter__(self) -> Bucket:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        #: Settings of Celery's S3 backend.
        self.settings: dict[str, Any] = {
            "s3_endpoint_url": f"http://{host}:{port}",
            "s3_access_key_id": "testing",
            "s3_secret_access_key": "testing",
            "s3_region": "us-east-1",
            "s3_bucket": "results",
        }
        session = boto3.Session("testing", "testing", region_name="us-east-1")
        client = session.resource("s3", endpoint_url=self.settings["s3_endpoint_url"])
        self._bucket = client.create_bucket(Bucket="results")
        return self

    def objects(self) -> dict[str, bytes]:
        """Returns the contents of all objects by name."""
        return {item.key: item.get()["Body"].read() for item in self._bucket.objects.all()}

    def empty(self) -> None:
        """Deletes all objects."""
        self._bucket.objects.delete()

    def __exit__(self, *_: object) -> None:
        self._server.stop()
