"""Memory and round trips of a record, on each server."""

from __future__ import annotations

from uuid import uuid4

import pytest
from celery import Celery

from celery_idempotent.core.record import Payload
from celery_idempotent.core.store import run_sync
from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import CALLS, Harness, Turn

VALUE = "x" * 98  # 100 bytes as JSON


def test_an_outcome_is_smaller_than_celerys_result(harness: Harness, server: RedisServer) -> None:
    app = Celery("shop", backend=server.url, set_as_current=False)
    task_id = str(uuid4())
    app.backend.store_result(task_id, VALUE, "SUCCESS")
    theirs = harness.client.memory_usage(app.backend.get_key_for_task(task_id)) or 0
    app.close()

    token = harness.started(task_id=task_id).token
    harness.complete(token, Payload("json", f'"{VALUE}"'.encode()))
    ours = harness.client.memory_usage(harness.name) or 0

    assert 0 < ours <= 300
    assert ours < theirs


def test_a_running_record_uses_no_more_memory_than_a_small_result(harness: Harness) -> None:
    harness.started()

    assert 0 < (harness.client.memory_usage(harness.name) or 0) <= 300


@pytest.mark.parametrize("call", [*CALLS, "get"])
def test_each_call_is_one_round_trip(proxied: Harness, proxy: Proxy, call: str) -> None:
    def send(token: int) -> object:
        if call == "get":
            return run_sync(proxied.store.get(proxied.key))
        return CALLS[call](proxied, token)

    send(proxied.started().token)  # connects and loads the script
    proxied.forget()
    token = proxied.started().token
    before = len(proxy.requests)

    send(token)

    assert len(proxy.requests) - before == 1


def test_a_key_that_may_run_again_uses_memory_for_each_message(harness: Harness) -> None:
    turn = Turn(harness)
    turn.first.completed()

    assert 0 < (harness.client.memory_usage(harness.name) or 0) <= 200
    assert 0 < (harness.client.memory_usage(turn.first.name) or 0) <= 260
