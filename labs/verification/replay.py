"""Replays the cases of the tables with mutants of the Lua, inside a server.

A mutant is detected if it replies, stores, expires or publishes anything other than the unchanged
script does in one of the cases, which `make proof` compares with the model. The script runs on a
table that has the keys of the case, at a moment that the case chooses: thousands of calls need one
command, and the results are equal to the millisecond.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_idempotent.store import scripts
from labs.verification import table, turn_table
from labs.verification.lua_mutants import Mutant
from labs.verification.model import Record
from labs.verification.single_calls import Call, Effect, OtherType
from labs.verification.wire import at, encode
from tests.servers.redis_server import RedisServer

#: Cases of each script and table.
CASES = 4_000
#: Cases in one command: most mutants are detected by one of the first.
_FIRST, _CHUNK = 60, 500
#: The server's time, in microseconds; one that shows how it is rounded.
_NOW_US = 1_795_000_000_999_501
_NOW_MS = _NOW_US // 1000
#: Seconds that a command may take; a mutant may run for ever.
_TIMEOUT = 20.0

_REPLAY = Path(__file__).with_suffix(".lua").read_text(encoding="utf-8")


def mismatches(name: str) -> Iterator[str]:
    """Yields how the unchanged script differs from the model."""
    script = scripts.load(name)
    for (module, case, _), result in zip(_cases(name), _record(os.getpid(), name), strict=True):
        reply, _, *keys = result
        after = [*zip(keys[::2], keys[1::2], strict=True)]
        effect = Effect(reply, _NOW_MS, _NOW_MS, after, tolerance_ms=0)
        if difference := module.compare(script, case, effect):
            yield f"{name}: {difference}: {case}"


def run(mutant: Mutant) -> str:
    """Returns the script and the case that detect a mutant, or ""."""
    sources = {name: scripts.load(name).source for name in names()}
    with _installed(mutant):
        mutated = {name: scripts.load(name).source for name in names()}
    changed = [name for name in names() if mutated[name] != sources[name]]
    for name in changed:
        _record(os.getpid(), name)
    # First a few cases of each script.
    chunks = sorted((number, name) for name in changed for number in range(len(_chunks(name))))
    with _server(os.getpid()).client(
        socket_timeout=_TIMEOUT, retry=Retry(NoBackoff(), 0)
    ) as client:
        for number, name in chunks:
            try:
                case = _replay(client, mutated[name], name, number)
            except redis.ResponseError as error:  # not valid Lua
                case = error
            except redis.TimeoutError:
                _server.cache_clear()  # it is busy for ever
                _record.cache_clear()
                case = "does not end"
            if case:
                return f"{name} {number}: {case}"
    return ""


@contextlib.contextmanager
def _installed(mutant: Mutant) -> Iterator[None]:
    """Makes `scripts.load` return the mutant."""
    read_source = scripts.read_source
    scripts.read_source = lambda name: mutant.source if name == mutant.script else read_source(name)
    scripts.load.cache_clear()
    try:
        yield
    finally:
        scripts.read_source = read_source
        scripts.load.cache_clear()


@cache
def _server(process: int) -> RedisServer:
    """Returns this process's server."""
    return RedisServer.start()


@cache
def _record(process: int, name: str) -> list[list[Any]]:
    """Puts the cases of a script into the server, and returns the results of the unchanged one."""
    results = []
    with _server(process).client() as client:
        for number, chunk in enumerate(_chunks(name)):
            client.set(f"{name}:{number}", chunk)
            results += _replay(client, scripts.load(name).source, name, number)
    return results


def _replay(client: redis.Redis, source: str, name: str, number: int) -> Any:
    replay = _REPLAY.replace("NOW", str(_NOW_US)).replace("SCRIPT", source)
    return client.eval(replay, 2, f"{name}:{number}", f"{name}:{number}:results")


def names() -> list[str]:
    """Returns the scripts."""
    return [*{**table.ARGUMENTS, **turn_table.ARGUMENTS}]


@cache
def _cases(name: str) -> list[tuple[Any, Any, Call]]:
    """Returns the module, the case and the call of each case: a few of each table first."""
    script = scripts.load(name)
    tables = [
        [
            (module, case, module.call(script, case, "idem:key", _NOW_MS))
            for case in module.all_cases(name, CASES, _NOW_MS)
        ]
        for module in (table, turn_table)
        if name in module.ARGUMENTS
    ]
    first = [case for cases in tables for case in cases[:_FIRST]]
    return first + [case for cases in tables for case in cases[_FIRST:]]


@cache
def _chunks(name: str) -> list[bytes]:
    """Returns the cases, packed for one command each."""
    packed = [_packed_case(call) for _, _, call in _cases(name)]
    starts = [0, *range(2 * _FIRST, len(packed), _CHUNK), len(packed)]
    return [
        _head(b"\xdd", stop - start) + b"".join(packed[start:stop])
        for start, stop in pairwise(starts)
    ]


def _packed_case(call: Call) -> bytes:
    values = [
        encode(at(value, _NOW_MS)) if isinstance(value, Record) else value
        for value, _ in call.before.values()
    ]
    expiries = [
        None if value is None else expires
        for value, (_, expires) in zip(values, call.before.values(), strict=True)
    ]
    argv = [each if isinstance(each, bytes) else str(each) for each in call.argv]
    return _packed({
        "keys": call.keys, "argv": argv, "names": [*call.before], "values": values,
        "expiries": expiries, "is_mute": call.is_mute,
    })  # fmt: skip


def _packed(value: Any) -> bytes:
    """Returns a value in the form of MessagePack, for cmsgpack."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool | OtherType):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return b"\xcf" + value.to_bytes(8, "big")
    if isinstance(value, list):
        return _head(b"\xdd", len(value)) + b"".join(map(_packed, value))
    if isinstance(value, dict):
        items = [_packed(each) for item in value.items() for each in item]
        return _head(b"\xdf", len(value)) + b"".join(items)
    data = value.encode() if isinstance(value, str) else value
    return _head(b"\xdb", len(data)) + data


def _head(kind: bytes, length: int) -> bytes:
    return kind + length.to_bytes(4, "big")
