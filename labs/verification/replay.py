"""Replays the cases of the tables with mutants of the Lua, inside a server.

A mutant is detected if it replies, stores, expires or publishes anything else than the unchanged
script in one of the cases, which `make proof` compares with the model. The script runs on a
table that has the keys of the case, at a moment that the case chooses: thousands of calls need one
command, and the results are equal to the millisecond.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import redis

from celery_idempotent.store import scripts
from celery_idempotent.testing.server import RedisServer
from labs.verification import table, turn_table
from labs.verification.lua_mutants import Mutant
from labs.verification.model import Record
from labs.verification.wire import Call, Effect, OtherType, at, encode

#: Cases of each script and table.
CASES = 4_000
#: Cases in one command: most mutants are detected by one of the first.
_FIRST, _CHUNK = 60, 500
#: The server's time, in microseconds; one that shows how it is rounded.
_NOW_US = 1_795_000_000_999_501
_NOW_MS = _NOW_US // 1000
#: Seconds that a command may take.
_TIMEOUT = 60.0

#: Executes SCRIPT for each case in the first key. The first time it stores the results in the
#: second key and replies with them; later it replies with the number of the first case that has
#: another result, or 0.
_REPLAY = """
local cases = cmsgpack.unpack(redis.call('GET', KEYS[1]))
local expected = redis.call('GET', KEYS[2])
expected = expected and cmsgpack.unpack(expected)
local server, results_key = redis, KEYS[2]

local KEYS, ARGV, values, expiries, now_us, published, is_mute

local function is_absent(key)
  if expiries[key] and expiries[key] < math.floor(now_us / 1000) then
    values[key], expiries[key] = nil, nil
  end
  return values[key] == nil
end

local function expire(key, ms)
  assert(string.find(ms, '^%d+$') and tonumber(ms) > 0, 'invalid expire time')
  expiries[key] = math.floor(now_us / 1000) + ms
end

local ARITY = {TIME = 0, GET = 1, DEL = 1, PTTL = 1, PEXPIRE = 2, PUBLISH = 2}
local commands = {}

function commands.TIME()
  local seconds = math.floor(now_us / 1000000)
  return {string.format('%.0f', seconds), string.format('%.0f', now_us - seconds * 1000000)}
end

function commands.GET(key)
  if not is_absent(key) and values[key] == true then
    error('WRONGTYPE', 0)
  end
  return values[key] or false
end

function commands.SET(key, value, option, number, ...)
  assert(key and value and select('#', ...) == 0)
  if option == 'KEEPTTL' then
    assert(not number)
    is_absent(key)
  elseif option == 'PX' or option == 'EX' then
    expire(key, option == 'PX' and number or number .. '000')
  else
    assert(not option)
    expiries[key] = nil
  end
  values[key] = value
end

function commands.DEL(key)
  if is_absent(key) then
    return 0
  end
  values[key], expiries[key] = nil, nil
  return 1
end

function commands.PEXPIRE(key, ms)
  if not is_absent(key) then
    expire(key, ms)
  end
end

function commands.PTTL(key)
  if is_absent(key) then
    return -2
  end
  return expiries[key] and expiries[key] - math.floor(now_us / 1000) or -1
end

function commands.PUBLISH(channel, message)
  assert(not is_mute)
  published = published .. channel .. message .. ' '
  return 1
end

local redis = {}

function redis.call(name, ...)
  local arguments = {...}
  for number = 1, select('#', ...) do
    local argument = arguments[number]
    if type(argument) == 'number' then
      arguments[number] = string.format('%.17g', argument)
    end
    assert(type(arguments[number]) == 'string')
  end
  assert(name == 'SET' or #arguments == ARITY[name], 'wrong number of arguments')
  return commands[name](unpack(arguments))
end

function redis.pcall(...)
  local succeeded, reply = pcall(redis.call, ...)
  if succeeded then
    return reply
  end
  return {err = reply}
end

local function script()
SCRIPT
end

local results, packed = {}, {}
for number, case in ipairs(cases) do
  KEYS, ARGV, values, expiries, published, now_us = case.keys, case.argv, {}, {}, '', NOW
  is_mute = case.is_mute
  for index, key in ipairs(case.names) do
    values[key], expiries[key] = case.values[index], case.expiries[index]
  end
  local succeeded, reply = pcall(script)
  local result = {(succeeded or reply == 'WRONGTYPE') and reply or '', published}
  for _, key in ipairs(case.names) do
    local value = not is_absent(key) and values[key]
    table.insert(result, value == true and 'WRONGTYPE' or value)
    table.insert(result, commands.PTTL(key))
  end
  results[number], packed[number] = result, cmsgpack.pack(result)
  if expected and packed[number] ~= expected[number] then
    return number
  end
end
if expected then
  return 0
end
server.call('SET', results_key, cmsgpack.pack(packed))
return results
"""


def mismatches(name: str) -> Iterator[str]:
    """Yields how the unchanged script differs from the model."""
    script = scripts.load(name)
    client = _server(os.getpid()).client()
    results = [
        result
        for number in range(len(_chunks(name)))
        for result in _replay(client, script.source, name, number, "model")
    ]
    for (module, case, _), (reply, _, *keys) in zip(_cases(name), results, strict=True):
        effect = Effect(
            reply, _NOW_MS, _NOW_MS, [*zip(keys[::2], keys[1::2], strict=True)], tolerance_ms=0
        )
        if difference := module.compare(script, case, effect):
            yield f"{name}: {difference}: {case}"


def run(mutant: Mutant) -> str:
    """Returns the script and the case that detect a mutant, or ""."""
    client = _server(os.getpid()).client(socket_timeout=_TIMEOUT)
    sources = {name: scripts.load(name).source for name in names()}
    with client, _installed(mutant):
        mutated = {name: scripts.load(name).source for name in sources}
        # First a few cases of each script.
        chunks = sorted(
            (number, name)
            for name, source in sources.items()
            if mutated[name] != source
            for number in range(len(_chunks(name)))
        )
        for number, name in chunks:
            try:
                case = _replay(client, mutated[name], name, number)
            except redis.ResponseError as error:  # not valid Lua
                case = error
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
    """Returns this process's server, with the cases and the results of the unchanged scripts."""
    server = RedisServer.start()
    with server.client() as client:
        for name in names():
            for number, chunk in enumerate(_chunks(name)):
                client.set(f"{name}:{number}", chunk)
                _replay(client, scripts.load(name).source, name, number)
    return server


def _replay(
    client: redis.Redis, source: str, name: str, number: int, results: str = "results"
) -> Any:
    replay = _REPLAY.replace("NOW", str(_NOW_US)).replace("SCRIPT", source)
    key = f"{name}:{number}"
    return client.eval(replay, 2, key, f"{key}:{results}")


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
