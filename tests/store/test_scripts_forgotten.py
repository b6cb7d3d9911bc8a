"""A server without the scripts (flushed, restarted, failed over) gets them again."""

from __future__ import annotations

import pytest

from celery_idempotent.core.store import run_sync
from tests.store.record_harness import CALLS, Harness, calls, keys

pytestmark = pytest.mark.core


@pytest.mark.parametrize("call", CALLS)
def test_a_call_loads_its_script_again(harness: Harness, call: str) -> None:
    wanted = CALLS[call](harness, harness.started().token).case
    harness.forget()
    token = harness.started().token
    harness.client.script_flush()

    assert CALLS[call](harness, token).case == wanted
    assert calls(harness.client, "eval") >= 1


def test_each_script_is_loaded_once(harness: Harness) -> None:
    harness.client.script_flush()
    for _ in range(5):
        harness.completed()
        harness.forget()

    assert calls(harness.client, "eval") == 3  # begin, complete, forget
    # One more on a cluster, where the first reply has the time of the server.
    assert calls(harness.client, "evalsha") in (15, 16)


def test_a_heartbeat_of_many_leases_loads_the_script_once(harness: Harness) -> None:
    leases = [harness.lease_of(key, lease_ms=1000) for key in keys(5)]
    harness.client.script_flush()

    replies = run_sync(harness.store.extend(leases))

    assert [getattr(reply, "case", reply) for reply in replies] == ["ok"] * 5
    deadlines = [run_sync(harness.store.get(key)) for key in keys(5)]
    assert all(record and record.at_ms > harness.now_ms() + 1000 for record in deadlines)
