"""Amazon SQS: each delivery has a visibility timeout, which its receiver may change."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import islice
from typing import Any

from celery_idempotent.lease.clock import monotonic
from celery_idempotent.redelivery.broker import OwnConnection
from celery_idempotent.redelivery.held import HeldMessage

#: Entries in one request, by SQS.
BATCH = 10
#: Maximum seconds for which a message is hidden. SQS refuses more than 12 hours from its delivery,
#: some seconds of which it may have spent in kombu.
LONGEST = 12 * 3600 - 60.0


class SqsBroker(OwnConnection):
    """A connection to the broker of the worker's consumer.

    Args:
        connection: the consumer's; it is not used by the thread of `Renewal`.
    """

    def renew(self, messages: list[HeldMessage], seconds: float) -> None:
        """See `OwnConnection`; an entry that fails is of a message deleted meanwhile."""
        now = monotonic()
        # By message, since SQS accepts only the receipt of its latest delivery.
        queues: dict[tuple[str, str | None], dict[str, dict[str, Any]]] = defaultdict(dict)
        for held in messages:
            info = held.message.delivery_info
            timeout = min(math.ceil(seconds), int(held.received_at + LONGEST - now))
            if timeout > 0:
                received = info["sqs_message"]
                queues[info["sqs_queue"], info.get("routing_key")][received["MessageId"]] = {
                    "ReceiptHandle": received["ReceiptHandle"],
                    "VisibilityTimeout": timeout,
                }
        for (url, name), by_id in queues.items():
            client = self.channel.sqs(queue=name and self.channel.canonical_queue_name(name))
            entries = iter(by_id.values())
            while batch := [
                {"Id": str(number), **entry} for number, entry in enumerate(islice(entries, BATCH))
            ]:
                client.change_message_visibility_batch(QueueUrl=url, Entries=batch)

    def restore(self) -> None:
        """See `OwnConnection`: SQS redelivers messages itself."""
