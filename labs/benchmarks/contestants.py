"""The calls that are compared with one client: celery-idempotent, lower bounds and others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

from celery_idempotent import Idempotency
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.record_store import RecordStore
from labs.benchmarks.bench import Bench
from labs.benchmarks.interleaving import Call

RUN, REPLAY = "begin + complete", "replay"
FUNCTION, FUNCTION_REPLAY = "idempotent function, first call", "idempotent function, replay"
#: The lower bounds of a run and of a replay.
TWO_NO_OPS, ONE_NO_OP = "two no-op EVALSHA", "one no-op EVALSHA"
CLIENT_TWO_NO_OPS, CLIENT_ONE_NO_OP = (
    f"{TWO_NO_OPS} by redis-py's client",
    f"{ONE_NO_OP} by redis-py's client",
)
BY_CLIENT = f"{RUN} by redis-py's client"
RUN_NO_OP = "begin + complete as no-op scripts"
LOCK, PYTHON_REDIS_LOCK = "redis-py Lock, acquire + release", "python-redis-lock, acquire + release"
POWERTOOLS, POWERTOOLS_REPLAY = "Powertools, first call", "Powertools, replay"

VALUE = "x" * 98  # 100 bytes as JSON

OrderFunction = Callable[[int], object]


def contestants(bench: Bench) -> dict[str, Call]:
    """Returns the installed ones; group `bench` has Powertools and python-redis-lock."""
    completed = bench.run()
    by_client = RecordStore(StoreConfig(client=bench.client), lambda record: record.body)
    calls: dict[str, Call] = {
        RUN: bench.run,
        TWO_NO_OPS: lambda: (bench.no_op_by_transport(), bench.no_op_by_transport()),
        CLIENT_TWO_NO_OPS: lambda: (bench.no_op(), bench.no_op()),
        RUN_NO_OP: bench.run_no_op_scripts,
        BY_CLIENT: lambda: bench.run(store=by_client),
        LOCK: lambda: _acquire_release(bench.client.lock(_lock_name(bench), timeout=60)),
        REPLAY: lambda: bench.begin(completed),
        ONE_NO_OP: bench.no_op_by_transport,
        CLIENT_ONE_NO_OP: bench.no_op,
    }
    calls |= _first_and_replay(_idempotent_function(bench), FUNCTION, FUNCTION_REPLAY)
    calls |= _python_redis_lock(bench)
    return calls | _powertools(bench)


def _idempotent_function(bench: Bench) -> OrderFunction:
    idem = Idempotency(bench.server.url)

    @idem.idempotent(name="shop.charge")
    def charge(order: int) -> str:
        return VALUE

    return charge


def _first_and_replay(call: OrderFunction, first: str, replay: str) -> dict[str, Call]:
    orders = count(1)
    call(0)
    return {first: lambda: call(next(orders)), replay: lambda: call(0)}


def _python_redis_lock(bench: Bench) -> dict[str, Call]:
    try:
        import redis_lock
    except ImportError:
        return {}

    def call() -> None:
        _acquire_release(redis_lock.Lock(bench.client, _lock_name(bench), expire=60))

    return {PYTHON_REDIS_LOCK: call}


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
        warnings.simplefilter("ignore", DeprecationWarning)  # of Powertools itself
        layer = CachePersistenceLayer(client=bench.client)
    config = IdempotencyConfig(expires_after_seconds=86_400, lambda_context=_Context())

    @idempotent_function(data_keyword_argument="order", persistence_store=layer, config=config)
    def charge(order: int) -> str:
        return VALUE

    return _first_and_replay(lambda n: charge(order=n), POWERTOOLS, POWERTOOLS_REPLAY)


class _Context:
    """The part of AWS Lambda's context that Powertools uses."""

    @staticmethod
    def get_remaining_time_in_millis() -> int:
        return 60_000


def _acquire_release(lock: Any) -> None:
    lock.acquire()
    lock.release()


def _lock_name(bench: Bench) -> str:
    return f"lock:{next(bench.new_keys)}"
