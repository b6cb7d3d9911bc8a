"""Each script on each kind of record, one call at a time, against the model.

Where the conformance machine gets to a state by a sequence of calls, this puts it there. So a few
thousand calls, sent many at a time, meet each script with whatever it may find and be given.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import islice, product
from typing import Any, NamedTuple

import redis

from celery_idempotent.record import layout
from celery_idempotent.record import steps as entries
from celery_idempotent.store import scripts
from tests.labs.verification.model import (
    NOBODY,
    OLDER_ERRORS,
    Answer,
    Clock,
    Error,
    Protocol,
    Record,
)
from tests.labs.verification.wire import (
    AT_THE_MOMENT,
    MOMENT,
    TOLERANCE_MS,
    entry,
    microsecond,
    written,
)
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

#: Of each script, drawn from all that the lists below make.
CASES = 2000
_AT_ONCE = 60
_NAME = "idem:table"

# With all that has a meaning in a pattern: nobody may take an id for one.
_ONE, _TWO, _THREE = b"%a.*-+?[^$]1(.)%", b"." * 16, b"3" * 16
_FIRST, _SECOND = layout.write_task_id(FIRST), layout.write_task_id(SECOND)
_WORKER, _OTHER = WORKER.encode(), OTHER_WORKER.encode()
_FINGERPRINTS = [KEY.fingerprint, KEY.fingerprint, OTHER_ARGUMENTS.fingerprint, b""]
_ENTRY = entries.write("one", "json", b"1")
_LEASE = {"lease_ms": [LEASE_MS], "ttl_ms": [LEASE_MS + RETENTION_MS]}
#: Told apart from the token below by one, and by a digit that only 16 digits show.
TOKEN = 1_700_000_000_000_003
_TOKENS = {"token": [TOKEN, TOKEN, TOKEN, TOKEN - 1, TOKEN + 1, 17]}
_OUTCOME = {"format": [b"json", b""], "body": [b'"charged"', b"", _ENTRY]}

_LAST_WORD = {
    "generation": [0, 2], "format": [b"json", b""], "error": [b"", b"", b"too large", _ENTRY],
    "error_ms": [ERROR_MS, 3 * RETENTION_MS],
}  # fmt: skip
#: Of the first task id, of the second and of both, and with so much that no more has room.
_FIRSTS = Error(_FIRST, "F", 1, 1_700_000_000_000, b"json", b"{}")
_SECONDS = Error(_SECOND, "G", 0, 1_700_000_000_001, b"", b"too large")
_LARGE = _SECONDS._replace(body=b"x" * (OLDER_ERRORS - _FIRSTS.size - 23 - len(_SECOND)))
#: Long enough to be read as an error, if its name were not.
_LONG = entries.write("one", "json", bytes(60))
#: Errors and steps that may be left; the last ones cut short.
_LEFT: list[tuple[tuple[Error, ...], bytes]] = [
    ((), b""), ((), _ENTRY), ((), _LONG), ((_FIRSTS,), b""), ((_FIRSTS,), _LONG),
    ((_SECONDS, _FIRSTS), b""), ((_SECONDS, _FIRSTS), _ENTRY), ((_FIRSTS, _SECONDS), b""),
    ((_FIRSTS, _LARGE), b""), ((_FIRSTS, _LARGE._replace(body=_LARGE.body + b"x")), _ENTRY),
    ((_FIRSTS,), b"\0"), ((), b"\0\0\1\0\0\0F"),
]  # fmt: skip
_REPLACED = layout.write_replacement(1, FIRST, _ENTRY)
#: Formats and bodies of outcomes: with what would be an error, or a replacement, if it were none;
#: of a task that has replaced itself, with finished steps, without any, and with nothing whole.
_OUTCOMES = [
    (b"json", b""), (b"json", _ENTRY), (b"json", entry(_FIRSTS)), (b"json", _REPLACED),
    (b"", _REPLACED), (b"=task", _REPLACED), (b"=untold", _REPLACED),
    (b"=task", _REPLACED[: -len(_ENTRY)]), (b"=task", _REPLACED[: -len(_ENTRY) - 1]),
]  # fmt: skip

#: What each argument may be.
ARGUMENTS: dict[str, dict[str, list[Any]]] = {
    "begin": {
        "execution_id": [_ONE, _TWO], "unanswered_ids": [b"", _ONE, _THREE + _ONE, _THREE],
        "task_id": [_FIRST, _SECOND], "generation": [0, 1, 2], "fingerprint": _FINGERPRINTS,
        "worker": [_WORKER, _OTHER],
        **_LEASE, "max_attempts": [1, 2, 5], "error_ms": [ERROR_MS],
    },
    "complete": {**_TOKENS, **_OUTCOME, "retention_ms": [RETENTION_MS]},
    "fail": {**_TOKENS, **_OUTCOME, "retention_ms": [ERROR_MS]},
    "release": {
        **_TOKENS, "hold_ms": [0, 0, HOLD_MS], "retention_ms": [RETENTION_MS], **_LAST_WORD,
    },
    "extend": {**_TOKENS, **_LEASE},
    "save_step": {**_TOKENS, "entry": [_ENTRY, entries.write("two", "", b"")], **_LEASE},
    "abandon": {
        "task_id": [_FIRST, _FIRST, _SECOND], "worker": [_WORKER, _WORKER, _OTHER],
        "grace_ms": [0, 1000, 2 * LEASE_MS], **_LAST_WORD,
    },
    "reserve": {
        "task_id": [_FIRST, _SECOND], "fingerprint": _FINGERPRINTS,
        "hold_ms": [0, HOLD_MS, 2 * RETENTION_MS],
    },
    "mark_continued": {"task_id": [_FIRST, _SECOND]},
    "get": {},
    "forget": {"state": ["", "R", "S", "C", "F", "?"], "token": ["", TOKEN, TOKEN, TOKEN - 1, 17]},
}  # fmt: skip

#: What may be there: the state, its time, what else. A time within a millisecond of the server's
#: now is set on the server.
_NOW = (-1, 0, 1)
_TIMES = (-LEASE_MS, *_NOW, LEASE_MS)
#: The server's clock has fallen back by a day since.
_AHEAD = 86_400_000_000 - TOKEN


#: No records: what answers to a script that finds one, other than `lost`.
DAMAGED = [
    b"", b"S", b"S" * 14, b"S" * 15, b"Z" * 40, b"s" + bytes(39), bytes(range(200)), b"{}",
    b"." + bytes(39), b"%" + bytes(39), b"S" + bytes(14) + b"\xff" * 9,
]  # fmt: skip
_DAMAGED_CASES = {"begin": "corrupt", "reserve": "corrupt", "get": "found"}


class Case(NamedTuple):
    there: Record | bytes | None
    #: Milliseconds after its time; None where `there` has it already.
    after_ms: int | None
    arguments: dict[str, Any]


def mismatches(client: redis.Redis, name: str, cases: int = CASES) -> Iterator[str]:
    """Where the script `name` does not do what the model does."""
    script = scripts.load(name)
    client.script_load(script.source)
    drawn = _cases(client, name, cases)
    while some := list(islice(drawn, _AT_ONCE)):
        pipeline = client.pipeline(transaction=False)
        for number, case in enumerate(some):
            _queue(pipeline, script, f"{_NAME}:{number}", case)
        results = iter(pipeline.execute(raise_on_error=False))
        for case in some:
            _, answer, moment, raw, left_ms, time, _ = (next(results) for _ in range(7))
            wrong = _judge(script, case, answer, moment, raw, left_ms, time)
            if wrong:
                yield f"{name}: {wrong}: {case}"


def _cases(client: redis.Redis, name: str, most: int) -> Iterator[Case]:
    seconds, microseconds = client.time()
    now_ms = seconds * 1000 + microseconds // 1000
    calls, records = _calls(name), _records()
    everything = range(len(calls) * len(records))
    for number in random.Random(name).sample(everything, min(most, len(everything))):
        there, after_ms = records[number % len(records)]
        arguments = calls[number // len(records)]
        if isinstance(there, Record):
            ahead = _AHEAD + now_ms * 1000 if there.token > TOKEN else 0
            if ahead and arguments.get("token") == TOKEN:
                arguments = {**arguments, "token": there.token + ahead}
            there = there._replace(
                token=there.token + ahead, at=there.at + now_ms, expires=there.expires + now_ms
            )
        yield Case(there, after_ms, arguments)


@cache
def _calls(name: str) -> list[dict[str, Any]]:
    lists = ARGUMENTS[name]
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


@cache
def _records() -> list[tuple[Record | bytes | None, int | None]]:
    """Those that may be there, at the moment 0, and how long after its time; None where it has it.

    A token above TOKEN stands for one that is ahead of the clock.
    """
    records: list[tuple[Record | bytes | None, int | None]] = [(None, None)] * 60
    records += [(damaged, None) for damaged in DAMAGED * 8]
    for state, at, token, fingerprint, (form, body), attempt in product(
        "CDFG", (-LEASE_MS, LEASE_MS), (TOKEN, TOKEN + 7), (KEY.fingerprint, b""), _OUTCOMES, (1, 5)
    ):
        record = Record(
            state, attempt, token, at, fingerprint, _FIRST, _WORKER, b"", form, body,
            RETENTION_MS,
        )  # fmt: skip
        records.append((record, None))
    for state, at, token, fingerprint, (errors, body), attempt in product(
        "RRSSSE", _TIMES, (TOKEN, TOKEN + 7), (KEY.fingerprint, b""), _LEFT, (0, 1, 2, 5)
    ):
        if state == "E" and (fingerprint or body or not errors):
            continue
        # Of an execution: how long it stood still before.
        form = b"17" if state == "S" and attempt == 2 else b""
        # An execution that was abandoned has left its name.
        worker = b"" if state in "RE" and attempt < 2 else _WORKER
        # A quarter of the executions has been abandoned.
        execution_id = _ONE if state == "S" and not (attempt == 5 and body) else b""
        if state in "RE" and (worker or state == "E" or not fingerprint):
            execution_id = NOBODY
        elif state == "R" and attempt:
            execution_id = b"%d" % (len(body) % 3)
        record = Record(
            state, attempt, token, at, fingerprint, _FIRST, worker, execution_id, form, body,
            RETENTION_MS,
            errors,
        )  # fmt: skip
        records.append((record, -at if at in _NOW else None))
    return records


def _queue(pipeline: Any, script: scripts.Script, name: str, case: Case) -> None:
    values = script.arguments(case.arguments)
    if case.there is None:
        pipeline.delete(name)
    elif isinstance(case.there, bytes):
        pipeline.set(name, case.there, px=RETENTION_MS)
    else:
        pipeline.set(name, written(case.there) or b"", pxat=case.there.expires)
    if case.after_ms is None:
        pipeline.evalsha(script.sha, 1, name, *values)
    else:
        pipeline.eval(AT_THE_MOMENT % case.after_ms + script.source, 1, name, *values)
    pipeline.get(name + MOMENT).get(name).pttl(name).time().delete(name)


def _judge(
    script: scripts.Script, case: Case, answer: Any, moment: bytes | None, raw: Any, left_ms: int,
    time: tuple[int, int],
) -> str:  # fmt: skip
    if not isinstance(answer, bytes):
        return f"answers {answer!r}"
    reply = script.reply(answer)
    if script.name == "get" and reply.case == "found":
        # It tells the time that is left before it tells the record.
        told_ms, _, rest = reply.raw.partition(b" ")
        if abs(int(told_ms) - left_ms) > TOLERANCE_MS:
            return f"tells {told_ms!r} of {left_ms}"
        reply = reply._replace(raw=rest)
    there = case.there
    if isinstance(there, bytes):
        return _judge_damaged(script, case, reply, raw)
    if there is not None and case.after_ms is not None:
        there = there._replace(at=int(moment or 0) - case.after_ms)
    # Who names no time has asked for none: it is for the model to say whether that was right.
    now_ms = reply.now_ms or (time[0] * 1000 if case.after_ms is None else int(moment or 0))
    clock = Clock(now_ms, microsecond(now_ms, raw))
    expected: Answer = getattr(Protocol(), script.name)(there, clock, **case.arguments)
    if reply.case != expected.case:
        return f"answers {reply.case}, not {expected.case}"
    if reply.raw != (written(expected.told) or b""):
        return f"tells {reply.raw!r}, not {written(expected.told)!r}"
    if raw != written(expected.after):
        return f"leaves {raw!r}, not {written(expected.after)!r}"
    if expected.after is not None:
        ends = time[0] * 1000 + left_ms
        if left_ms < 0 or abs(ends - expected.after.expires) > TOLERANCE_MS:
            return f"leaves it for {left_ms} ms"
    return ""


def _judge_damaged(script: scripts.Script, case: Case, reply: scripts.Reply, raw: Any) -> str:
    """Whoever needs to read it says so, and leaves it alone."""
    if script.name == "forget":
        any_will_do = case.arguments["state"] == ""
        as_shown = (case.arguments["state"], case.arguments["token"]) == ("?", "")
        expected = ("ok", b"", None) if any_will_do or as_shown else (
            "changed", case.there, case.there
        )  # fmt: skip
    else:
        expected = _DAMAGED_CASES.get(script.name, "lost"), case.there, case.there
    seen = reply.case, reply.raw, raw
    return "" if seen == expected else f"does {seen}, not {expected}"
