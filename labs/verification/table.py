"""Single calls: each script with each kind of record, compared with the model.

The conformance machine reaches a record by a sequence of calls; this writes the record directly. So
a few thousand calls, pipelined, cover the combinations of records and arguments.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from celery_idempotent.record import layout
from celery_idempotent.record import steps as entries
from celery_idempotent.store import scripts
from labs.verification.model import (
    NOBODY,
    UNCHANGED,
    WITH_ENTRY,
    Clock,
    Protocol,
    Record,
    Result,
    Waiting,
)
from labs.verification.single_calls import OTHER_TYPE, WRONG_TYPE, Call, Effect, OtherType, Value
from labs.verification.wire import at, encode, entry, microsecond
from tests.store.record_harness import (
    ERROR_MS,
    FIRST,
    HOLD_MS,
    KEY,
    LEASE_MS,
    OTHER_ARGUMENTS,
    OTHER_WORKER,
    RETENTION_MS,
    SECOND,
    WORKER,
)

#: Suffixes of the task's result, and of the message's entry.
_BACKEND, _ENTRY = ":backend", ":entry"

# With every character that is special in a Lua pattern: ids must not be used as patterns.
_ONE, _TWO, _THREE = b"%a.*-?[%", b"." * 8, b"3" * 8
#: Of two messages.
ROOTS = [b"%.-root1", b"%.-root2"]
FIRST_ID, SECOND_ID = layout.write_task_id(FIRST), layout.write_task_id(SECOND)
_WORKER, _OTHER = WORKER.encode(), OTHER_WORKER.encode()
#: With labels, with zeros in place of a fingerprint, and with a difference in one byte.
LABELLED = [
    KEY.fingerprint + b"label", KEY.fingerprint + b"other", OTHER_ARGUMENTS.fingerprint + b"label",
    bytes(8), bytes(8) + b"label", bytes(8) + b"other", KEY.fingerprint[:7] + b"?",
    b"?" + KEY.fingerprint[1:], b"\0" + KEY.fingerprint[1:],
]  # fmt: skip
_FINGERPRINTS = [*[KEY.fingerprint] * 16, OTHER_ARGUMENTS.fingerprint, b"", *LABELLED]
ENTRY = entries.write("one", "json", b"1")
_LEASE = {"lease_ms": [LEASE_MS], "ttl_ms": [LEASE_MS + RETENTION_MS]}
#: Differs from TOKEN - 1 and TOKEN + 1 in the last of its 16 digits only.
TOKEN = 1_700_000_000_000_003
_TOKENS = {"token": [TOKEN, TOKEN, TOKEN, TOKEN - 1, TOKEN + 1, 17]}
_OUTCOME = {"format": [b"json", b""], "body": [b'"charged"', b"", ENTRY]}

_ERROR_ARGUMENTS = {
    "generation": [0, 2], "format": [b"json", b""], "error": [b"", b"", b"too large", ENTRY],
    "error_ms": [ERROR_MS, 3 * RETENTION_MS],
}  # fmt: skip
#: The end of a lease that sends a continuation, from now.
_UNTIL = (-LEASE_MS, -1, 0, 1, LEASE_MS)
#: Of a lease that is given to a continuation.
_SENDING_MS = 2 * LEASE_MS + RETENTION_MS
_SENDING = {"lease_ms": ["", "", 0, _SENDING_MS]}
#: Long enough to be parsed as the entry of a waiting message, except for its name.
LONG_ENTRY = entries.write("one", "json", (2**46).to_bytes(6, "big") + bytes(60))
#: Steps in a body; the last one is cut short.
_BODIES = [b"", b"", ENTRY, LONG_ENTRY, b"\0"]
_REPLACEMENT = layout.write_replacement(1, FIRST, ENTRY)
#: Formats and bodies of outcomes: some look like errors or replacements; some are of a task that
#: replaced itself: with finished steps, without any, and cut short.
_OUTCOMES = [
    (b"json", b""), (b"json", ENTRY), (b"json", entry(Waiting(FIRST_ID, 2**46, b""))),
    (b"json", _REPLACEMENT),
    (b"", _REPLACEMENT), (b"=task", _REPLACEMENT), (b"=ignored", _REPLACEMENT),
    (b"=task", _REPLACEMENT[: -len(ENTRY)]), (b"=task", _REPLACEMENT[: -len(ENTRY) - 1]),
]  # fmt: skip

META = b'{"status": "SUCCESS"}'
#: What the result backend may hold before: `None`: nothing.
BACKENDS: list[Any] = [
    None, b"", META, b'{"status": "STARTED"}', b'{"status": "SUCCESS", "result": 1}', b"status",
    b"\x80\x04\x8c\x06status\x94\x8c\x05RETRY", b"compressed", b"SUCCESS",
    b"tatus statu", b"status SUCCES UCCESS",
]  # fmt: skip
#: How long it is kept.
_BACKEND_MS = 3 * RETENTION_MS

#: How long an outcome is kept for a call that meets its execution, and until when it has been.
_KEEP_MS = 4 * RETENTION_MS
_MET = (-1, 0, 1, HOLD_MS, _KEEP_MS // 2 - 1, _KEEP_MS // 2, _KEEP_MS // 2 + 1, _KEEP_MS)

#: The values of each argument; `backend`, which the result backend holds, and `is_mute`.
ARGUMENTS: dict[str, dict[str, list[Any]]] = {
    "begin": {
        "execution_id": [_ONE, _TWO], "unanswered_ids": [b"", _ONE, _THREE + _ONE, _THREE],
        "task_id": [FIRST_ID, SECOND_ID], "root": ROOTS, "generation": [0, 1, 2],
        "fingerprint": _FINGERPRINTS, "worker": [_WORKER, _OTHER],
        **_LEASE, "max_attempts": [1, 2, 5], "error_ms": [ERROR_MS], "continues": [0, 1],
        "next_turn_ms": [0], "min_retention_ms": [None, 0, 1, _KEEP_MS, _KEEP_MS, _KEEP_MS],
    },
    "complete": {**_TOKENS, **_OUTCOME, "retention_ms": [RETENTION_MS], **_SENDING},
    "fused_complete": {
        "token": [*_TOKENS["token"], 0], **_OUTCOME, "retention_ms": [RETENTION_MS],
        "meta": [META], "expires": [0, 500],
        "backend": [*BACKENDS, OTHER_TYPE], "is_mute": [False] * 4 + [True],
    },
    "fail": {**_TOKENS, **_OUTCOME, "retention_ms": [ERROR_MS], **_SENDING},
    "release": {
        **_TOKENS, "hold_ms": [0, 0, HOLD_MS], "retention_ms": [RETENTION_MS], **_ERROR_ARGUMENTS,
        "lease_ms": ["", _SENDING_MS],
    },
    "extend": {**_TOKENS, **_LEASE},
    "save_step": {**_TOKENS, "entry": [ENTRY, entries.write("two", "", b"")], **_LEASE},
    "abandon": {
        "task_id": [FIRST_ID, FIRST_ID, SECOND_ID], "root": ROOTS,
        "worker": [_WORKER, _WORKER, _OTHER], "grace_ms": [0, 1000, 2 * LEASE_MS],
        **_ERROR_ARGUMENTS, "execution_id": [_THREE], "lease_ms": ["", _SENDING_MS],
    },
    "reserve": {
        "task_id": [FIRST_ID, SECOND_ID], "fingerprint": _FINGERPRINTS,
        "hold_ms": [0, HOLD_MS, 2 * RETENTION_MS],
    },
    "continuation": {"execution_id": [_ONE, _TWO], "lease_ms": ["", "", 0, _SENDING_MS]},
    "get": {},
    "forget": {
        "state": ["", "R", "S", "C", "F", "?", "-"], "token": ["", TOKEN, TOKEN, TOKEN - 1, 17],
    },
}  # fmt: skip

#: The time field of a record, from now.
_TIMES = (-LEASE_MS, -1, 0, 1, LEASE_MS)
#: Added to a token that is a day ahead of the server's clock.
AHEAD = 86_400_000_000 - TOKEN


#: Values that are not records.
DAMAGED = [
    b"", b"S", b"S" * 14, b"S" * 15, b"Z" * 40, b"s" + bytes(39), bytes(range(200)), b"{}",
    b"." + bytes(39), b"%" + bytes(39), b"S" + bytes(14) + b"\xff" * 9,
    *(letter + bytes(18) + b"\x10" + bytes(17) for letter in (b"P", b"Q")),
]  # fmt: skip
#: The replies of scripts to them, if not `lost`.
_DAMAGED_CASES = {"begin": "corrupt", "reserve": "corrupt", "get": "found"}


class Case(NamedTuple):
    #: Its times are from now.
    record: Value
    #: Of the message, for a script that gets it.
    entry: Value
    arguments: dict[str, Any]


def all_cases(name: str, limit: int, now_ms: int) -> Iterator[Case]:
    """Yields as many cases of a script; they are the same each time."""
    rng, lists = random.Random(name), ARGUMENTS[name]
    for _ in range(limit):
        record = rng.choice(all_records())
        arguments = {argument: rng.choice(values) for argument, values in lists.items()}
        if isinstance(record, Record):
            record = vary(rng, record)
            ahead = AHEAD + now_ms * 1000 if record.token > TOKEN else 0
            if ahead and arguments.get("token") == TOKEN:
                arguments["token"] = record.token + ahead
            record = record._replace(token=record.token + ahead, expires=record.expires + now_ms)
        beside: Value = None
        if name in WITH_ENTRY and isinstance(record, Record | None) and rng.random() < 0.6:
            beside = rng.choice(all_entries())
            if isinstance(beside, Record):
                root = arguments.get("root", ROOTS[0])
                beside = beside._replace(expires=beside.expires + now_ms, root=root)
        yield Case(record, beside, arguments)


def vary(rng: random.Random, record: Record) -> Record:
    """Returns a record with a label, with calls that have met its execution, or one that ends."""
    if rng.random() < 0.2:
        record = record._replace(fingerprint=rng.choice(LABELLED))
    if rng.random() < 0.4 and not record.finished and record.owner != NOBODY:
        record = record._replace(met=rng.choice(_MET))
    if rng.random() < 0.1:
        record = record._replace(expires=rng.choice([0, 1, LEASE_MS // 2]))
    return record


@cache
def all_entries() -> list[Record | bytes]:
    """Returns what the entry of a message may be, relative to a server time of 0."""
    found: list[Record | bytes] = [b"S" * 14]
    letters = [("C", 0), ("F", 0), *product("PQ", _UNTIL)]
    for (state, until), generation, (form, body), owner, worker in product(
        letters, (0, 1), [(b"json", b"{}"), (b"", b"")], (_ONE, _THREE), (_WORKER, _OTHER),
    ):  # fmt: skip
        found.append(Record(
            state, 0, generation, -LEASE_MS, b"", FIRST_ID, worker, owner, form, body,
            2 * RETENTION_MS, b"", until,
        ))  # fmt: skip
    return found


@cache
def all_records() -> list[Value]:
    """Returns the records, relative to a server time of 0.

    A token above TOKEN stands for one that is ahead of the clock.
    """
    records: list[Value] = [None] * 60
    records += DAMAGED * 8
    records += [OTHER_TYPE] * 40
    endings = [(b"", b"", "CF", 0), (ROOTS[0], _ONE, "CF", 0)]
    endings += [(ROOTS[0], _ONE, "PQ", until) for until in _UNTIL]
    for at_ms, token, fingerprint, (form, body), attempt, (root, owner, states, until) in product(
        (-LEASE_MS, LEASE_MS),
        (TOKEN, TOKEN + 7),
        (KEY.fingerprint, b""),
        _OUTCOMES,
        (1, 5),
        endings,
    ):
        for state in states:
            records.append(Record(
                state, attempt, token, at_ms, fingerprint, FIRST_ID, _WORKER, owner, form, body,
                RETENTION_MS, root, until,
            ))  # fmt: skip
    for state, at_ms, token, fingerprint, body, attempt in product(
        "RRRSSS", _TIMES, (TOKEN, TOKEN + 7), (KEY.fingerprint, b""), _BODIES, (0, 1, 2, 5)
    ):
        # Of a takeover: how long the key was orphaned.
        form = b"17" if state == "S" and attempt == 2 else b""
        # An abandoned execution leaves its worker in the record.
        worker = b"" if state == "R" and attempt < 2 else _WORKER
        # A quarter of the executions has been abandoned.
        owner = _ONE if state == "S" and not (attempt == 5 and body) else b""
        if state == "R" and (worker or not fingerprint):
            owner = NOBODY
        elif state == "R" and attempt:
            owner = b"%d" % (len(body) % 3)
        root = ROOTS[0] if owner not in (b"", NOBODY) else b""
        records.append(Record(
            state, attempt, token, at_ms, fingerprint, FIRST_ID, worker, owner, form, body,
            RETENTION_MS, root,
        ))  # fmt: skip
    return records


def call(script: scripts.Script, case: Case, name: str, now_ms: int) -> Call:
    """Returns the call of a case; `name` is that of the record."""
    backend = case.arguments.get("backend", UNCHANGED)
    before: dict[str, tuple[Value, int]] = {
        name: (case.record, _expiry(case.record, now_ms)),
    }
    if backend is UNCHANGED:
        before[name + _ENTRY] = case.entry, _expiry(case.entry, now_ms)
    else:
        before[name + _BACKEND] = backend, now_ms + _BACKEND_MS
    is_given = backend is not UNCHANGED or script.name in WITH_ENTRY
    argv = argv_of(script, case.arguments)
    is_mute = case.arguments.get("is_mute", False)
    return Call([*before] if is_given else [name], argv, before, is_mute)


def argv_of(script: scripts.Script, arguments: dict[str, Any]) -> list[Any]:
    """Returns the arguments in the order of the script's; those at the end may be missing."""
    argv = [arguments[argument] for argument in script.argv]
    while argv and argv[-1] is None:
        argv.pop()
    return argv


