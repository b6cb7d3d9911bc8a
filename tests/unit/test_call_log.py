"""Every log line about a call has the fields by which it is found."""

from __future__ import annotations

import ast
import io
import json
import logging
from pathlib import Path

import pytest
from pythonjsonlogger.json import JsonFormatter

import celery_idempotent
from celery_idempotent.call_log import fields, log_call

PACKAGE = Path(celery_idempotent.__file__).parent
_METHODS = {"debug", "info", "warning", "error", "critical", "exception", "log"}

#: Lines about a process, a store or many calls at once: the beginnings of their messages.
NOT_ABOUT_A_CALL = (
    "%d keys cannot be released",
    "%d leases could not be extended",
    "%s",  # the settings, when a worker starts
    "A call has no label",  # once for each template
    "A request of the dashboard has failed",
    "A request with an Idempotency-Key is refused",  # beside the line of its refusal
    "Cannot serve the idempotency metrics",
    "Redis refuses fused completion",  # once in a process
    "Refused a request of another site",  # to the dashboard
    "Serving idempotency metrics",
    "Task ids of duplicates are not recorded",  # many at once
    "The configuration weakens idempotency",
    "The dashboard cannot be updated",
    "The event %s could not be sent",
    "The flow of a cancelled call failed",
    "The idempotency heartbeat",
    "The record store %s",
    "The store of idempotent tasks",
    "The workers could not be asked",
    "Unexpected error in the idempotency heartbeat",
    "Waiting calls poll",
)


def lines_without_fields() -> list[str]:
    """The messages of all calls of a logger that have no ``extra``."""
    messages = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in _METHODS
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "logger"
                and not any(keyword.arg == "extra" for keyword in node.keywords)
            ):
                message = next(a for a in node.args if isinstance(a, (ast.Constant, ast.JoinedStr)))
                messages.append(str(getattr(message, "value", ast.unparse(message))))
    return messages


def test_every_other_line_has_the_fields() -> None:
    without = lines_without_fields()

    assert without
    assert [line for line in without if not line.startswith(NOT_ABOUT_A_CALL)] == []


def test_a_line_names_the_call_and_its_record_has_the_fields() -> None:
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("shop.call_log")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)

    log_call(
        logger,
        logging.INFO,
        "takes %d s: %s",
        2,
        "100 %d",
        key="shop.charge:digest",
        task_id="17",
        label="order 100 %s",
        decision="run",
        token=1795275949160191,
        attempt=1,
    )

    line = json.loads(output.getvalue())
    assert line.pop("message") == (
        "shop.charge:digest (order 100 %s): task 17 (attempt 1) takes 2 s: 100 %d"
    )
    assert line | fields(None) | {"taskName": None} == fields(None) | {"taskName": None}
    assert {name: value for name, value in line.items() if name != "taskName"} == fields(
        "shop.charge:digest",
        task_id="17",
        label="order 100 %s",
        decision="run",
        token=1795275949160191,
        attempt=1,
    )


def test_nothing_is_formatted_below_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("shop.call_log.quiet")
    logger.setLevel(logging.WARNING)
    monkeypatch.setattr(logger, "log", None)

    log_call(logger, logging.INFO, "runs", key="shop.charge:digest", task_id="17")
