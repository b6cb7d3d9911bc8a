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
from celery_idempotent.core.events import report as module
from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import CallIdentity, log_extra, report
from celery_idempotent.core.events.table import DECISIONS, OUTCOMES, Event
from celery_idempotent.core.flow.execution import Execution
from celery_idempotent.errors import ConflictError

PACKAGE = Path(celery_idempotent.__file__).parent
_METHODS = {"debug", "info", "warning", "error", "critical", "exception", "log"}

#: Lines about a process, a store or many calls at once: the beginnings of their messages.
NOT_ABOUT_A_CALL = (
    "%d keys cannot be released",
    "%s not extended",
    "%s",  # the settings, when a worker starts
    "A call has no label",  # once for each template
    "A request of the dashboard has failed",
    "A request with an Idempotency-Key is refused",  # beside the line of its refusal
    "Cannot read what messages wait for",  # a server's
    "Cannot renew the visibility timeout",  # of many messages
    "Cannot serve the idempotency metrics",
    "Duplicates that wait for a running call",
    "Redelivery of a dead worker's messages",
    "Redis refuses fused completion",  # once in a process
    "Closed a connection",  # of the dashboard
    "Refused %s %s",  # a request to the dashboard
    "Serving idempotency metrics",
    "Task ids of duplicates are not recorded",  # many at once
    "A setting or fault weakens idempotency",
    "The connection could not be closed",  # to the broker
    "The dashboard cannot be updated",
    "The event %s could not be sent",
    "The flow of a cancelled call failed",
    "The idempotency heartbeat",
    "The records of the Redis node",
    "The store of idempotent tasks",
    "The visibility timeout of messages",
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


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is logged as JSON at INFO and above."""
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("shop.events")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    monkeypatch.setattr(module, "logger", logger)
    return output


def test_a_line_names_the_call_and_its_record_has_the_fields(lines: io.StringIO) -> None:
    identity = CallIdentity(None, "shop.charge", "17", "shop.charge:digest", "order 100 %s")
    execution = Execution("shop.charge:digest", token=1795275949160191)
    event = Event(logging.INFO, "takes {seconds:.1f} s, 100 %: {error}")

    report(event, identity, execution, seconds=2, error=ValueError("of shop.charge:digest"))

    line = json.loads(lines.getvalue())
    assert line.pop("message") == (
        "shop.charge:digest (order 100 %s): task 17 (attempt 1) takes 2.0 s, 100 %: "
        "ValueError('of the key')"
    )
    line.pop("taskName", None)
    assert line == log_extra(
        "shop.charge:digest", task_id="17", label="order 100 %s", token=1795275949160191, attempt=1
    )


def test_text_of_callers_stays_on_its_line(lines: io.StringIO) -> None:
    hostile = "17\n2026-11-22 ERROR forged\x1b[2J\u202e"
    event = Event(logging.WARNING, "met {text}: {error}")

    identity = CallIdentity(None, hostile, hostile, hostile, hostile)
    report(event, identity, text=hostile, error=ConflictError(f"another {hostile}"))

    line = json.loads(lines.getvalue())
    assert line["message"].isprintable()
    assert line["message"].count("forged") == 4  # "the key" stands for one
    assert all(isinstance(value, str) is False or value.isprintable() for value in line.values())


def test_nothing_is_formatted_below_the_level(lines: io.StringIO) -> None:
    event = Event(logging.DEBUG, "takes {seconds} s")

    report(event, CallIdentity(None, "shop.charge", "17"))  # the field is missing

    assert lines.getvalue() == ""


def test_each_decision_and_outcome_is_reported_by_an_event() -> None:
    events = [event for event in vars(table).values() if isinstance(event, Event)]

    assert {event.decision for event in events} == {*DECISIONS, ""}
    assert {event.counter for event in events} == {
        *(*OUTCOMES, "deduplicated", "bypassed", "refused_{reason}", "would_refuse_{reason}"),
        *("{answered}", ""),
    }
