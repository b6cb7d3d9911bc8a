"""The arguments of every command are those of its script's head, in their order."""

from __future__ import annotations

from typing import Any

import pytest

from celery_idempotent.key.key import Key
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record, State
from celery_idempotent.store import commands
from celery_idempotent.store.commands import UNREADABLE, BackendResult, Command, LeaseExtension

KEY = Key("shop.charge", "PN0MlSPt3FmEwTzQ5dHvBQ", b"8 bytes!")
RESULT, ERROR = Payload("json", b"result"), Payload("yaml", b"error")
MESSAGE = KEY.of_message("t")

OPTIONS = {
    "execution_id": b"e", "unanswered_ids": b"u", "generation": 3, "max_attempts": 5, "error_ms": 6,
    "root": b"root", "continues": True,
}  # fmt: skip
BEGIN: dict[str, Any] = {
    **OPTIONS, "task_id": "t", "worker": "w", "lease_ms": 10, "retention_ms": 200,
}  # fmt: skip
BEGUN = {
    **OPTIONS, "task_id": b"t", "worker": b"w", "lease_ms": 10, "ttl_ms": 210,
    "fingerprint": KEY.fingerprint,
}  # fmt: skip
#: For a key that may run again.
WAIT = {"next_turn_ms": 30}
#: For a call that may come back.
KEEP = {"next_turn_ms": 0, "min_retention_ms": 40}

COMPLETE = {"token": 17, "format": "json", "body": b"result", "retention_ms": 200}
FAIL = {"token": 17, "format": "yaml", "body": b"error", "retention_ms": 200}
RELEASE = {"token": 17, "retention_ms": 200}
ABANDON = {"task_id": b"t", "root": b"r", "worker": b"w", "grace_ms": 10}
NO_ERROR = {"generation": 0, "format": "", "error": b"", "error_ms": 0}
AN_ERROR = {"generation": 2, "format": "yaml", "error": b"error", "error_ms": 9}
END: dict[str, Any] = {"root": b"r", "generation": 2, "error": ERROR, "error_ms": 9}

LEASE = LeaseExtension(KEY, 17, 10, 200)
META = BackendResult("celery-task-meta-t", b"meta", 30)
WRITTEN = {"meta": b"meta", "expires": 30}

COMMANDS: list[tuple[str, Command, dict[str, Any]]] = [
    ("begin", commands.begin(KEY, **BEGIN), BEGUN),
    ("begin", commands.begin(KEY, min_retention_ms=40, **BEGIN), {**BEGUN, **KEEP}),
    ("begin", commands.begin(MESSAGE, **BEGIN, **WAIT), {**BEGUN, **WAIT}),
    ("extend", commands.extend(LEASE), {"token": 17, "lease_ms": 10, "ttl_ms": 210}),
    ("complete", commands.complete(KEY, 17, RESULT, 200), {**COMPLETE, "lease_ms": ""}),
    ("fused_complete", commands.complete(KEY, 17, RESULT, 200, META), {**COMPLETE, **WRITTEN}),
    (
        "fused_complete", commands.write_result(KEY, META),
        {"token": 0, "format": "", "body": b"", "retention_ms": 0, **WRITTEN},
    ),
    ("fail", commands.fail(KEY, 17, ERROR, 200), {**FAIL, "lease_ms": ""}),
    ("fail", commands.fail(KEY, 17, ERROR, 200, sending_ms=10), {**FAIL, "lease_ms": 10}),
    (
        "release", commands.release(KEY, 17, hold_ms=10, retention_ms=200, root=b"r"),
        {**RELEASE, "hold_ms": 10, **NO_ERROR, "lease_ms": ""},
    ),
    (
        "release", commands.release(KEY, 17, hold_ms=0, retention_ms=200, sending_ms=10, **END),
        {**RELEASE, "hold_ms": 0, **AN_ERROR, "lease_ms": 10},
    ),
    (
        "save_step", commands.save_step(KEY, 17, b"entry", lease_ms=10, retention_ms=200),
        {"token": 17, "entry": b"entry", "lease_ms": 10, "ttl_ms": 210},
    ),
    (
        "continuation", commands.mark_continued(KEY, b"r", b"e"),
        {"execution_id": b"e", "lease_ms": ""},
    ),
    (
        "continuation", commands.extend(LeaseExtension(KEY, 0, 10, 200, b"r", b"e")),
        {"execution_id": b"e", "lease_ms": 10},
    ),
    (
        "continuation", commands.stop_sending(KEY, b"r", b"e"),
        {"execution_id": b"e", "lease_ms": 0},
    ),
    (
        "abandon", commands.abandon(KEY, "t", "w", root=b"r", grace_ms=10),
        {**ABANDON, **NO_ERROR, "execution_id": b"", "lease_ms": ""},
    ),
    (
        "abandon",
        commands.abandon(KEY, "t", "w", grace_ms=10, execution_id=b"e", sending_ms=20, **END),
        {**ABANDON, **AN_ERROR, "execution_id": b"e", "lease_ms": 20},
    ),
    (
        "reserve", commands.reserve(KEY, "t", 10),
        {"task_id": b"t", "fingerprint": KEY.fingerprint, "hold_ms": 10},
    ),
    (
        "reserve_turn", commands.reserve(MESSAGE, "t", 10, waits=True),
        {"task_id": b"t", "fingerprint": KEY.fingerprint, "hold_ms": 10, "waits": 1},
    ),
    ("get", commands.get(KEY), {}),
    ("forget", commands.forget(KEY), {"state": "", "token": ""}),
    ("forget", commands.forget(KEY, UNREADABLE), {"state": "?", "token": ""}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "command", "values"), COMMANDS)
def test_arguments(name: str, command: Command, values: dict[str, Any]) -> None:
    assert (command.script.name, command.key.turn) == (name, KEY)
    optional = {*WAIT, *KEEP} - values.keys()
    argv = tuple(argument for argument in command.script.argv if argument not in optional)
    assert sorted(values) == sorted(argv)
    assert command.arguments == [values[argument] for argument in argv]


def test_a_shown_record_is_named_by_its_state_and_token() -> None:
    record = Record(State.STARTED, str(KEY), KEY.task, "t", "w", token=17, attempt=1)

    command = commands.forget(KEY, record)

    assert dict(zip(command.script.argv, command.arguments, strict=True)) == {
        "state": "S",
        "token": 17,
    }


def test_the_end_of_a_long_worker_name_is_kept() -> None:
    command = commands.abandon(KEY, "t", "ä" * 200 + "/4711", root=b"r", grace_ms=0)

    worker = command.arguments[command.script.argv.index("worker")]
    assert len(worker) <= 255
    assert worker.decode().endswith("ä/4711")
