"""Golden records: the bytes that the scripts write, and the commands that each takes to do so.

Other versions of this library read these bytes, and every call of a task pays for the commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.testing.server import RedisServer
from tests.store.record_harness import HOLD_MS, OWNER, Scene

#: Token and time, which differ from run to run: 7 and 6 bytes.
CHANGING = slice(2, 15)

_FINGERPRINT = b"\x088 bytes!"
_TASK_ID = b"\x00\x11" + b"\x00" + bytes.fromhex("11111111111141118111111111111111")
_WORKER = b"\x10celery@host/4711"

#: State, and how it comes about: the record's bytes without the changing ones.
RECORDS: dict[str, tuple[Callable[[Scene], object], bytes]] = {
    "reserved": (
        lambda scene: scene.reserved(),
        b"R\x00" + _FINGERPRINT + _TASK_ID + b"\x00\x00\x00",
    ),
    "started": (
        lambda scene: scene.started(owner=OWNER),
        b"S\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b"\x1016 bytes of name\x00",
    ),
    "started with a step": (
        lambda scene: scene.step(scene.started(owner=OWNER).token),
        b"S\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b"\x1016 bytes of name\x00"
        b'\x00\x00\x00\x13\x00\x07reserve\x04json"r-1"',
    ),
    "completed": (
        lambda scene: scene.completed(),
        b"C\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b'\x00\x04json"charged"',
    ),
    "completed and continued": (
        lambda scene: (scene.completed(), scene.dispatched()),
        b"D\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b'\x00\x04json"charged"',
    ),
    "failed": (
        lambda scene: scene.failed(),
        b"F\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b'\x00\x04json{"exc_type": "ValueError"}',
    ),
    "failed and continued": (
        lambda scene: (scene.failed(), scene.dispatched()),
        b"G\x01" + _FINGERPRINT + _TASK_ID + _WORKER + b'\x00\x04json{"exc_type": "ValueError"}',
    ),
    "poisoned": (
        lambda scene: scene.poisoned(),
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
def test_records_are_those_of_every_version_before(scene: Scene, state: str) -> None:
    make, golden = RECORDS[state]
    make(scene)

    raw = scene.raw
    assert raw is not None
    assert raw[: CHANGING.start] + raw[CHANGING.stop :] == golden


#: Script, and what it does on a record of its usual state: Redis commands inside the script.
COMMANDS: dict[str, tuple[Callable[[Scene], Any], Callable[[Scene, Any], object], set[str]]] = {
    "begin": (lambda scene: None, lambda scene, _: scene.begin(), {"get", "time", "set"}),
    "begin again": (
        lambda scene: scene.completed(),
        lambda scene, _: scene.begin(),
        {"get"},
    ),
    "complete": (
        lambda scene: scene.started().token,
        lambda scene, token: scene.complete(token),
        {"get", "time", "set"},
    ),
    "fail": (
        lambda scene: scene.started().token,
        lambda scene, token: scene.fail(token),
        {"get", "time", "set"},
    ),
    "release": (
        lambda scene: scene.started().token,
        lambda scene, token: scene.release(token),
        {"get", "time", "del"},
    ),
    "release and hold": (
        lambda scene: scene.started().token,
        lambda scene, token: scene.release(token, HOLD_MS),
        {"get", "time", "set"},
    ),
    "extend": (
        lambda scene: scene.started().token,
        lambda scene, token: scene.extend(token),
        {"get", "time", "set"},
    ),
    "save_step": (
        lambda scene: scene.started().token,
        lambda scene, token: scene.step(token),
        {"get", "time", "set"},
    ),
    "reserve": (lambda scene: None, lambda scene, _: scene.reserve(), {"get", "time", "set"}),
    "mark_continued": (
        lambda scene: scene.completed(),
        lambda scene, _: scene.dispatched(),
        {"get", "set"},
    ),
    "look up": (
        lambda scene: scene.completed(),
        lambda scene, _: scene.store.look_up(scene.key),
        {"get", "time", "pttl"},
    ),
}


@pytest.mark.parametrize("script", COMMANDS)
def test_a_script_takes_each_of_its_commands_once(
    scene: Scene, server: RedisServer, script: str
) -> None:
    given, call, commands = COMMANDS[script]
    call(scene, given(scene))  # makes the script known
    scene.forget()
    token = given(scene)
    scene.client.config_resetstat()

    call(scene, token)

    stats = scene.client.info("commandstats")
    taken = {name.removeprefix("cmdstat_"): stats[name]["calls"] for name in stats}
    assert {name: count for name, count in taken.items() if name in ALL} == dict.fromkeys(
        commands, 1
    )


ALL = {"get", "set", "del", "time", "pttl", "pexpire", "exists", "hget", "hset", "strlen"}
