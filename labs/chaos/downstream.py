"""The downstream system: an account for each order, protected by fencing tokens.

Each execution sends its token when it starts and when it writes. An account keeps the highest token
and rejects lower ones. All requests are stored in their order, whether accepted or not.

It is a Redis server of its own, which has no faults.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from typing import Any, NamedTuple

from redis import Redis

_ADMIT = """
local newest = tonumber(redis.call('HGET', 'tokens', KEYS[1]) or -1)
local accepted = tonumber(ARGV[2]) >= newest
if accepted then redis.call('HSET', 'tokens', KEYS[1], ARGV[2]) end
redis.call('RPUSH', 'requests', cjson.encode({KEYS[1], ARGV[1], ARGV[3], accepted}))
return accepted and 1 or 0
"""


class Request(NamedTuple):
    """A request of an execution: its start (without a receipt) or the write of its receipt."""

    execution: str
    receipt: str
    accepted: bool


@cache
def _admit(url: str) -> Any:
    return Redis.from_url(url, socket_timeout=30).register_script(_ADMIT)


def send(url: str, account: str, execution: str, token: int, receipt: str = "") -> bool:
    """Sends the start of an execution, or its `receipt`; returns whether it is accepted."""
    return bool(_admit(url)([account], [execution, token, receipt]))


def requests(url: str) -> dict[str, list[Request]]:
    """Returns all requests in their order, by account."""
    by_account: dict[str, list[Request]] = defaultdict(list)
    with Redis.from_url(url) as client:
        for account, *request in map(json.loads, client.lrange("requests", 0, -1)):
            by_account[account].append(Request(*request))
    return by_account


def receipts_of(requests: list[Request]) -> list[str]:
    """Returns the receipt that an account has, if any."""
    return [each.receipt for each in requests if each.receipt and each.accepted][-1:]


def stale_accepted(requests: list[Request]) -> int:
    """Counts the writes to an account that were accepted after a later execution had started."""
    newest, accepted = "", 0
    for request in requests:
        if not request.receipt:
            # A start with a lower token was overtaken before its request arrived.
            newest = request.execution if request.accepted else newest
        elif request.accepted and request.execution != newest:
            accepted += 1
    return accepted


def stale_rejected(requests: list[Request]) -> int:
    """Counts the writes to an account that were rejected."""
    return sum(bool(each.receipt) and not each.accepted for each in requests)
