"""What an outage costs a caller."""

from __future__ import annotations

from contextlib import suppress

from celery_idempotent import Idempotency, StoreUnavailableError
from tests.labs.benchmarks.bench import beginning, keys, own_server
from tests.labs.benchmarks.figure import Figure, Finding, Goal, Spread
from tests.labs.benchmarks.measure import Measure, Show
from tests.labs.benchmarks.turns import Call, take_turns

REJECTED, UNPROTECTED = "a gated call, refused", "a gated call, run without protection"
STORE = "… of it the store's refusal"


class OutageLogger(Measure):
    """A call of a gated function while the breaker is open, from the call to its end.

    Key, signal and log record included; the log is written nowhere. The few calls that ask whether
    Redis is back do not show in a median.
    """

    name = "outage"
    title = "outage, breaker open"

    ROUNDS, EACH = 40, 200

    def measure(self, show: Show) -> Finding:
        with own_server() as server:
            idem = Idempotency(server.url)
            refused = idem.idempotent(_nothing, name="shop.charge", on_store_error="raise")
            unprotected = idem.idempotent(_nothing, name="shop.charge", on_store_error="run")
            server.kill()
            store, fresh = idem.executor.store, keys()
            calls = {
                REJECTED: _refused(lambda: refused(1)),
                UNPROTECTED: lambda: unprotected(1),
                STORE: _refused(lambda: store.execute(beginning(next(fresh)))),
            }
            while not store.breaker.open:
                calls[REJECTED]()
            times = take_turns(calls, self.ROUNDS, self.EACH, show)
        goals = {REJECTED: Goal(50), UNPROTECTED: Goal(50)}
        return Finding(
            [
                Figure.spread_of(name, Spread.of(each), "µs", goals.get(name))
                for name, each in times.items()
            ],
            raw={"medians of rounds, µs": times},
        )


def _nothing(order: int) -> None:
    """What is called."""


def _refused(call: Call) -> Call:
    def refused() -> None:
        with suppress(StoreUnavailableError):
            call()

    return refused