def _expiry(value: Value, now_ms: int) -> int:
    return value.expires if isinstance(value, Record) else now_ms + RETENTION_MS


def compare(script: scripts.Script, case: Case, effect: Effect) -> str:
    """Returns how the call differs from the model, or ""."""
    if not isinstance(effect.reply, bytes):
        return f"replies {effect.reply!r}"
    if isinstance(case.record, OtherType) and not _is_forgotten(script, case):
        expected = WRONG_TYPE, WRONG_TYPE
        actual = effect.reply, effect.keys[0][0]
        if case.arguments.get("token") == 0:  # a replay, which does not read the record
            expected = effect.reply, WRONG_TYPE
        return "" if actual == expected else f"replies and stores {actual}, not {expected}"
    reply = script.reply(effect.reply)
    mismatch = _compare_record(script, case, effect, reply)
    if mismatch:
        return mismatch
    if "backend" in case.arguments:
        return compare_backend(case.arguments, effect, reply, 1)
    return _compare_entry(script, case, effect, reply)


def _compare_record(
    script: scripts.Script, case: Case, effect: Effect, reply: scripts.Reply
) -> str:
    raw, ttl_ms = effect.keys[0]
    if script.name == "get" and reply.case == "found":
        replied_ms, _, rest = reply.raw.partition(b" ")
        if abs(int(replied_ms) - ttl_ms) > effect.tolerance_ms:
            return f"replies a time to live of {replied_ms!r}, not {ttl_ms}"
        reply = reply._replace(raw=rest)
    if isinstance(case.entry, bytes) and script.name == "begin":
        return "" if reply.case == "corrupt" else f"replies {reply.case} for a damaged entry"
    if isinstance(case.record, bytes | OtherType):
        return _compare_damaged(script, case, reply, raw)
    expected = _expected(script, case, effect, reply)
    if reply.case != expected.case:
        return f"replies {reply.case}, not {expected.case}"
    if reply.raw != (encode(expected.replied) or b""):
        return f"replies {reply.raw!r}, not {encode(expected.replied)!r}"
    return effect.difference("record", 0, expected.after)


