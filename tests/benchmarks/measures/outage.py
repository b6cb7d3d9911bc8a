"""What an outage costs a caller."""

from __future__ import annotations

import logging
from contextlib import suppress

from celery_idempotent import Idempotency, StoreUnavailableError
from celery_idempotent.testing.server import RedisServer
from tests.benchmarks.bench import beginning, keys
from tests.benchmarks.figure import Figure, Finding, Goal, Spread
from tests.benchmarks.measure import Measure, Show
from tests.benchmarks.turns import Call, take_turns

REFUSED, UNPROTECTED = "a gated call, refused", "a gated call, run without protection"
STORE = "… of it the store's refusal"


class Outage(Measure):
    """A call of a gated function while the breaker is open, from the call to its end.

    Key, signal and log records included; the log is not written anywhere.
    """

    name = "outage"
    title = "outage, breaker open"

    ROUNDS, EACH = 40, 200

    def measure(self, show: Show) -> Finding:
        log = logging.getLogger("celery_idempotent")
        log.addHandler(logging.NullHandler())
        log.propagate = False
        with RedisServer.start() as server:
            # The pause is the longest there is, so that no probe is measured.
            idem = Idempotency(server.url, breaker_pause=3_600)
            refused = idem.idempotent(_nothing, name="shop.charge", on_store_error="raise")
            unprotected = idem.idempotent(_nothing, name="shop.charge", on_store_error="run")
            server.kill()
            store, fresh = idem.gate.store, keys()
            calls = {
                REFUSED: _refused(lambda: refused(1)),
                UNPROTECTED: lambda: unprotected(1),
                STORE: _refused(lambda: store.execute(beginning(next(fresh)))),
            }
            _open(store)
            times = take_turns(calls, self.ROUNDS, self.EACH, show)
        goals = {REFUSED: Goal(50), UNPROTECTED: Goal(50)}
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
