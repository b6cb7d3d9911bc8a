"""How many lines a worker logs of calls that go wrong in the same way."""

from __future__ import annotations

import re

import pytest

from tests.waiting import SOON
from tests.worker.harness import Shop
from tests.worker.tasks import charge, misruled, short_lease

pytestmark = pytest.mark.worker

CALLS = 40


@pytest.mark.parametrize("cause", ["KeyReusedError", "KeyRuleError"])
def test_a_refused_call_is_one_line_with_one_traceback_a_minute(
    shop: Shop, order: str, cause: str
) -> None:
    (worker,) = shop.workers
    charge.delay(order, 1).get(timeout=SOON)
    worker.new_logs()
    publish = charge.delay if cause == "KeyReusedError" else misruled.delay
    calls = [(order, number + 2) for number in range(CALLS)]
    if cause == "KeyRuleError":
        calls = [("raises", f"{order}-{number}") for number in range(CALLS)]
    results = [publish(*call) for call in calls]
    for result in results:
        result.get(timeout=SOON, propagate=False)
    for result in results:
        worker.wait_for_log(f"[{result.id}] raised unexpected")

    lines = worker.new_logs().splitlines()
    for result in results:
        about = [line for line in lines if result.id in line and " received" not in line]
        assert len(about) == 1, about
        assert f"raised unexpected: {cause}" in about[0]
    processes = {name for line in lines for name in re.findall(r": ERROR/([\w-]+)\]", line)}
    starts = sum(line.startswith("Traceback") for line in lines)
    # That of the error, and that of its cause; another test may have logged it in this minute.
    assert starts <= len(processes) * (2 if cause == "KeyRuleError" else 1)
    assert len(processes) < CALLS / 4


def test_a_record_that_is_gone_is_not_a_lost_lease(shop: Shop, order: str) -> None:
    (worker,) = shop.workers
    worker.new_logs()
    shop.ledger.hold(order)
    result = short_lease.delay(order)
    shop.ledger.wait_for_run(order)
    store = short_lease.idempotency_configuration.executor.store
    store.client.delete(store.name(short_lease.idempotency_key_of(order)))
    worker.wait_for_log("has lost its record, which Redis has evicted or deleted")
    shop.ledger.release(order)
    result.get(timeout=SOON)

    assert "has lost its lease" not in worker.new_logs()
    assert shop.ledger.wait_for_signal(result.id, "lease_lost")
