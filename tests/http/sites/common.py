"""What the apps of all frameworks share: an engine, and what they do with a request.

STORE_URL is the Redis of the engine, LEDGER_URL that of the ledger, which counts the requests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import redis

from celery_idempotent import Idempotency
from tests.http.drivers.web_server import CHUNK, LEASE, MAX_BYTES

ledger = redis.Redis.from_url(os.environ["LEDGER_URL"])
limits = {"lease": LEASE, "redis_timeout": 0.5, "max_result_size": MAX_BYTES}
idem = Idempotency(os.environ["STORE_URL"], key_prefix="web", name="web", **limits)
OPTIONS: dict[str, Any] = {"idem": idem, "max_body_bytes": MAX_BYTES}

#: Status, header fields, and the body: as JSON, as it is, or in chunks.
Answer = tuple[int, dict[str, str], dict[str, Any] | bytes | Iterator[bytes]]


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


def answer(path: str, body: bytes) -> Answer:
    """Handles a request whose order is in its body, or in the path of one that has none."""
    _, *names, last = path.split("/")
    if last == "echo":
        return 200, {"Content-Type": "application/octet-stream"}, body
    order = json.loads(body)["order"] if body else last
    number = count(order)
    if last == "broken":
        raise RuntimeError("broken")
    if last == "slow":
        wait_for_release(order)
        return 200, {}, {"payment": number}
    if names == ["status"]:
        return int(last), {}, b"%d" % number
    if names == ["chunks"]:
        return 200, {}, chunks(int(last))
    payment = {"payment": number, "attempt": getattr(idem.current, "attempt", 0)}
    return 201, {"Location": f"/payments/{number}"}, payment


def with_cookies(response: Any) -> Any:
    """Sets two cookies in a response of any framework, and returns it."""
    for name in ("a", "b"):
        response.set_cookie(name, "1")
    return response