def _expected(script: scripts.Script, case: Case, effect: Effect, reply: scripts.Reply) -> Result:
    assert isinstance(case.record, Record | None)
    arguments = dict(case.arguments)
    if script.name in WITH_ENTRY:
        arguments["entry"] = (
            None if isinstance(case.entry, bytes) else at(case.entry, effect.moment)
        )
    # A reply without a time: the script did not read the clock, and the model needs none either.
    now_ms = reply.now_ms or effect.moment
    clock = Clock(now_ms, microsecond(now_ms, effect.keys[0][0]))
    if isinstance(arguments.get("backend"), OtherType):
        arguments["backend"] = WRONG_TYPE
    record = at(case.record, effect.moment)
    result: Result = getattr(Protocol(), script.name)(record, clock, **arguments)
    return result


def _compare_entry(script: scripts.Script, case: Case, effect: Effect, reply: scripts.Reply) -> str:
    """Returns how the entry differs from the model's, or ""."""
    if not isinstance(case.record, Record | None) or isinstance(case.entry, bytes):
        return ""
    expected = at(case.entry, effect.moment)
    if script.name in WITH_ENTRY:
        result = _expected(script, case, effect, reply)
        expected = expected if result.entry is UNCHANGED else result.entry  # type: ignore[assignment]
    return effect.difference("entry", 1, expected)


