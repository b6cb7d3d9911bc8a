"""Fills a server with records."""

from __future__ import annotations

from collections.abc import Callable

from redis import Redis

from labs.benchmarks.bench import RETENTION_MS, TASK
from tests.servers.program import wait_until

#: Copies the record at KEYS[1] to the names numbered ARGV[1] to ARGV[2] - 1.
_COPY = """
local record = redis.call('GET', KEYS[1])
for n = ARGV[1], ARGV[2] - 1 do
  redis.call('SET', ARGV[3] .. string.format('%012d0000000000', n), record, 'PX', ARGV[4])
end
"""
_BATCH_SIZE = 20_000


def fill(client: Redis, template: str, number: int, first: int = 0, prefix: str = "idem") -> None:
    """Copies the record named `template` to names as long as those of derived keys."""
    copy = client.register_script(_COPY)
    for start in range(first, number, _BATCH_SIZE):
        end = min(start + _BATCH_SIZE, number)
        copy(keys=[template], args=[start, end, f"{prefix}:{TASK}:", RETENTION_MS])


def digest_of(number: int) -> str:
    """Returns the digest in the name of the copy with that number."""
    return f"{number:012d}0000000000"


def added_memory(client: Redis, add: Callable[[], object]) -> float:
    """Returns the bytes that `add` adds to the server's memory, after rehashing."""
    before = client.info("memory")["used_memory"]
    add()
    wait_until(lambda: not _is_rehashing(client), "the server did not finish rehashing")
    return float(client.info("memory")["used_memory"] - before)


def _is_rehashing(client: Redis) -> bool:
    return bool(client.info("memory").get("mem_overhead_db_hashtable_rehashing"))
