"""What the apps of all frameworks share: an engine, and a ledger that counts their requests.

STORE_URL is the Redis of the engine, LEDGER_URL that of the ledger.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import redis

from celery_idempotent import Idempotency
from tests.http.drivers.web_server import CHUNK, LEASE, MAX_BYTES

ledger = redis.Redis.from_url(os.environ["LEDGER_URL"])
idem = Idempotency(
    os.environ["STORE_URL"],
    key_prefix="web",
    name="web",
    lease=LEASE,
    redis_timeout=0.5,
    max_result_size=MAX_BYTES,
)
OPTIONS: dict[str, Any] = {"idem": idem, "max_body_bytes": MAX_BYTES}


def count(order: str) -> int:
    """Counts a request for `order`, which is its effect, and returns their number."""
    return int(ledger.incr(f"requests:{order}"))  # type: ignore[arg-type]


def wait_for_release(order: str) -> None:
    """Waits until the test releases the first request for `order`."""
    ledger.blpop([f"release:{order}"], timeout=60)
    ledger.rpush(f"release:{order}", "for the others")


def is_allowed(key: str) -> bool:
    """Returns whether the test lets the client have the stored response to the request `key`."""
    return not ledger.exists(f"revoked:{key}")


def chunks(size: int) -> Iterator[bytes]:
    """Returns a body of `size` chunks, one by one."""
    for _ in range(size):
        yield CHUNK


def copy_of(endpoint: Any) -> Any:
    """Returns a function that has no route yet."""
    copy = FunctionType(endpoint.__code__, endpoint.__globals__, argdefs=endpoint.__defaults__)
    copy.__annotations__, copy.__qualname__ = endpoint.__annotations__, endpoint.__qualname__
    return copy
