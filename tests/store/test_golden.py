"""Golden records: the bytes that the scripts write, and the commands that each script runs.

Other versions of this library read these bytes, and every call of a task pays for the commands.
tests/golden keeps what each version has stored, with what a later one does with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Tail
from celery_idempotent.core.store import run_sync
from celery_idempotent.core.store.commands import BackendResult
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import CALLS, HOLD_MS, OWNER, Harness, Turn

#: Token and time, which differ from run to run: 7 and 6 bytes.
CHANGING = slice(2, 15)

_FINGERPRINT = b"\x088 bytes!"
_TASK_ID = b"\x00\x11" + b"\x00" + bytes.fromhex("11111111111141118111111111111111")
_SECOND_TASK_ID = b"\x00\x11" + b"\x00" + bytes.fromhex("22222222222242228222222222222222")
_WORKER = b"\x10celery@host/4711"
_OWNER = b"\x088 bytes."

_CALL = _FINGERPRINT + _TASK_ID
_BEGUN = b"B\x01" + _CALL + _WORKER + _OWNER + b"\x00"
_CHARGED, _ERROR = b'\x04json"charged"', b'\x04json{"exc_type": "ValueError"}'

#: The record's bytes for each state and its history, without token and time.
RECORDS: dict[str, tuple[Callable[[Harness], object], bytes]] = {
    "begun": (lambda harness: harness.started(execution_id=OWNER), _BEGUN),
    "alive, with a step": (
        lambda harness: harness.save_step(harness.started(execution_id=OWNER).token),
        b"A" + _BEGUN[1:] + b'\x00\x00\x00\x13\x00\x07reserve\x04json"r-1"',
    ),
    "dead": (Harness.dead, b"a\x01" + _CALL + _WORKER + b"\x0cprocess_lost\x00"),
    "held for a retry": (
        lambda harness: harness.release(harness.started().token, HOLD_MS, generation=12),
        b"W\x00\x00" + _TASK_ID + _WORKER + b"\x0212\x00",
    ),
    "completed": (Harness.completed, b"V\x01" + _CALL + _WORKER + b"\x00" + _CHARGED),
    "completed with a label": (
        lambda harness: harness.complete(harness.started().token, tail=Tail(label="order 42")),
        b"V\x01" + _CALL + _WORKER + b'\x00\x0ejson\n\norder 42"charged"',
    ),
    "sending": (Harness.sending, b"T\x01" + _CALL + _WORKER + b"\x00" + _CHARGED),
    "failed": (Harness.failed, b"E\x01" + _CALL + _WORKER + b"\x00" + _ERROR),
    "replaced": (
        lambda harness: harness.delegate(harness.started().token, 10**9),
        b"D\x01" + _CALL + _WORKER + b"\x0a1000000000\x05=task" + _SECOND_TASK_ID[2:],
    ),
    "poisoned": (
        Harness.poisoned,
        b"E\x02" + _FINGERPRINT + _SECOND_TASK_ID + _WORKER + b"\x00\x00poisoned",
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("state", RECORDS)
def test_the_bytes_of_a_record(harness: Harness, state: str) -> None:
    make, golden = RECORDS[state]
    make(harness)

    raw = harness.raw
    assert raw[: CHANGING.start] + raw[CHANGING.stop :] == golden


#: What the script writes for a result backend.
BACKEND_RESULT = BackendResult("celery-task-meta-1", b'{"status": "SUCCESS"}', 600)


def _nothing(_: Harness) -> None: ...


def _token(harness: Harness) -> int:
    return harness.started().token


WRITES = {"get": 1, "time": 1, "set": 1}
Given, Call = Callable[[Any], Any], Callable[[Any, Any], object]
#: The Redis commands inside each script, on a record of its usual state, and how often each.
COMMANDS: dict[str, tuple[Given, Call, dict[str, int]]] = {
    "begin": (_nothing, lambda harness, _: harness.begin(), WRITES),
    "begin again": (Harness.completed, lambda harness, _: harness.begin(), {"get": 1}),
    "begin of a duplicate": (_token, CALLS["begin"], {"get": 1, "time": 1}),
    "complete": (_token, Harness.complete, WRITES),
    "complete with a result": (
        _token,
        lambda harness, token: harness.complete(token, backend_result=BACKEND_RESULT),
        {"get": 2, "time": 1, "set": 2, "publish": 1},
    ),
    "the result of a replay": (
        Harness.completed,
        lambda harness, _: run_sync(harness.store.write_result(harness.key, BACKEND_RESULT)),
        {**WRITES, "publish": 1},
    ),
    "fail": (_token, Harness.fail, WRITES),
    "release": (_token, Harness.release, {"get": 1, "time": 1, "del": 1}),
    "extend": (_token, Harness.extend, WRITES),
    "reserve": (_nothing, CALLS["reserve"], {**WRITES, "get": 2}),
    "sent": (lambda harness: harness.sending().token, Harness.mark_sent, WRITES),
}
#: The same on a message of a key that may run again.
OF_A_MESSAGE: dict[str, dict[str, int]] = {
    "begin": {"get": 3, "time": 1, "set": 2},
    "begin again": {"get": 1},
    "complete": WRITES,
    "release": {"get": 1, "time": 1, "del": 1},
    "extend": {**WRITES, "pexpire": 1},
}


def commands_of(harness: Harness, given: Given, call: Call) -> dict[str, int]:
    """Returns how often the server has executed each of `ALL` in the call."""
    call(harness, given(harness))  # loads the script
    harness.client.flushdb()
    token = given(harness)
    harness.client.config_resetstat()

    call(harness, token)

    stats = harness.client.info("commandstats")
    taken = {name.removeprefix("cmdstat_"): stats[name]["calls"] for name in stats}
    return {name: count for name, count in taken.items() if name in ALL}


@pytest.mark.parametrize("script", COMMANDS)
def test_a_script_runs_these_commands(harness: Harness, server: RedisServer, script: str) -> None:
    given, call, commands = COMMANDS[script]

    assert commands_of(harness, given, call) == commands
    if script in OF_A_MESSAGE:
        harness.client.flushdb()
        message = Turn(harness, waits=True).first
        assert commands_of(message, given, call) == OF_A_MESSAGE[script]


def test_a_script_runs_these_beside_another_message(harness: Harness, server: RedisServer) -> None:
    turn = Turn(harness, waits=True)
    for given, call, commands in (
        (_nothing, turn.first.publish, {**WRITES, "get": 2}),
        (_token, turn.second.publish, {**WRITES, "get": 2}),
        (_token, turn.second.begin, {"get": 4, "time": 1}),
    ):
        harness.client.flushdb()
        assert commands_of(turn.first, given, lambda *_, call=call: call()) == commands


def test_the_turn_and_the_slot_of_a_key_that_may_run_again(harness: Harness) -> None:
    turn = Turn(harness, waits=True)
    token = turn.first.started(execution_id=OWNER).token
    turn.second.publish()

    assert harness.raw == token.to_bytes(7, "big") + turn.first.name.encode()
    assert (harness.raw or b"")[0] < ord(" "), "never a letter of a record"
    raw = turn.first.raw or b""
    assert raw[: CHANGING.start] + raw[CHANGING.stop :] == _BEGUN
    raw = harness.client.get(harness.store.config.slot_name(harness.key))
    waits = b"W\x00" + _FINGERPRINT + _SECOND_TASK_ID + b"\x00\x010\x00"
    assert raw[: CHANGING.start] + raw[CHANGING.stop :] == waits + turn.second.name.encode()


def test_names_of_messages_are_in_the_slot_of_their_key(harness: Harness) -> None:
    assert harness.name == "idem:shop.charge:PN0MlSPt3FmEwTzQ5dHvBQ"
    odd = Key("shop {1}: ä", "digest")
    assert harness.store.name(odd) == "idem:shop%20%7B1%7D%3A%20%C3%A4:digest"
    assert Turn(harness).first.name == f"idem:{{{harness.name}}}:xMYpJ2mKVu8-QbalnIdbkA"
    assert harness.store.config.slot_name(harness.key) == f"idem:{{{harness.name}}}:"
    kept = harness.store.config.name(harness.key.kept_message("a task id"))
    assert kept.startswith(f"idem:{{{harness.name}}}:message:")


ALL = {*("get", "set", "del", "time", "pttl", "pexpire"),
       *("exists", "hget", "hset", "strlen", "publish")}  # fmt: skip
