"""Fills a server with records, as fast as it can take them."""

from __future__ import annotations

from collections.abc import Callable

from redis import Redis

from celery_idempotent.testing.process import wait_until
from tests.labs.benchmarks.bench import RETENTION_MS, TASK

#: Copies the record at KEYS[1] to so many names, from one number to another.
_FILL = """
local record = redis.call('GET', KEYS[1])
for n = ARGV[1], ARGV[2] - 1 do
  redis.call('SET', ARGV[3] .. string.format('%012d0000000000', n), record, 'PX', ARGV[4])
end
"""
_AT_A_TIME = 20_000


def fill(client: Redis, template: str, number: int, first: int = 0, prefix: str = "idem") -> None:
    """Copies of the record named `template`, under names as long as those that a rule makes."""
    copy = client.register_script(_FILL)
    for start in range(first, number, _AT_A_TIME):
        end = min(start + _AT_A_TIME, number)
        copy(keys=[template], args=[start, end, f"{prefix}:{TASK}:", RETENTION_MS])


def digest_of(number: int) -> str:
    """What stands in a name in place of a key's digest, for the record of that number."""
    return f"{number:012d}0000000000"


def added_by(client: Redis, filling: Callable[[], object]) -> float:
    """Bytes that `filling` adds to the server's memory, once its table has settled."""
    before = client.info("memory")["used_memory"]
    filling()
    # A table that grows moves to a larger one bit by bit.
    wait_until(lambda: not _moving(client), "the server's table did not settle")
    return float(client.info("memory")["used_memory"] - before)


def _moving(client: Redis) -> bool:
    return bool(client.info("memory").get("mem_overhead_db_hashtable_rehashing"))
