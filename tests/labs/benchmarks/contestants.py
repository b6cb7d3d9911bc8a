"""Who does the same, or less, with one client: each contestant is one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

from celery_idempotent import Idempotency
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.record_store import RecordStore
from tests.labs.benchmarks.bench import Bench
from tests.labs.benchmarks.turns import Call

RUN, REPLAY = "begin + complete", "replay"
GATED, GATED_REPLAY = "a gated function, first call", "a gated function, replay"
#: Of a run, and of a replay.
FLOOR, FLOOR_ONE = "two no-op EVALSHA", "one no-op EVALSHA"
CLIENT_FLOOR, CLIENT_FLOOR_ONE = (
    f"{FLOOR} by redis-py's client",
    f"{FLOOR_ONE} by redis-py's client",
)
BY_CLIENT = f"{RUN} by redis-py's client"
FOR_NOTHING = "what a run sends, to no-op scripts"
LOCK, OTHER_LOCK = "redis-py Lock, acquire + release", "python-redis-lock, acquire + release"
POWERTOOLS, POWERTOOLS_REPLAY = "Powertools, first call", "Powertools, replay"

VALUE = "x" * 98  # 100 bytes as JSON

Single = Callable[[int], object]


def contestants(bench: Bench) -> dict[str, Call]:
    """All that can be had here; Powertools and python-redis-lock come with the extra `bench`."""
    done = bench.run()
    by_client = RecordStore(StoreConfig(client=bench.client), lambda record: record.body)
    calls: dict[str, Call] = {
        RUN: bench.run,
        FLOOR: lambda: (bench.no_op_on_line(), bench.no_op_on_line()),
        CLIENT_FLOOR: lambda: (bench.no_op(), bench.no_op()),
        FOR_NOTHING: bench.run_for_nothing,
        BY_CLIENT: lambda: bench.run(store=by_client),
        LOCK: lambda: _hold(bench.client.lock(_name(bench), timeout=60)),
        REPLAY: lambda: bench.begin(done),
        FLOOR_ONE: bench.no_op_on_line,
        CLIENT_FLOOR_ONE: bench.no_op,
    }
    calls |= _first_and_again(app_tasks(bench), GATED, GATED_REPLAY)
    calls |= _other_lock(bench)
    return calls | _powertools(bench)


def app_tasks(bench: Bench) -> Single:
    """A function behind the gate, its key derived from its argument."""
    idem = Idempotency(bench.server.url)

    @idem.idempotent(name="shop.charge")
    def charge(order: int) -> str:
        return VALUE

    return charge


def _first_and_again(call: Single, first: str, again: str) -> dict[str, Call]:
    orders = count(1)
    call(0)
    return {first: lambda: call(next(orders)), again: lambda: call(0)}


def _other_lock(bench: Bench) -> dict[str, Call]:
    try:
        import redis_lock
    except ImportError:
        return {}
    return {OTHER_LOCK: lambda: _hold(redis_lock.Lock(bench.client, _name(bench), expire=60))}


def _powertools(bench: Bench) -> dict[str, Call]:
    try:
        from aws_lambda_powertools.utilities.idempotency import (
            IdempotencyConfig,
            idempotent_function,
        )
        from aws_lambda_powertools.utilities.idempotency.persistence.cache import (
            CachePersistenceLayer,
        )
    except ImportError:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its own class bears the old name
        layer = CachePersistenceLayer(client=bench.client)
    config = IdempotencyConfig(expires_after_seconds=86_400, lambda_context=_Context())

    @idempotent_function(data_keyword_argument="order", persistence_store=layer, config=config)
    def charge(order: int) -> str:
        return VALUE

    return _first_and_again(lambda n: charge(order=n), POWERTOOLS, POWERTOOLS_REPLAY)


class _Context:
    """All that Powertools asks of AWS Lambda: how long the run may still take."""

    @staticmethod
    def get_remaining_time_in_millis() -> int:
        return 60_000


def _hold(lock: Any) -> None:
    lock.acquire()
    lock.release()


def _name(bench: Bench) -> str:
    return f"lock:{next(bench.fresh)}"
