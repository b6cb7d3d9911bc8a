"""Golden records: the bytes that the scripts write, and the commands that each script runs.

Other versions of this library read these bytes, and every call of a task pays for the commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.testing.server import RedisServer
from tests.store.record_harness import HOLD_MS, OWNER, RecordHarness

#: Token and time, which differ from run to run: 7 and 6 bytes.
CHANGING = slice(2, 15)

_FINGERPRINT = b"\x088 bytes!"
_TASK_ID = b"\x00\x11" + b"\x00" + bytes.fromhex("11111111111141118111111111111111")
_WORKER = b"\x10celery@host/4711"

#: The record's bytes for each state and its history, without token and time.
RECORDS: dict[str, tuple[Callable[[RecordHarness], object], bytes]] = {
    "reserved": (
        lambda harness: harness.reserved(),
        b"R\x00" + _FINGERPRINT + _TASK_ID + b"\x00\x00\x00",
    ),
    "started": (
        lambda harness: harness.started(execution_id=OWNER),
        b"S\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b"\x1016 bytes of name\x00",
    ),
    "started with a step": (
        lambda harness: harness.save_step(harness.started(execution_id=OWNER).token),
        b"S\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b"\x1016 bytes of name\x00"
        b'\x00\x00\x00\x13\x00\x07reserve\x04json"r-1"',
    ),
    "completed": (
        lambda harness: harness.completed(),
        b"C\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b'\x00\x04json"charged"',
    ),
    "completed and continued": (
        lambda harness: (harness.completed(), harness.mark_continued()),
        b"D\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b'\x00\x04json"charged"',
    ),
    "failed": (
        lambda harness: harness.failed(),
        b"F\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b'\x00\x04json{"exc_type": "ValueError"}',
    ),
    "failed and continued": (
        lambda harness: (harness.failed(), harness.mark_continued()),
        b"G\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b'\x00\x04json{"exc_type": "ValueError"}',
    ),
    "poisoned": (
        lambda harness: harness.poisoned(),
        b"F\x01"
        + _FINGERPRINT
        + b"\x00\x11\x00"
        + bytes.fromhex("22222222222242228222222222222222")
        + _WORKER
        + b"\x00\x00poisoned",
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


#: The Redis commands inside each script, on a record of its usual state.
COMMANDS: dict[
    str, tuple[Callable[[RecordHarness], Any], Callable[[RecordHarness, Any], object], set[str]]
] = {
    "begin": (lambda harness: None, lambda harness, _: harness.begin(), {"get", "time", "set"}),
    "begin again": (
        lambda harness: harness.completed(),
        lambda harness, _: harness.begin(),
        {"get"},
    ),
    "complete": (
        lambda harness: harness.started().token,
        lambda harness, token: harness.complete(token),
        {"get", "time", "set"},
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
    "mark_continued": (
        lambda harness: harness.completed(),
        lambda harness, _: harness.mark_continued(),
        {"get", "set"},
    ),
    "look up": (
        lambda harness: harness.completed(),
        lambda harness, _: run_sync(harness.store.get(harness.key)),
        {"get", "time", "pttl"},
    ),
}


@pytest.mark.parametrize("script", COMMANDS)
def test_a_script_takes_each_of_its_commands_once(
    harness: RecordHarness, server: RedisServer, script: str
) -> None:
    given, call, commands = COMMANDS[script]
    call(harness, given(harness))  # loads the script
    harness.forget()
    token = given(harness)
    harness.client.config_resetstat()

    call(harness, token)

    stats = harness.client.info("commandstats")
    taken = {name.removeprefix("cmdstat_"): stats[name]["calls"] for name in stats}
    assert {name: count for name, count in taken.items() if name in ALL} == dict.fromkeys(
        commands, 1
    )


ALL = {"get", "set", "del", "time", "pttl", "pexpire", "exists", "hget", "hset", "strlen"}