def compare_backend(
    arguments: dict[str, Any], effect: Effect, reply: scripts.Reply, number: int
) -> str:
    """Returns how what the result backend holds differs from what the reply says, or ""."""
    before, (backend, ttl_ms) = arguments["backend"], effect.keys[number]
    if isinstance(before, OtherType):
        before = WRONG_TYPE
    # A resend is `written`, too, if the result is there already.
    is_written = reply.case == "written" and before != META
    if backend != (META if is_written else before):
        return f"{reply.case}: the result backend holds {backend!r}"
    expected_ms = arguments["expires"] * 1000 if is_written else _BACKEND_MS
    if backend is None or (not expected_ms and ttl_ms == -1):
        return ""
    return effect.expiry_difference("result", number, effect.moment + expected_ms)


def _is_forgotten(script: scripts.Script, case: Case) -> bool:
    """Whether the call deletes a record that cannot be read."""
    state, token = case.arguments.get("state"), case.arguments.get("token")
    return script.name == "forget" and (state == "" or (state, token) == ("?", ""))


def _compare_damaged(script: scripts.Script, case: Case, reply: scripts.Reply, raw: Any) -> str:
    """A script that must read the record reports that it cannot, and does not change it."""
    if script.name == "forget":
        expected = ("ok", b"", None) if _is_forgotten(script, case) else (
            "changed", case.record, case.record
        )  # fmt: skip
    elif case.arguments.get("token") == 0:  # a replay, which does not read the record
        expected = reply.case, b"", case.record
    else:
        expected = _DAMAGED_CASES.get(script.name, "lost"), case.record, case.record
    actual = reply.case, reply.raw, raw
    return "" if actual == expected else f"replies and stores {actual}, not {expected}"
