"""Redis forgets the scripts (flushed, restarted, failed over), and nobody notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_idempotent.key.key import Key
from celery_idempotent.store.commands import Extension
from tests.store.record_harness import HOLD_MS, LEASE_MS, RETENTION_MS, SECOND, Scene, calls

pytestmark = pytest.mark.core

CALLS: dict[str, Callable[[Scene, int], str]] = {
    "begin": lambda scene, token: scene.begin(task_id=SECOND).case,
    "extend": lambda scene, token: scene.extend(token).case,
    "save_step": lambda scene, token: scene.step(token).case,
    "complete": lambda scene, token: scene.complete(token).case,
    "fail": lambda scene, token: scene.fail(token).case,
    "release": lambda scene, token: scene.release(token, HOLD_MS).case,
    "abandon": lambda scene, token: scene.abandon().case,
    "reserve": lambda scene, token: scene.reserve(SECOND).case,
    "forget": lambda scene, token: scene.forget(token).case,
    "mark_continued": lambda scene, token: scene.dispatched().case,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_teaches_its_script_again(scene: Scene, call: str) -> None:
    wanted = CALLS[call](scene, scene.started().token)
    scene.forget()
    token = scene.started().token
    scene.client.script_flush()

    assert CALLS[call](scene, token) == wanted
    assert calls(scene.client, "eval") >= 1


def test_each_is_taught_once(scene: Scene) -> None:
    scene.client.script_flush()
    for _ in range(5):
        scene.completed()
        scene.forget()

    assert calls(scene.client, "eval") == 3  # begin, complete, forget
    assert calls(scene.client, "evalsha") == 15


def test_a_heartbeat_of_many_leases_teaches_it_once(scene: Scene) -> None:
    keys = [Key("shop.charge", f"{number:022}") for number in range(5)]
    leases = [
        Extension(key, scene.started(key=key, lease_ms=1000).token, LEASE_MS, RETENTION_MS)
        for key in keys
    ]
    scene.client.script_flush()

    answers = scene.store.extend(leases)

    assert [getattr(answer, "case", answer) for answer in answers] == ["ok"] * 5
    deadlines = [scene.store.look_up(key) for key in keys]
    assert all(record and record.at_ms > scene.now_ms() + 1000 for record in deadlines)
