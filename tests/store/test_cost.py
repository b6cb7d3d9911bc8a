"""What a record costs, on each server."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest
from celery import Celery

from celery_idempotent.record.payload import Payload
from celery_idempotent.testing.server import RedisServer
from tests.faults.proxy import Proxy
from tests.store.record_harness import HOLD_MS, Scene

VALUE = "x" * 98  # 100 bytes as JSON


def test_a_completed_record_takes_less_than_celerys_own(
    scene: Scene, server: RedisServer, record_property: Callable[[str, object], None]
) -> None:
    app = Celery("shop", backend=server.url, set_as_current=False)
    task_id = str(uuid4())
    app.backend.store_result(task_id, VALUE, "SUCCESS")
    theirs = scene.client.memory_usage(app.backend.get_key_for_task(task_id))
    app.close()

    token = scene.started(task_id=task_id).token
    scene.complete(token, Payload("json", f'"{VALUE}"'.encode()))
    ours = scene.client.memory_usage(scene.name)

    print(f"\n{server.flavour} {server.version}: {ours} bytes, Celery's result {theirs}")
    record_property("bytes", ours)
    record_property("bytes_of_celerys_result", theirs)
    assert ours is not None
    assert theirs is not None
    assert ours <= 300
    assert ours < theirs


def test_a_running_record_takes_no_more_than_a_small_result(scene: Scene) -> None:
    scene.started()

    usage = scene.client.memory_usage(scene.name)

    assert usage is not None
    assert usage <= 300


@pytest.mark.parametrize(
    "call",
    [
        lambda scene, token: scene.begin(),
        lambda scene, token: scene.complete(token),
        lambda scene, token: scene.release(token, HOLD_MS),
        lambda scene, token: scene.extend(token),
        lambda scene, token: scene.step(token),
        lambda scene, token: scene.reserve(),
        lambda scene, token: scene.store.look_up(scene.key),
    ],
    ids=["begin", "complete", "release", "extend", "save_step", "reserve", "get"],
)
def test_each_call_is_one_round_trip(
    proxied: Scene, proxy: Proxy, call: Callable[[Scene, int], object]
) -> None:
    token = proxied.started().token
    call(proxied, token)  # connects, and teaches the script
    proxied.forget()
    token = proxied.started().token
    before = len(proxy.requests)

    call(proxied, token)

    assert len(proxy.requests) - before == 1


def test_running_takes_two_and_replaying_one(proxied: Scene, proxy: Proxy) -> None:
    proxied.completed()
    proxied.begin()
    proxied.forget()
    before = len(proxy.requests)

    proxied.complete(proxied.begin().token)
    run = len(proxy.requests) - before
    proxied.begin()
    replay = len(proxy.requests) - before - run

    assert (run, replay) == (2, 1)
