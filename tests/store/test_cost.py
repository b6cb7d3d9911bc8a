"""Memory and round trips of a record, on each server."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest
from celery import Celery

from celery_idempotent.core.record import Payload
from celery_idempotent.core.store import run_sync
from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import HOLD_MS, RecordHarness, Turn

VALUE = "x" * 98  # 100 bytes as JSON


def test_a_completed_record_uses_less_memory_than_celerys_result(
    harness: RecordHarness, server: RedisServer, record_property: Callable[[str, object], None]
) -> None:
    app = Celery("shop", backend=server.url, set_as_current=False)
    task_id = str(uuid4())
    app.backend.store_result(task_id, VALUE, "SUCCESS")
    theirs = harness.client.memory_usage(app.backend.get_key_for_task(task_id))
    app.close()

    token = harness.started(task_id=task_id).token
    harness.complete(token, Payload("json", f'"{VALUE}"'.encode()))
    ours = harness.client.memory_usage(harness.name)

    print(f"\n{server.flavour} {server.version}: {ours} bytes, Celery's result {theirs}")
    record_property("bytes", ours)
    record_property("bytes_of_celerys_result", theirs)
    assert ours is not None
    assert theirs is not None
    assert ours <= 300
    assert ours < theirs


def test_a_running_record_uses_no_more_memory_than_a_small_result(harness: RecordHarness) -> None:
    harness.started()

    usage = harness.client.memory_usage(harness.name)

    assert usage is not None
    assert usage <= 300


@pytest.mark.parametrize(
    "call",
    [
        lambda harness, token: harness.begin(),
        lambda harness, token: harness.complete(token),
        lambda harness, token: harness.release(token, HOLD_MS),
        lambda harness, token: harness.extend(token),
        lambda harness, token: harness.save_step(token),
        lambda harness, token: harness.reserve(),
        lambda harness, token: run_sync(harness.store.get(harness.key)),
    ],
    ids=["begin", "complete", "release", "extend", "save_step", "reserve", "get"],
)
def test_each_call_is_one_round_trip(
    proxied: RecordHarness, proxy: Proxy, call: Callable[[RecordHarness, int], object]
) -> None:
    token = proxied.started().token
    call(proxied, token)  # connects and loads the script
    proxied.forget()
    token = proxied.started().token
    before = len(proxy.requests)

    call(proxied, token)

    assert len(proxy.requests) - before == 1


def test_a_key_that_may_run_again_uses_memory_for_each_message(harness: RecordHarness) -> None:
    turn = Turn(harness)
    turn.first.completed()

    of_message = harness.client.memory_usage(turn.first.name)
    of_turn = harness.client.memory_usage(harness.name)

    assert of_turn is not None
    assert of_message is not None
    assert of_turn <= 200
    assert of_message <= 260
