"""Single calls of the scripts with a turn: drawn records of a message and of the turn.

As `table`, with two records. All times are set on the server relative to the time of the call, so
that the moments at which a lease and a reservation end are covered, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from celery_idempotent.store import scripts
from labs.verification import table
from labs.verification.model import (
    NOBODY,
    UNCHANGED,
    WITH_ENTRY,
    Clock,
    Record,
    Waiting,
)
from labs.verification.single_calls import Call, Effect
from labs.verification.turn_model import TurnProtocol, TurnResult
from labs.verification.wire import at, encode, entry, microsecond
from tests.store.record_harness import HOLD_MS, KEY, LEASE_MS, OTHER_ARGUMENTS, RETENTION_MS

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
        "token": table.ARGUMENTS["complete"]["token"],
        "backend": [None],
        "is_mute": [False],
    },
    "reserve_turn": {**table.ARGUMENTS["reserve"], "waits": [0, 1]},
}
ARGUMENTS["begin"] = {**ARGUMENTS["begin"], "next_turn_ms": [0, HOLD_MS, HOLD_MS]}
ARGUMENTS["reserve_turn"] |= {"task_id": _TASKS}


class Case(NamedTuple):
    record: Record | None
    turn: Record | None
    entry: Record | None
    arguments: dict[str, Any]


def all_cases(name: str, limit: int, now_ms: int) -> Iterator[Case]:
    """Yields as many cases of a script; they are the same each time."""
    rng, lists = random.Random(f"turn of {name}"), ARGUMENTS[name]
    for _ in range(limit):
        record = None if name == "reserve_turn" else _record(rng, now_ms)
        arguments = {argument: rng.choice(values) for argument, values in lists.items()}
        turn = _turn(rng, record)
        if turn is not None:
            turn = table.vary(rng, turn)
            if rng.random() < 0.03:
                turn = turn._replace(state="Z")
            ahead = table.AHEAD + now_ms * 1000 if turn.token == table.TOKEN + 10 else 0
            turn = turn._replace(token=turn.token + ahead, expires=turn.expires + now_ms)
        if turn is not None and "token" in arguments and rng.random() < 0.7:
            arguments["token"] = turn.token
        beside = None
        if name in WITH_ENTRY and rng.random() < 0.2:
            beside = rng.choice(table.all_entries()[1:])
            root = arguments.get("root", table.ROOTS[0])
            beside = beside._replace(expires=beside.expires + now_ms, root=root)
        yield Case(record, turn, beside, arguments)


def _record(rng: random.Random, now_ms: int) -> Record | None:
    """Returns a record of a message; its time is relative to the call."""
    if rng.random() < 0.2:
        return None
    while True:
        record = rng.choice(table.all_records())
        if isinstance(record, Record):
            break
    record = table.vary(rng, record)
    ahead = table.AHEAD + now_ms * 1000 if record.token > table.TOKEN else 0
    return record._replace(token=record.token + ahead, expires=record.expires + now_ms)


def _turn(rng: random.Random, record: Record | None) -> Record | None:
    """Returns a record of the turn, from now: often that of the same execution."""
    if rng.random() < 0.12:
        return None
    state = rng.choice("SSSSSRRC")
    same = record is not None and rng.random() < 0.6
    token = record.token if same and record is not None else table.TOKEN + rng.choice([-9, 9])
    if rng.random() < 0.1:
        token = table.TOKEN + 10
    fingerprint = rng.choice([KEY.fingerprint, OTHER_ARGUMENTS.fingerprint, b""])
    if state == "C":
        form, body = rng.choice(
            [(b"json", b"1"), (b"=task", b"1"), (b"", b""), (b"json", _entry())]
        )
        root, owner = rng.choice([(b"", b""), *((root, b"12345678") for root in table.ROOTS)])
        return Record(
            rng.choice("CF"), 1, token, -LEASE_MS, fingerprint, rng.choice(_TASKS), b"w", owner,
            form, body, _TURN_MS, root,
        )  # fmt: skip
    owners = {"S": [b"", b"1" * 8], "R": [b"", b"1", NOBODY]}
    owner = rng.choice(owners[state])
    waiting = rng.choice([(), (), _waiting(rng), _waiting(rng), _waiting(rng), _waiting(rng)])
    attempt = rng.choice([1, 2])
    root = table.ROOTS[0] if owner not in (b"", NOBODY) else b""
    return Record(
        state, attempt, token, rng.choice(_TIMES), fingerprint, rng.choice(_TASKS), b"w", owner,
        b"17" if attempt == 2 else b"", rng.choice([b"", b"", table.ENTRY, table.LONG_ENTRY]),
        _TURN_MS,
        root, 0, waiting,
    )  # fmt: skip


def _waiting(rng: random.Random) -> tuple[Waiting, ...]:
    at_ms = rng.choice([-1, 0, 1, HOLD_MS, 3 * RETENTION_MS, 3 * RETENTION_MS, -HOLD_MS])
    fingerprint = rng.choice([KEY.fingerprint, OTHER_ARGUMENTS.fingerprint, b"", *table.LABELLED])
    return (Waiting(rng.choice(_TASKS), at_ms, fingerprint),)


def _entry() -> bytes:
    """Returns an outcome with the bytes of an entry of a waiting message."""
    return entry(Waiting(_SECOND, 2**46, b""))


def call(script: scripts.Script, case: Case, name: str, now_ms: int) -> Call:
    """Returns the call of a case; `name` is that of the message's record."""
    turn, beside = f"{name}:t", f"{name}:{case.arguments.get('root', table.ROOTS[0]).hex()}"
    before = {
        key: (record, record.expires if record else 0)
        for key, record in ((name, case.record), (turn, case.turn), (beside, case.entry))
    }
    # Begin may move the record to the entry of an earlier message.
    before.setdefault(f"{name}:{table.ROOTS[0].hex()}", (None, 0))
    if "backend" in case.arguments:
        keys = [name, f"{name}:b", turn]
        before[keys[1]] = None, 0
    elif script.name in WITH_ENTRY:
        keys = [name, beside, turn]
    else:
        keys = [turn] if script.name == "reserve_turn" else [name, turn]
    return Call(keys, table.argv_of(script, case.arguments), before)


def compare(script: scripts.Script, case: Case, effect: Effect) -> str:
    """Returns how the call differs from the model, or ""."""
    if not isinstance(effect.reply, bytes):
        return f"replies {effect.reply!r}"
    reply = script.reply(effect.reply)
    record, turn, beside = (at(each, effect.moment) for each in case[:3])
    now_ms = reply.now_ms or effect.moment
    clock = Clock(now_ms, max(microsecond(now_ms, raw) for raw, _ in effect.keys[:2]))
    arguments = case.arguments | ({"entry": beside} if script.name in WITH_ENTRY else {})
    expected: TurnResult = getattr(TurnProtocol(), script.name)(record, turn, clock, **arguments)
    if reply.case != expected.case:
        return f"replies {reply.case}, not {expected.case}"
    if reply.raw != (encode(expected.replied) or b""):
        return f"replies {reply.raw!r}, not {encode(expected.replied)!r}"
    after_entry = beside if expected.entry is UNCHANGED else expected.entry
    stored = {"record": expected.after, "turn": expected.turn, "entry": after_entry}
    if "backend" in case.arguments:
        if difference := table.compare_backend(case.arguments, effect, reply, 3):
            return difference
    elif len(effect.keys) > len(stored):
        stored["entry of an earlier message"] = expected.moved
    differences = (
        effect.difference(what, number, after)
        for number, (what, after) in enumerate(stored.items())
    )
    return next(filter(None, differences), "")
