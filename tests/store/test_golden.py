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

#: The record's bytes for each state and its history, without token and time.
RECORDS: dict[str, tuple[Callable[[RecordHarness], object], bytes]] = {
    "reserved": (
        lambda harness: harness.reserved(),
        b"R\x00" + _FINGERPRINT + _TASK_ID + b"\x00\x00\x00",
    ),
    "started": (
        lambda harness: harness.started(execution_id=OWNER),
        b"S\x01" + _FINGERPRINT + _TASK_ID + _WORKER + _OWNER + b"\x00",
    ),
    "started with a step": (
        lambda harness: harness.save_step(harness.started(execution_id=OWNER).token),
        b"S\x01" + _FINGERPRINT + _TASK_ID + _WORKER + _OWNER + b"\x00"
        b'\x00\x00\x00\x13\x00\x07reserve\x04json"r-1"',
    ),
    "completed": (
        lambda harness: harness.completed(),
        b"C\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b'\x00\x04json"charged"',
    ),
    "completed and continued": (
        lambda harness: (harness.sending(), harness.mark_continued()),
        b"C\x01"
        + _FINGERPRINT
        + _TASK_ID
        + _WORKER
        + b"\x10"
        + _ROOT
        + b'8 bytes.\x04json"charged"',
    ),
    "failed": (
        lambda harness: harness.failed(),
        b"F\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b'\x00\x04json{"exc_type": "ValueError"}',
    ),
    "failed and continued": (
        lambda harness: (harness.sending_error(), harness.mark_continued()),
        b"F\x01"
        + _FINGERPRINT
        + _TASK_ID
        + _WORKER
        + b"\x10"
        + _ROOT
        + b'8 bytes.\x04json{"exc_type": "ValueError"}',
    ),
    "poisoned": (
        lambda harness: harness.poisoned(),
        b"F\x01" + _FINGERPRINT + _SECOND_TASK_ID + _WORKER + b"\x00\x00poisoned",
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("state", RECORDS)
def test_records_are_those_of_every_version_before(harness: RecordHarness, state: str) -> None:
    make, golden = RECORDS[state]
    make(harness)

    raw = harness.raw
    assert raw is not None
    assert raw[: CHANGING.start] + raw[CHANGING.stop :] == golden


#: What the script writes for a result backend.
BACKEND_RESULT = BackendResult("celery-task-meta-1", b'{"status": "SUCCESS"}', 600)

#: The Redis commands inside each script, on a record of its usual state; a set: each once.
COMMANDS: dict[
    str,
    tuple[
        Callable[[RecordHarness], Any],
        Callable[[RecordHarness, Any], object],
        set[str] | dict[str, int],
    ],
] = {
    "begin": (
        lambda harness: None,
        lambda harness, _: harness.begin(),
        {"get": 2, "time": 1, "set": 1},
    ),
    "begin again": (
        lambda harness: harness.completed(),
        lambda harness, _: harness.begin(),
        {"get": 2},
    ),
    "begin of a duplicate with a continuation": (
        lambda harness: harness.completed(),
        lambda harness, _: harness.begin(continues=True),
        {"get": 2, "time": 1, "pttl": 1, "set": 1},
    ),
    "complete": (
        lambda harness: harness.started().token,
        lambda harness, token: harness.complete(token),
        {"get", "time", "set"},
    ),
    "fused_complete": (
        lambda harness: harness.started().token,
        lambda harness, token: harness.complete(token, backend_result=BACKEND_RESULT),
        {"get": 2, "time": 1, "set": 2, "publish": 1},
    ),
    "fused_complete of a replay": (
        lambda harness: harness.completed(),
        lambda harness, _: run_sync(harness.store.write_result(harness.key, BACKEND_RESULT)),
        {"get", "set", "publish"},
    ),
    "fail": (
        lambda harness: harness.started().token,
        lambda harness, token: harness.fail(token),
        {"get", "time", "set"},
    ),
    "release": (
        lambda harness: harness.started().token,
        lambda harness, token: harness.release(token),
        {"get", "time", "del"},
    ),
    "release with an error": (
        lambda harness: harness.started().token,
        lambda harness, token: harness.end_with_error(token),
        {"get", "time", "set", "del"},
    ),
    "release and hold": (
        lambda harness: harness.started().token,
        lambda harness, token: harness.release(token, HOLD_MS),
        {"get", "time", "set"},
    ),
    "extend": (
        lambda harness: harness.started().token,
        lambda harness, token: harness.extend(token),
        {"get", "time", "set"},
    ),
    "save_step": (
        lambda harness: harness.started().token,
        lambda harness, token: harness.save_step(token),
        {"get", "time", "set"},
    ),
    "reserve": (lambda harness: None, lambda harness, _: harness.reserve(), {"get", "time", "set"}),
    "continuation": (
        lambda harness: harness.sending(),
        lambda harness, _: harness.mark_continued(),
        {"get", "time", "set"},
    ),
    "look up": (
        lambda harness: harness.completed(),
        lambda harness, _: run_sync(harness.store.get(harness.key)),
        {"get", "time", "pttl"},
    ),
}


def _begun_and_published(turn: Turn) -> int:
    token = turn.first.started(execution_id=OWNER).token
    turn.second.publish()
    return token


#: The Redis commands of each script for a key that may run again, and how often each.
TURN_COMMANDS: dict[
    str, tuple[Callable[[Turn], Any], Callable[[Turn, Any], object], dict[str, int]]
] = {
    "begin": (
        lambda turn: None,
        lambda turn, _: turn.first.begin(),
        {"get": 3, "time": 1, "set": 2},
    ),
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
        lambda turn: turn.first.started().token,
        lambda turn, token: turn.first.complete(token),
        {"get": 2, "time": 1, "set": 2},
    ),
    "complete while another waits": (
        _begun_and_published,
        lambda turn, token: turn.first.complete(token),
        {"get": 2, "time": 1, "set": 2},
    ),
    "release": (
        lambda turn: turn.first.started().token,
        lambda turn, token: turn.first.release(token),
        {"get": 2, "time": 1, "del": 2},
    ),
    "extend": (
        lambda turn: turn.first.started().token,
        lambda turn, token: turn.first.extend(token),
        {"get": 2, "time": 1, "set": 2},
    ),
    "publish": (
        lambda turn: None,
        lambda turn, _: turn.first.publish(),
        {"get": 1, "time": 1, "set": 1},
    ),
    "publish while one runs": (
        lambda turn: turn.first.started(),
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
    expected = commands if isinstance(commands, dict) else dict.fromkeys(commands, 1)
    assert {name: count for name, count in taken.items() if name in ALL} == expected


#: Of both records, without token and time, for each state of a key that may run again.
TURNS: dict[str, tuple[Callable[[Turn], object], bytes, bytes]] = {
    "started": (
        lambda turn: turn.first.started(execution_id=OWNER),
        b"S\x01" + _FINGERPRINT + _TASK_ID + _WORKER + _OWNER + b"\x00",
        b"S\x01" + _FINGERPRINT + _TASK_ID + _WORKER + _OWNER + b"\x00",
    ),
    "completed": (
        lambda turn: turn.first.completed(execution_id=OWNER),
        b"C\x01" + _FINGERPRINT + _TASK_ID + _WORKER + _OWNER + b'\x04json"charged"',
        b"C\x01" + _FINGERPRINT + _TASK_ID + _WORKER + _OWNER + b'\x04json"charged"',
    ),
    "completed, and the next one is reserved": (
        lambda turn: turn.first.complete(_begun_and_published(turn)),
        b"C\x01" + _FINGERPRINT + _TASK_ID + _WORKER + _OWNER + b'\x04json"charged"',
        b"R\x00" + _FINGERPRINT + _SECOND_TASK_ID + b"\x00\x00\x00",
    ),
}


@pytest.mark.parametrize("state", TURNS)
def test_records_of_a_key_that_may_run_again(harness: RecordHarness, state: str) -> None:
    make, message, turn = TURNS[state]
    make(Turn(harness, waits=True))

    for record, golden in ((Turn(harness).first, message), (harness, turn)):
        raw = record.raw
        assert raw is not None
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
