"""The cost of a call during an outage."""

from __future__ import annotations

from contextlib import suppress

from celery_idempotent import Idempotency, StoreUnavailableError
from celery_idempotent.core.store.run_sync import run_sync
from labs.benchmarks.bench import begin_command, keys, private_server
from labs.benchmarks.figure import Figure, Goal, MeasureResult, Spread
from labs.benchmarks.interleaving import Call, interleave
from labs.benchmarks.measure import Measure, ProgressCallback

REJECTED, UNPROTECTED = "rejected call", "unprotected call (on_store_error=run)"
STORE = "rejection by the store alone"


class OpenBreaker(Measure):
    """The duration of a call of an idempotent function while the breaker is open.

    It includes the key, the signal and the log record, which is written nowhere. The few calls
    that probe Redis do not affect the median.
    """

    name = "outage"
    title = "call during an outage, breaker open"

    ROUNDS, EACH = 40, 200

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        with private_server() as server:
            idem = Idempotency(server.url)
            rejected = idem.idempotent(_no_op, name="shop.charge", on_store_error="raise")
            unprotected = idem.idempotent(_no_op, name="shop.charge", on_store_error="run")
            server.kill()
            store, new_keys = idem.executor.store, keys()
            calls = {
                REJECTED: _suppress(lambda: rejected(1)),
                UNPROTECTED: lambda: unprotected(1),
                STORE: _suppress(lambda: run_sync(store.execute(begin_command(next(new_keys))))),
            }
            while not store.node_of(next(new_keys)).breaker.open:
                calls[REJECTED]()
            times = interleave(calls, self.ROUNDS, self.EACH, progress)
        goals = {REJECTED: Goal(50), UNPROTECTED: Goal(50)}
        return MeasureResult(
            [
                Figure.from_spread(name, Spread.from_values(each), "µs", goals.get(name))
                for name, each in times.items()
            ],
            raw={"medians of rounds, µs": times},
        )


def _no_op(order: int) -> None:
    """Does nothing."""


def _suppress(call: Call) -> Call:
    def suppressing() -> None:
        with suppress(StoreUnavailableError):
            call()

    return suppressing
