"""Runs a server of SQS and S3, provided by moto in a thread of this process."""

from __future__ import annotations

import logging
from typing import Any

import boto3
from moto.server import ThreadedMotoServer
from typing_extensions import Self

REGION = "us-east-1"


class MotoServer:
    """A server that exists within a `with` block."""

    def __enter__(self) -> Self:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.address = f"{host}:{port}"
        self.session: Any = boto3.Session("testing", "testing", region_name=REGION)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
