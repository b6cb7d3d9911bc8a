"""What a worker reports, in files: its log as JSON, and its Sentry events."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import sentry_sdk
from celery.signals import after_setup_logger
from pythonjsonlogger.json import JsonFormatter
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

_LOG, _EVENTS = "log.jsonl", "sentry.jsonl"


def install(directory: Path) -> None:
    """Begins to report, before the worker configures its logs."""

    class FileTransport(Transport):
        """Writes events to a file instead of sending them."""

        def capture_envelope(self, envelope: Any) -> None:
            if (event := envelope.get_event()) is not None:
                with (directory / _EVENTS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(event, default=str) + "\n")

    sentry_sdk.init(
        dsn="http://key@localhost/1", transport=FileTransport, integrations=[CeleryIntegration()]
    )

    @after_setup_logger.connect(weak=False)
    def add_handler(logger: logging.Logger, **_: Any) -> None:
        handler = logging.FileHandler(directory / _LOG, encoding="utf-8")
        handler.setFormatter(JsonFormatter("%(levelname)s %(name)s %(message)s"))
        logger.addHandler(handler)


def log(directory: Path) -> list[dict[str, Any]]:
    """Returns the records of the log."""
    return _read(directory / _LOG)


def sentry_events(directory: Path) -> list[dict[str, Any]]:
    """Returns the events that Sentry would have got."""
    return _read(directory / _EVENTS)


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    # The last line may be incomplete.
    lines = file.read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
