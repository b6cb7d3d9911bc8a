"""Makes random sequences of calls on a real server, and compares it with the model after each."""

from __future__ import annotations

import random
from typing import Any

import redis

from celery_idempotent.core.store import scripts
from labs.verification.cases import RESULT, Walk, encode
from tests.servers.redis_server import RedisServer

_CALLS = 40
#: Milliseconds by which an expiry may differ: time passes until it is read.
_TOLERANCE_MS = 5_000


def mismatch(kind: str, sequences: int, seed: int) -> str:
    """Returns how a server differs from the model in one of the sequences, or ""."""
    rnd = random.Random(seed)
    with RedisServer.start(kind) as server, server.client() as client:
        for number in range(sequences):
            client.flushall()
            walk = Walk(rnd, _time_us(client))
            walk.shortest_ms = 60_000
            for _ in range(_CALLS):
                if found := _call(client, walk):
                    return f"{kind}, seed {seed}, sequence {number}: {found}"
    return ""


def _time_us(client: redis.Redis) -> int:
    seconds, microseconds = client.time()
    return int(seconds) * 1_000_000 + int(microseconds)


def _call(client: redis.Redis, walk: Walk) -> str:
    walk.now_us = _time_us(client)
    walk.change()
    before = walk.stored()
    for name in set(client.keys()) - {name.encode() for name in before}:
        client.delete(name)
    for name, (value, expires) in before.items():
        client.set(name, value, pxat=expires)
    call = walk.call()
    if call.keys[-1] == RESULT:
        walk.keys.pop(RESULT, None)
        return ""  # only `replay` has a server that refuses to publish
    script = client.register_script(scripts.load(call.script).source)
    raw: Any = script(call.keys, call.argv)
    case, seconds, microseconds, record = raw.split(b" ", 3)
    expected, value = call.model(int(seconds) * 1_000_000 + int(microseconds) or walk.now_us)
    after = walk.stored()
    found = {name.decode(): client.get(name) for name in client.scan_iter()}
    if case.decode() != expected or record != (b"" if value is None else encode(value)):
        return f"{call[:3]} on {before}: {raw!r}, not {expected} {value}"
    if found != {name: value for name, (value, _) in after.items()}:
        return f"{call[:3]} on {before}: stores {found}, not {after}"
    now = _time_us(client) // 1000
    for name, (_, expires) in after.items():
        ttl = client.pttl(name)
        if expires is None or ttl <= 0 or not 0 <= expires - now - ttl + 1 <= _TOLERANCE_MS:
            return f"{call[:3]} on {before}: {name} expires in {ttl} ms, not in {expires} - {now}"
    return ""
