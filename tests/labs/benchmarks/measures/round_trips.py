"""Round trips of the gate."""

from __future__ import annotations

from collections.abc import Callable

from celery_idempotent import Decision, Idempotency
from tests.faults.proxy import Proxy
from tests.labs.benchmarks.bench import own_server
from tests.labs.benchmarks.figure import Figure, Finding, Goal
from tests.labs.benchmarks.measure import Measure, Show


class RoundTrips(Measure):
    """How often a call waits for Redis, counted by a proxy on the wire."""

    name = "trips"
    title = "round trips"
    counts = True

    def measure(self, show: Show) -> Finding:
        with own_server() as server, Proxy(server.url) as proxy:
            idem = Idempotency(proxy.url, on_conflict="raise")
            charge = idem.idempotent(lambda order: order, name="shop.charge")
            charge("warm")  # connects, and teaches the scripts

            def trips(call: Callable[[], object]) -> int:
                before = len(proxy.requests)
                call()
                return len(proxy.requests) - before

            def conflict() -> None:
                with idem.execution("held") as execution:
                    assert execution.decision is Decision.CONFLICT

            run, replay = trips(lambda: charge(1)), trips(lambda: charge(1))
            with idem.execution("held") as holder:
                refused = trips(conflict)
                holder.complete()
            idem.executor.store.close()
        return Finding(
            [
                Figure("run", run, goal=Goal(2, "=")),
                Figure("replay", replay, goal=Goal(1, "=")),
                Figure("conflict", refused, goal=Goal(1, "=")),
            ]
        )
