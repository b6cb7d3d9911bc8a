"""Golden records: the bytes that the scripts write, and the commands that each script runs.

Other versions of this library read these bytes, and every call of a task pays for the commands.
tests/golden keeps what each version has stored, with what a later one does with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.store.commands import BackendResult
from celery_idempotent.store.run_sync import run_sync
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import HOLD_MS, OWNER, RecordHarness, Turn

#: Token and time, which differ from run to run: 7 and 6 bytes.
CHANGING = slice(2, 15)

_FINGERPRINT = b"\x088 bytes!"
_TASK_ID = b"\x00\x11" + b"\x00" + bytes.fromhex("11111111111141118111111111111111")
_SECOND_TASK_ID = b"\x00\x11" + b"\x00" + bytes.fromhex("22222222222242228222222222222222")
_WORKER = b"\x10celery@host/4711"
_ROOT = bytes.fromhex("77b26070e92029c5")
_OWNER = b"\x10" + _ROOT + b"8 bytes."

_CALL = _FINGERPRINT + _TASK_ID
_STARTED = b"S\x01" + _CALL + _WORKER + _OWNER + b"\x00"
_CHARGED, _ERROR = b'\x04json"charged"', b'\x04json{"exc_type": "ValueError"}'

#: The record's bytes for each state and its history, without token and time.
RECORDS: dict[str, tuple[Callable[[RecordHarness], object], bytes]] = {
    "reserved": (RecordHarness.reserved, b"R\x00" + _CALL + b"\x00\x00\x00"),
    "started": (lambda harness: harness.started(execution_id=OWNER), _STARTED),
    "started with a step": (
        lambda harness: harness.save_step(harness.started(execution_id=OWNER).token),
        _STARTED + b'\x00\x00\x00\x13\x00\x07reserve\x04json"r-1"',
    ),
    "completed": (RecordHarness.completed, b"C\x01" + _CALL + _WORKER + b"\x00" + _CHARGED),
    "completed and continued": (
        lambda harness: (harness.sending(), harness.mark_continued()),
        b"C\x01" + _CALL + _WORKER + _OWNER + _CHARGED,
    ),
    "failed": (RecordHarness.failed, b"F\x01" + _CALL + _WORKER + b"\x00" + _ERROR),
    "failed and continued": (
        lambda harness: (harness.sending_error(), harness.mark_continued()),
        b"F\x01" + _CALL + _WORKER + _OWNER + _ERROR,
    ),
    "poisoned": (
        RecordHarness.poisoned,
        b"F\x01" + _FINGERPRINT + _SECOND_TASK_ID + _WORKER + b"\x00\x00poisoned",
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("state", RECORDS)
def test_records_are_those_of_every_version_before(harness: RecordHarness, state: str) -> None:
    make, golden = RECORDS[state]
    make(harness)

    raw = harness.raw
    assert raw[: CHANGING.start] + raw[CHANGING.stop :] == golden


#: What the script writes for a result backend.
BACKEND_RESULT = BackendResult("celery-task-meta-1", b'{"status": "SUCCESS"}', 600)


def _nothing(_: RecordHarness | Turn) -> None: ...


def _token(harness: RecordHarness) -> int:
    return harness.started().token


#: The Redis commands inside each script, on a record of its usual state, and how often each.
COMMANDS: dict[
    str,
    tuple[Callable[[RecordHarness], Any], Callable[[RecordHarness, Any], object], dict[str, int]],
] = {
    "begin": (_nothing, lambda harness, _: harness.begin(), {"get": 2, "time": 1, "set": 1}),
    "begin again": (RecordHarness.completed, lambda harness, _: harness.begin(), {"get": 2}),
    "begin of a duplicate with a continuation": (
        RecordHarness.completed,
        lambda harness, _: harness.begin(continues=True),
        {"get": 2, "time": 1, "pttl": 1, "set": 1},
    ),
    "complete": (_token, RecordHarness.complete, {"get": 1, "time": 1, "set": 1}),
    "fused_complete": (
        _token,
        lambda harness, token: harness.complete(token, backend_result=BACKEND_RESULT),
        {"get": 2, "time": 1, "set": 2, "publish": 1},
    ),
    "fused_complete of a replay": (
        RecordHarness.completed,
        lambda harness, _: run_sync(harness.store.write_result(harness.key, BACKEND_RESULT)),
        {"get": 1, "set": 1, "publish": 1},
    ),
    "fail": (_token, RecordHarness.fail, {"get": 1, "time": 1, "set": 1}),
    "release": (_token, RecordHarness.release, {"get": 1, "time": 1, "del": 1}),
    "release with an error": (
        _token,
        RecordHarness.end_with_error,
        {"get": 1, "time": 1, "set": 1, "del": 1},
    ),
    "release and hold": (
        _token,
        lambda harness, token: harness.release(token, HOLD_MS),
        {"get": 1, "time": 1, "set": 1},
    ),
    "extend": (_token, RecordHarness.extend, {"get": 1, "time": 1, "set": 1}),
    "save_step": (_token, RecordHarness.save_step, {"get": 1, "time": 1, "set": 1}),
    "reserve": (_nothing, lambda harness, _: harness.reserve(), {"get": 1, "time": 1, "set": 1}),
    "continuation": (
        RecordHarness.sending,
        lambda harness, _: harness.mark_continued(),
        {"get": 1, "time": 1, "set": 1},
    ),
    "look up": (
        RecordHarness.completed,
        lambda harness, _: run_sync(harness.store.get(harness.key)),
        {"get": 1, "time": 1, "pttl": 1},
    ),
}


def _begun_and_published(turn: Turn) -> int:
    token = turn.first.started(execution_id=OWNER).token
    turn.second.publish()
    return token


def _begun(turn: Turn) -> int:
    return turn.first.started().token


#: The same for a key that may run again.
TURN_COMMANDS: dict[
    str, tuple[Callable[[Turn], Any], Callable[[Turn, Any], object], dict[str, int]]
] = {
    "begin": (_nothing, lambda turn, _: turn.first.begin(), {"get": 3, "time": 1, "set": 2}),
    "begin of a copy": (
        lambda turn: turn.first.completed(),
        lambda turn, _: turn.first.begin(),
        {"get": 2},
    ),
    "begin of a duplicate": (
        lambda turn: turn.second.started(),
        lambda turn, _: turn.first.begin(),
        {"get": 3, "time": 1, "set": 1},
    ),
    "complete": (
        _begun,
        lambda turn, token: turn.first.complete(token),
        {"get": 2, "time": 1, "set": 2},
    ),
    "complete while another waits": (
        _begun_and_published,
        lambda turn, token: turn.first.complete(token),
        {"get": 2, "time": 1, "set": 2},
    ),
    "release": (
        _begun,
        lambda turn, token: turn.first.release(token),
        {"get": 2, "time": 1, "del": 2},
    ),
    "extend": (
        _begun,
        lambda turn, token: turn.first.extend(token),
        {"get": 2, "time": 1, "set": 2},
    ),
    "publish": (_nothing, lambda turn, _: turn.first.publish(), {"get": 1, "time": 1, "set": 1}),
    "publish while one runs": (
        _begun,
        lambda turn, _: turn.second.publish(),
        {"get": 1, "time": 1, "set": 1},
    ),
}


@pytest.mark.parametrize("script", [*COMMANDS, *(f"turn: {name}" for name in TURN_COMMANDS)])
def test_a_script_takes_no_other_commands(
    harness: RecordHarness, server: RedisServer, script: str
) -> None:
    record: Any = harness
    if script in COMMANDS:
        given, call, commands = COMMANDS[script]
    else:
        given, call, commands = TURN_COMMANDS[script.removeprefix("turn: ")]  # type: ignore[assignment]
        record = Turn(harness, waits=True)
    call(record, given(record))  # loads the script
    harness.client.flushdb()
    token = given(record)
    harness.client.config_resetstat()

    call(record, token)

    stats = harness.client.info("commandstats")
    taken = {name.removeprefix("cmdstat_"): stats[name]["calls"] for name in stats}
    assert {name: count for name, count in taken.items() if name in ALL} == commands


_COMPLETED = b"C\x01" + _CALL + _WORKER + _OWNER + _CHARGED
#: Of both records, without token and time, for each state of a key that may run again.
TURNS: dict[str, tuple[Callable[[Turn], object], bytes, bytes]] = {
    "started": (lambda turn: turn.first.started(execution_id=OWNER), _STARTED, _STARTED),
    "completed": (lambda turn: turn.first.completed(execution_id=OWNER), _COMPLETED, _COMPLETED),
    "completed, and the next one is reserved": (
        lambda turn: turn.first.complete(_begun_and_published(turn)),
        _COMPLETED,
        b"R\x00" + _FINGERPRINT + _SECOND_TASK_ID + b"\x00\x00\x00",
    ),
}


@pytest.mark.parametrize("state", TURNS)
def test_records_of_a_key_that_may_run_again(harness: RecordHarness, state: str) -> None:
    make, message, turn = TURNS[state]
    make(Turn(harness, waits=True))

    for record, golden in ((Turn(harness).first, message), (harness, turn)):
        raw = record.raw
        assert raw[: CHANGING.start] + raw[CHANGING.stop :] == golden


def test_the_entry_of_a_waiting_message(harness: RecordHarness) -> None:
    _begun_and_published(Turn(harness, waits=True))

    entry = harness.record().body

    # Its length and no name; W; no generation; the end of the reservation; task id; fingerprint.
    assert entry[:7] + entry[20:] == (b"\x00\x00\x00\x2c\x00\x00W" + _SECOND_TASK_ID + _FINGERPRINT)
    assert entry[7:14] == bytes(7)


def test_names_of_messages_are_in_the_slot_of_their_key(harness: RecordHarness) -> None:
    assert harness.name == "idem:shop.charge:PN0MlSPt3FmEwTzQ5dHvBQ"
    assert Turn(harness).first.name == f"idem:{{{harness.name}}}:xMYpJ2mKVu8-QbalnIdbkA"


ALL = {*("get", "set", "del", "time", "pttl", "pexpire"),
       *("exists", "hget", "hset", "strlen", "publish")}  # fmt: skip
