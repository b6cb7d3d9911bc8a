"""Single calls of the scripts with a turn: drawn records of a message and of the turn.

As `table`, with two records. All times are set on the server relative to the time of the call, so
that the moments at which a lease and a reservation end are covered, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import redis

from celery_idempotent.store import scripts
from tests.labs.verification import table
from tests.labs.verification.model import NOBODY, Clock, Error, Record
from tests.labs.verification.turn_model import WAITING, TurnProtocol, TurnResult
from tests.labs.verification.wire import MOMENT, TOLERANCE_MS, encode, entry, microsecond
from tests.store.record_harness import HOLD_MS, KEY, LEASE_MS, OTHER_ARGUMENTS, RETENTION_MS

#: Calls of each script.
CASES = 2500
_PIPELINED = 60

_FIRST, _SECOND, _THIRD = table.FIRST_ID, table.SECOND_ID, b"\0" + b"3" * 16
_TASKS = [_FIRST, _FIRST, _SECOND, _THIRD]
_TIMES = (-LEASE_MS, -1, 0, 1, LEASE_MS, LEASE_MS)
_TURN_MS = 2 * RETENTION_MS

#: The values of each argument.
ARGUMENTS: dict[str, dict[str, list[Any]]] = {
    **{
        name: table.ARGUMENTS[name]
        for name in ("begin", "complete", "fail", "release", "extend", "save_step", "abandon")
    },
    # `table` has what the result backend may hold before.
    "fused_complete": {
        **table.ARGUMENTS["fused_complete"],
        **table.ARGUMENTS["complete"],
        "backend": [None],
    },
    "reserve_turn": {**table.ARGUMENTS["reserve"], "waits": [0, 1]},
}
ARGUMENTS["begin"] = {**ARGUMENTS["begin"], "wait_ms": [0, HOLD_MS, HOLD_MS]}
ARGUMENTS["reserve_turn"] |= {"task_id": _TASKS}

#: Precedes a script: sets times to the server's time minus some milliseconds, as the last argument
#: lists them: number of the key, position, milliseconds.
_AT_THE_MOMENT = """
do
  local clock = redis.call('TIME')
  local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
  for key, position, ms in string.gmatch(ARGV[#ARGV], '(%d+) (%d+) (-?%d+)') do
    redis.call('SETRANGE', KEYS[tonumber(key)], position, struct.pack('>I6', now - ms))
  end
  redis.call('SET', KEYS[1] .. ':moment', now, 'PX', 60000)
end
"""


class Case(NamedTuple):
    record: Record | None
    turn: Record | None
    arguments: dict[str, Any]


def mismatches(client: redis.Redis, name: str, cases: int = CASES) -> Iterator[str]:
    """Yields a description of each call whose effect differs from the model's."""
    script = scripts.load(name)
    sha = client.script_load(_AT_THE_MOMENT + script.source)
    seconds, _ = client.time()
    drawn = _cases(random.Random(f"turn of {name}"), name, cases, seconds * 1000)
    while batch := list(islice(drawn, _PIPELINED)):
        pipeline = client.pipeline(transaction=False)
        for number, case in enumerate(batch):
            _queue(pipeline, script, sha, f"idem:turns:{number}", case)
        results = iter(pipeline.execute(raise_on_error=False))
        for case in batch:
            replies = [next(results) for _ in range(10)]
            mismatch = _compare(script, case, *replies[2:9])
            if mismatch:
                yield f"{name}: {mismatch}: {case}"


def _cases(rng: random.Random, name: str, limit: int, now_ms: int) -> Iterator[Case]:
    lists = ARGUMENTS[name]
    for _ in range(limit):
        record = _record(rng, now_ms)
        arguments = {argument: rng.choice(values) for argument, values in lists.items()}
        turn = _turn(rng, record, now_ms)
        if turn is not None and "token" in arguments and rng.random() < 0.7:
            arguments["token"] = turn.token
        yield Case(record, turn, arguments)


def _record(rng: random.Random, now_ms: int) -> Record | None:
    """Returns a record of a message; its time is relative to the call."""
    if rng.random() < 0.2:
        return None
    while True:
        record, _ = rng.choice(table.all_records())
        if isinstance(record, Record):
            break
    ahead = table.AHEAD + now_ms * 1000 if record.token > table.TOKEN else 0
    return record._replace(token=record.token + ahead, expires=now_ms + RETENTION_MS)


def _turn(rng: random.Random, record: Record | None, now_ms: int) -> Record | None:
    """Returns a record of the turn: often that of the same execution."""
    if rng.random() < 0.12:
        return None
    state = rng.choice("SSSSSRREC")
    same = record is not None and rng.random() < 0.6
    token = record.token if same and record is not None else table.TOKEN + rng.choice([-9, 9])
    if rng.random() < 0.1:
        token = table.TOKEN + 10 + table.AHEAD + now_ms * 1000
    fingerprint = rng.choice([KEY.fingerprint, OTHER_ARGUMENTS.fingerprint, b""])
    if state == "C":
        form, body = rng.choice(
            [(b"json", b"1"), (b"=task", b"1"), (b"", b""), (b"json", _entry())]
        )
        return Record(
            rng.choice("CDFG"), 1, token, -LEASE_MS, fingerprint, rng.choice(_TASKS), b"w", b"",
            form, body, now_ms + _TURN_MS,
        )  # fmt: skip
    owner = {"S": rng.choice([b"", b"1" * 16]), "R": rng.choice([b"", b"1", NOBODY])}.get(
        state, NOBODY
    )
    errors = rng.choice([(), (), _waiting(rng), _waiting(rng), _waiting(rng), _waiting(rng)])
    if state == "S" and rng.random() < 0.05:
        errors = (Error(_SECOND, "F", 1, now_ms, b"json", b"{}"),)
    attempt = rng.choice([1, 2])
    return Record(
        state, attempt, token, rng.choice(_TIMES), fingerprint, rng.choice(_TASKS), b"w", owner,
        b"17" if attempt == 2 else b"", rng.choice([b"", b"", table.ENTRY]), now_ms + _TURN_MS,
        errors,
    )  # fmt: skip


def _waiting(rng: random.Random) -> tuple[Error, ...]:
    at = rng.choice([-1, 0, 1, HOLD_MS, 3 * RETENTION_MS, 3 * RETENTION_MS, -HOLD_MS])
    fingerprint = rng.choice([KEY.fingerprint, OTHER_ARGUMENTS.fingerprint, b""])
    return (Error(rng.choice(_TASKS), WAITING, 0, at, fingerprint, b""),)


def _entry() -> bytes:
    """Returns an outcome with the bytes of an entry of a waiting message."""
    return entry(Error(_SECOND, WAITING, 0, 2**46, b"", b""))


def _queue(pipeline: Any, script: scripts.Script, sha: str, name: str, case: Case) -> None:
    values = [case.arguments.get(argument, 0) for argument in script.argv]
    times = []
    turn = f"{name}:t"
    names = [name, f"{name}:b", turn] if "backend" in case.arguments else [name, turn]
    for number, key, record in ((1, name, case.record), (len(names), turn, case.turn)):
        if record is None:
            pipeline.delete(key)
            continue
        # The bytes hold zeros where the script writes the times.
        errors = tuple(
            error._replace(at=0) if error.state == WAITING else error for error in record.errors
        )
        zeros = record._replace(at=0, errors=errors)
        raw = encode(zeros) or b""
        pipeline.set(key, raw, pxat=record.expires)
        times.append(f"{number} 9 {-record.at}")
        if errors and errors[0].state == WAITING:
            head = len(encode(zeros._replace(errors=(), body=b"")) or b"")
            times.append(f"{number} {head + 14} {-record.errors[0].at}")
    pipeline.evalsha(sha, len(names), *names, *values, ";".join(times))
    pipeline.get(name + MOMENT).get(name).pttl(name).get(turn).pttl(turn)
    pipeline.time().delete(*names)


def _at(record: Record | None, moment: int) -> Record | None:
    """Returns the record with the times that the script has met."""
    if record is None:
        return None
    errors = tuple(
        error._replace(at=error.at + moment) if error.state == WAITING else error
        for error in record.errors
    )
    return record._replace(at=record.at + moment, errors=errors)


def _compare(
    script: scripts.Script, case: Case, raw_reply: Any, moment: bytes, raw: Any, ttl_ms: int,
    turn_raw: Any, turn_ttl_ms: int, time: tuple[int, int],
) -> str:  # fmt: skip
    """Returns how the call differs from the model, or ""."""
    if not isinstance(raw_reply, bytes):
        return f"replies {raw_reply!r}"
    reply = script.reply(raw_reply)
    record, turn = _at(case.record, int(moment)), _at(case.turn, int(moment))
    now_ms = reply.now_ms or int(moment)
    microseconds = {microsecond(now_ms, raw), microsecond(now_ms, turn_raw)}
    clock = Clock(now_ms, max(microseconds))
    expected: TurnResult = getattr(TurnProtocol(), script.name)(
        record, turn, clock, **case.arguments
    )
    if reply.case != expected.case:
        return f"replies {reply.case}, not {expected.case}"
    if reply.raw != (encode(expected.replied) or b""):
        return f"replies {reply.raw!r}, not {encode(expected.replied)!r}"
    for what, stored, left_ms, after in (
        ("record", raw, ttl_ms, expected.after), ("turn", turn_raw, turn_ttl_ms, expected.turn),
    ):  # fmt: skip
        if after is not None and after.expires <= now_ms + 1:
            continue  # the server may have forgotten it already
        if stored != encode(after):
            return f"stores the {what} {stored!r}, not {encode(after)!r}"
        if after is not None:
            expires = time[0] * 1000 + left_ms
            if left_ms < 0 or abs(expires - after.expires) > TOLERANCE_MS:
                return f"stores the {what} for {left_ms} ms"
    return ""
