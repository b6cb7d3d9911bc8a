"""Round trips per call."""

from __future__ import annotations

from collections.abc import Callable

from celery_idempotent import Decision, Idempotency
from celery_idempotent.core.store.run_sync import run_sync
from labs.benchmarks.bench import private_server
from labs.benchmarks.figure import Figure, Goal, MeasureResult
from labs.benchmarks.measure import Measure, ProgressCallback
from tests.faults.proxy import Proxy


class RoundTrips(Measure):
    """The round trips of one call, counted by a proxy between client and server."""

    name = "trips"
    title = "round trips"
    is_exact = True

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        with private_server() as server, Proxy(server.url) as proxy:
            idem = Idempotency(proxy.url, on_conflict="raise")
            charge = idem.idempotent(lambda order: order, name="shop.charge")
            charge("warm-up")  # connects and loads the scripts

            def round_trips(call: Callable[[], object]) -> int:
                before = len(proxy.requests)
                call()
                return len(proxy.requests) - before

            def conflict() -> None:
                with idem.execution("held") as duplicate:
                    assert duplicate.decision is Decision.CONFLICT

            run, replay = round_trips(lambda: charge(1)), round_trips(lambda: charge(1))
            with idem.execution("held") as execution:
                rejected = round_trips(conflict)
                execution.complete()
            run_sync(idem.executor.store.aclose())
        return MeasureResult(
            [
                Figure("run", run, goal=Goal(2, "=")),
                Figure("replay", replay, goal=Goal(1, "=")),
                Figure("conflict", rejected, goal=Goal(1, "=")),
            ]
        )
