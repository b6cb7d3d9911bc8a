"""Executes the cases of a script, or of a mutant of it, inside a server.

The script runs on a table that has the keys of the case, at the moment of the case: thousands of
calls need one command, and replies, keys and expiries are compared exactly.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_idempotent.core.store import scripts
from labs.verification.cases import NOW_MS, NOW_US, Case, OtherType, cases
from labs.verification.lua_mutants import Mutant
from tests.servers.redis_server import RedisServer

#: Cases of each script.
CASES = 6_000
#: Cases in one command: most mutants are detected by one of the first.
_FIRST, _CHUNK = 100, 1_000
#: Seconds that a command may take; a mutant may run for ever.
_TIMEOUT = 20.0

_REPLAY = Path(__file__).with_suffix(".lua").read_text(encoding="utf-8")


def mismatch(name: str, kind: str) -> str:
    """Returns how the script differs from the model on a kind of server, or ""."""
    with RedisServer.start(kind) as server, server.client() as client:
        for number, chunk in enumerate(_chunks(name)):
            _store(client, name, number, chunk)
            if found := _replay(client, scripts.load(name).source, name, number):
                return f"{name} on {kind}: {_difference(client, name, chunk[found - 1])}"
    return ""


def run(mutant: Mutant) -> str:
    """Returns the case that detects a mutant, or ""."""
    server = _server(os.getpid(), mutant.script)
    with server.client(socket_timeout=_TIMEOUT, retry=Retry(NoBackoff(), 0)) as client:
        for number in range(len(_chunks(mutant.script))):
            try:
                found = _replay(client, mutant.source, mutant.script, number)
            except redis.ResponseError as error:  # not valid Lua
                return str(error)
            except redis.TimeoutError:  # it is busy for ever
                _server.cache_clear()
                return "does not end"
            if found:
                return f"{mutant.script} {number}: {found}"
    return ""


@cache
def _server(process: int, name: str) -> RedisServer:
    """Returns a server of this process, with the cases of a script."""
    server = RedisServer.start()
    with server.client() as client:
        for number, chunk in enumerate(_chunks(name)):
            _store(client, name, number, chunk)
    return server


@cache
def _chunks(name: str) -> list[list[Case]]:
    found = cases(name, CASES)
    rest = range(_FIRST, len(found), _CHUNK)
    return [found[:_FIRST], *(found[start : start + _CHUNK] for start in rest)]


def _store(client: redis.Redis, name: str, number: int, chunk: list[Case]) -> None:
    client.set(f"{name}:{number}", _packed([_given(case) for case in chunk]))
    expected = [_packed(_result(case)) for case in chunk]
    client.set(f"{name}:{number}:results", _packed(expected))


def _replay(client: redis.Redis, source: str, name: str, number: int) -> int:
    """Returns the number of the first case with another result, or 0."""
    replay = _REPLAY.replace("NOW", str(NOW_US)).replace("SCRIPT", source)
    found: int = client.eval(replay, 2, f"{name}:{number}", f"{name}:{number}:results")
    return found


def _difference(client: redis.Redis, name: str, case: Case) -> str:
    """Describes what the script does in a case, and what the model does."""
    client.set("case", _packed([_given(case)]))
    replay = _REPLAY.replace("NOW", str(NOW_US)).replace("SCRIPT", scripts.load(name).source)
    (actual,) = client.eval(replay, 2, "case", "none")
    return f"{actual}, not {_result(case)}: {case}"


def _names(case: Case) -> list[str]:
    return sorted({*case.keys, *case.before, *case.after})


def _given(case: Case) -> dict[str, Any]:
    names = _names(case)
    before = [case.before.get(name, (None, None)) for name in names]
    argv = [each if isinstance(each, bytes) else str(each) for each in case.argv]
    return {
        "keys": case.keys, "argv": argv, "names": names,
        "values": [value for value, _ in before], "expiries": [expires for _, expires in before],
        "is_mute": case.is_mute,
    }  # fmt: skip


def _result(case: Case) -> list[Any]:
    result: list[Any] = [case.reply, case.published]
    for name in _names(case):
        value, expires = case.after.get(name, (None, None))
        if value is None:
            result += [False, -2]
        else:
            result.append(b"WRONGTYPE" if isinstance(value, OtherType) else value)
            result.append(-1 if expires is None else expires - NOW_MS)
    return result


def _packed(value: Any) -> bytes:
    """Returns a value in the form of MessagePack, for cmsgpack."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool | OtherType):
        return b"\xc2" if value is False else b"\xc3"
    if isinstance(value, int):
        return b"\xd3" + value.to_bytes(8, "big", signed=True)
    if isinstance(value, list):
        return _head(b"\xdd", len(value)) + b"".join(map(_packed, value))
    if isinstance(value, dict):
        items = [_packed(each) for item in value.items() for each in item]
        return _head(b"\xdf", len(value)) + b"".join(items)
    data = value.encode() if isinstance(value, str) else value
    return _head(b"\xdb", len(data)) + data


def _head(kind: bytes, length: int) -> bytes:
    return kind + length.to_bytes(4, "big")
