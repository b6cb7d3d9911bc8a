"""The arguments of every command are those of its script's head, in their order."""

from __future__ import annotations

from typing import Any

import pytest

from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Payload, Record, State, Tail
from celery_idempotent.core.store import commands
from celery_idempotent.core.store.commands import DEADLINE, RECORD, SLOT, TURN

KEY = Key("shop.charge", "PN0MlSPt3FmEwTzQ5dHvBQ", b"8 bytes!")
RESULT, ERROR = Payload("json", b"result"), Payload("yaml", b"error")
LABEL = Tail(label="l")
MESSAGE = KEY.of_message("t")

BEGIN: dict[str, Any] = {
    "execution_id": b"e", "task_id": "t", "worker": "w", "lease_ms": 10, "retention_ms": 200,
}  # fmt: skip
BEGUN = {
    "execution_id": b"e", "task_id": b"t", "generation": 0, "fingerprint": KEY.fingerprint,
    "worker": b"w", "tail": b"", "lease_ms": 10, "ttl_ms": 210, "hold_ms": 0,
    "deadline_ms": DEADLINE, "replaces": 0,
}  # fmt: skip
SETTLED = {
    "token": 17, "at_ms": 0, "owner": "", "tail": b"", "body": b"", "retention_ms": 200,
    "meta": b"", "expires": 0,
}  # fmt: skip
COMPLETED = {**SETTLED, "letter": "V", "tail": b"json", "body": b"result"}
QUEUED = {
    "task_id": b"t", "deadline_ms": DEADLINE, "hold_ms": 10, "fingerprint": KEY.fingerprint,
    "tail": b"", "arguments": b"", "keep_ms": 0, "quiet_ms": 0, "max_wait_ms": 0,
}  # fmt: skip

LEASE = commands.LeaseExtension(KEY, 17, 10, 200)
META = commands.BackendResult("celery-task-meta-t", b"meta", 30)
WRITTEN = {"meta": b"meta", "expires": 30}
OTHER = Payload("=task", b"u")

COMMANDS: list[tuple[str, commands.Command, tuple[str, ...], dict[str, Any]]] = [
    ("begin", commands.begin(KEY, **BEGIN), (RECORD,), BEGUN),
    ("begin", commands.begin(KEY, **BEGIN, hold_ms=9), (RECORD, SLOT), {**BEGUN, "hold_ms": 9}),
    (
        "begin",
        commands.begin(MESSAGE, **BEGIN, generation=3, tail=LABEL, replaces=2),
        (RECORD, SLOT, TURN),
        {**BEGUN, "generation": 3, "tail": b"\n\nl", "replaces": 2},
    ),
    (
        "extend", commands.extend(LEASE), (RECORD,),
        {"token": 17, "lease_ms": 10, "ttl_ms": 210, "step": b""},
    ),
    (
        "extend", commands.extend(LEASE._replace(key=MESSAGE), b"entry"), (RECORD, TURN),
        {"token": 17, "lease_ms": 10, "ttl_ms": 210, "step": b"entry"},
    ),
    ("settle", commands.complete(KEY, 17, RESULT, 200), (RECORD,), COMPLETED),
    ("settle", commands.complete(MESSAGE, 17, RESULT, 200), (RECORD,), COMPLETED),
    (
        "settle", commands.complete(KEY, 17, RESULT, 200, sending_ms=10, tail=LABEL), (RECORD,),
        {**COMPLETED, "letter": "T", "at_ms": 10, "tail": b"json\n\nl"},
    ),
    ("settle", commands.complete(KEY, 17, RESULT, 200, META), (RECORD,), {**COMPLETED, **WRITTEN}),
    (
        "settle", commands.write_result(KEY, META), (RECORD,),
        {**SETTLED, "token": 0, "letter": "V", "retention_ms": 0, **WRITTEN},
    ),
    (
        "settle", commands.mark_sent(KEY, 17), (RECORD,),
        {**SETTLED, "letter": "V", "retention_ms": 0},
    ),
    (
        "settle", commands.fail(KEY, 17, ERROR, 200), (RECORD,),
        {**SETTLED, "letter": "E", "tail": b"yaml", "body": b"error"},
    ),
    (
        "settle", commands.poison(KEY, 17, 200), (RECORD,),
        {**SETTLED, "letter": "E", "body": b"poisoned"},
    ),
    (
        "settle", commands.delegate(KEY, 17, OTHER, 3, 200), (RECORD,),
        {**SETTLED, "letter": "D", "owner": 3, "tail": b"=task", "body": b"u"},
    ),
    (
        "settle", commands.release(KEY, 17, retention_ms=200), (RECORD,),
        {**SETTLED, "letter": ""},
    ),
    (
        "settle", commands.reserve_retry(MESSAGE, 17, hold_ms=10, retention_ms=200, generation=3),
        (RECORD, TURN), {**SETTLED, "letter": "W", "at_ms": 10, "owner": 3},
    ),
    (
        "abandon", commands.abandon(KEY, "t", "w", grace_ms=10, reason="terminated"), (RECORD,),
        {"task_id": b"t", "worker": b"w", "grace_ms": 10, "reason": "terminated"},
    ),
    ("queue", commands.reserve(KEY, "t", 10), (SLOT, RECORD), QUEUED),
    ("queue", commands.reserve(MESSAGE, "t", 10), (SLOT, RECORD, TURN), QUEUED),
    (
        "queue", commands.reserve(MESSAGE, "t", 10, after_running=True, tail=LABEL), (SLOT, RECORD),
        {**QUEUED, "tail": b"\n\nl"},
    ),
    ("queue", commands.give_back(KEY, "t"), (SLOT, RECORD), {**QUEUED, "hold_ms": 0}),
    (
        "forget", commands.forget(KEY), (RECORD, SLOT),
        {"deadline_ms": DEADLINE, "token": "", "letters": "", "force": ""},
    ),
    (
        "forget", commands.forget(MESSAGE, commands.UNREADABLE, force=True), (RECORD,),
        {"deadline_ms": DEADLINE, "token": "?", "letters": "", "force": "1"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "command", "keys", "values"), COMMANDS)
def test_arguments(name: str, command: Any, keys: tuple[str, ...], values: dict[str, Any]) -> None:
    assert (command.script.name, command.key.turn, command.keys) == (name, KEY, keys)
    assert dict(zip(command.script.argv, command.arguments, strict=True)) == values


def test_a_shown_record_is_named_by_its_state_and_token() -> None:
    record = Record(State.STARTED, str(KEY), KEY.task, "t", "w", token=17, attempt=1)

    assert commands.forget(KEY, record).arguments[1:3] == [17, "BAba"]


def test_the_end_of_a_long_worker_name_is_kept() -> None:
    command = commands.abandon(KEY, "t", "ä" * 200 + "/4711", grace_ms=0, reason="")

    worker = command.arguments[command.script.argv.index("worker")]
    assert len(worker) <= 255
    assert worker.decode().endswith("ä/4711")
