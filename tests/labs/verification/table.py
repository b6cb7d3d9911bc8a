"""Single calls: each script with each kind of record, compared with the model.

The conformance machine reaches a record by a sequence of calls; this writes the record directly. So
a few thousand calls, pipelined, cover the combinations of records and arguments.
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
    Clock,
    Error,
    Protocol,
    Record,
    Result,
)
from tests.labs.verification.wire import (
    AT_THE_MOMENT,
    MOMENT,
    TOLERANCE_MS,
    encode,
    entry,
    microsecond,
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

#: Calls of each script, drawn from all combinations of the lists below.
CASES = 2000
_PIPELINED = 60
_NAME = "idem:table"
#: Suffix of the task's result.
_BACKEND = ":backend"

# With every character that is special in a Lua pattern: ids must not be used as patterns.
_ONE, _TWO, _THREE = b"%a.*-+?[^$]1(.)%", b"." * 16, b"3" * 16
FIRST_ID, SECOND_ID = layout.write_task_id(FIRST), layout.write_task_id(SECOND)
_WORKER, _OTHER = WORKER.encode(), OTHER_WORKER.encode()
_FINGERPRINTS = [KEY.fingerprint, KEY.fingerprint, OTHER_ARGUMENTS.fingerprint, b""]
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
#: Errors of the first and of the second task id, and one that just leaves room for the other.
_ERROR_1 = Error(FIRST_ID, "F", 1, 1_700_000_000_000, b"json", b"{}")
_ERROR_2 = Error(SECOND_ID, "G", 0, 1_700_000_000_001, b"", b"too large")
_LARGE = _ERROR_2._replace(body=b"x" * (OLDER_ERRORS - _ERROR_1.size - 23 - len(SECOND_ID)))
#: Long enough to be parsed as an error, except for its name.
_LONG_ENTRY = entries.write("one", "json", bytes(60))
#: Errors and steps in a body; the last ones are cut short.
_BODIES: list[tuple[tuple[Error, ...], bytes]] = [
    ((), b""), ((), ENTRY), ((), _LONG_ENTRY), ((_ERROR_1,), b""), ((_ERROR_1,), _LONG_ENTRY),
    ((_ERROR_2, _ERROR_1), b""), ((_ERROR_2, _ERROR_1), ENTRY), ((_ERROR_1, _ERROR_2), b""),
    ((_ERROR_1, _LARGE), b""), ((_ERROR_1, _LARGE._replace(body=_LARGE.body + b"x")), ENTRY),
    ((_ERROR_1,), b"\0"), ((), b"\0\0\1\0\0\0F"),
]  # fmt: skip
_REPLACEMENT = layout.write_replacement(1, FIRST, ENTRY)
#: Formats and bodies of outcomes: some look like errors or replacements; some are of a task that
#: replaced itself: with finished steps, without any, and cut short.
_OUTCOMES = [
    (b"json", b""), (b"json", ENTRY), (b"json", entry(_ERROR_1)), (b"json", _REPLACEMENT),
    (b"", _REPLACEMENT), (b"=task", _REPLACEMENT), (b"=ignored", _REPLACEMENT),
    (b"=task", _REPLACEMENT[: -len(ENTRY)]), (b"=task", _REPLACEMENT[: -len(ENTRY) - 1]),
]  # fmt: skip

META = b'{"status": "SUCCESS"}'
#: What the result backend may hold before: `None`: nothing.
BACKENDS = [
    None, b"", META, b'{"status": "STARTED"}', b'{"status": "SUCCESS", "result": 1}', b"status",
    b"\x80\x04\x8c\x06status\x94\x8c\x05RETRY", b"compressed", b"SUCCESS",
    b"tatus statu", b"status SUCCES UCCESS",
]  # fmt: skip
#: How long it is kept.
_BACKEND_MS = 3 * RETENTION_MS

#: The values of each argument, and `backend`.
ARGUMENTS: dict[str, dict[str, list[Any]]] = {
    "begin": {
        "execution_id": [_ONE, _TWO], "unanswered_ids": [b"", _ONE, _THREE + _ONE, _THREE],
        "task_id": [FIRST_ID, SECOND_ID], "generation": [0, 1, 2], "fingerprint": _FINGERPRINTS,
        "worker": [_WORKER, _OTHER],
        **_LEASE, "max_attempts": [1, 2, 5], "error_ms": [ERROR_MS],
    },
    "complete": {**_TOKENS, **_OUTCOME, "retention_ms": [RETENTION_MS]},
    "fused_complete": {
        "token": [*_TOKENS["token"], 0], **_OUTCOME, "retention_ms": [RETENTION_MS],
        "meta": [META], "expires": [0, 500], "backend": BACKENDS,
    },
    "fail": {**_TOKENS, **_OUTCOME, "retention_ms": [ERROR_MS]},
    "release": {
        **_TOKENS, "hold_ms": [0, 0, HOLD_MS], "retention_ms": [RETENTION_MS], **_ERROR_ARGUMENTS,
    },
    "extend": {**_TOKENS, **_LEASE},
    "save_step": {**_TOKENS, "entry": [ENTRY, entries.write("two", "", b"")], **_LEASE},
    "abandon": {
        "task_id": [FIRST_ID, FIRST_ID, SECOND_ID], "worker": [_WORKER, _WORKER, _OTHER],
        "grace_ms": [0, 1000, 2 * LEASE_MS], **_ERROR_ARGUMENTS,
    },
    "reserve": {
        "task_id": [FIRST_ID, SECOND_ID], "fingerprint": _FINGERPRINTS,
        "hold_ms": [0, HOLD_MS, 2 * RETENTION_MS],
    },
    "mark_continued": {"task_id": [FIRST_ID, SECOND_ID]},
    "get": {},
    "forget": {"state": ["", "R", "S", "C", "F", "?"], "token": ["", TOKEN, TOKEN, TOKEN - 1, 17]},
}  # fmt: skip

#: The time field of a record, relative to the server's time; a time in _NOW is set on the server.
_NOW = (-1, 0, 1)
_TIMES = (-LEASE_MS, *_NOW, LEASE_MS)
#: Added to a token that is a day ahead of the server's clock.
AHEAD = 86_400_000_000 - TOKEN


#: Values that are not records.
DAMAGED = [
    b"", b"S", b"S" * 14, b"S" * 15, b"Z" * 40, b"s" + bytes(39), bytes(range(200)), b"{}",
    b"." + bytes(39), b"%" + bytes(39), b"S" + bytes(14) + b"\xff" * 9,
]  # fmt: skip
#: The replies of scripts to them, if not `lost`.
_DAMAGED_CASES = {"begin": "corrupt", "reserve": "corrupt", "get": "found"}


class Case(NamedTuple):
    record: Record | bytes | None
    #: Milliseconds between the record's time and the call; None: the record's time is set already.
    after_ms: int | None
    arguments: dict[str, Any]


def mismatches(client: redis.Redis, name: str, cases: int = CASES) -> Iterator[str]:
    """Yields a description of each call whose effect differs from the model's."""
    script = scripts.load(name)
    client.script_load(script.source)
    drawn = _cases(client, name, cases)
    while batch := list(islice(drawn, _PIPELINED)):
        pipeline = client.pipeline(transaction=False)
        for number, case in enumerate(batch):
            _queue(pipeline, script, f"{_NAME}:{number}", case)
        results = iter(pipeline.execute(raise_on_error=False))
        for case in batch:
            if "backend" in case.arguments:
                next(results)
            _, reply, moment, raw, ttl_ms, time, _ = (next(results) for _ in range(7))
            mismatch = _compare(script, case, reply, moment, raw, ttl_ms, time)
            if "backend" in case.arguments:
                backend, backend_ttl_ms, _ = (next(results) for _ in range(3))
                mismatch = mismatch or _compare_backend(
                    script, case, reply, backend, backend_ttl_ms
                )
            if mismatch:
                yield f"{name}: {mismatch}: {case}"


def _cases(client: redis.Redis, name: str, limit: int) -> Iterator[Case]:
    seconds, microseconds = client.time()
    now_ms = seconds * 1000 + microseconds // 1000
    calls, records = _calls(name), all_records()
    everything = range(len(calls) * len(records))
    for number in random.Random(name).sample(everything, min(limit, len(everything))):
        record, after_ms = records[number % len(records)]
        arguments = calls[number // len(records)]
        if isinstance(record, Record):
            ahead = AHEAD + now_ms * 1000 if record.token > TOKEN else 0
            if ahead and arguments.get("token") == TOKEN:
                arguments = {**arguments, "token": record.token + ahead}
            record = record._replace(
                token=record.token + ahead, at=record.at + now_ms, expires=record.expires + now_ms
            )
        yield Case(record, after_ms, arguments)


@cache
def _calls(name: str) -> list[dict[str, Any]]:
    lists = ARGUMENTS[name]
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


@cache
def all_records() -> list[tuple[Record | bytes | None, int | None]]:
    """Returns the records, relative to a server time of 0, each with `Case.after_ms`.

    A token above TOKEN stands for one that is ahead of the clock.
    """
    records: list[tuple[Record | bytes | None, int | None]] = [(None, None)] * 60
    records += [(damaged, None) for damaged in DAMAGED * 8]
    for state, at, token, fingerprint, (form, body), attempt in product(
        "CDFG", (-LEASE_MS, LEASE_MS), (TOKEN, TOKEN + 7), (KEY.fingerprint, b""), _OUTCOMES, (1, 5)
    ):
        record = Record(
            state, attempt, token, at, fingerprint, FIRST_ID, _WORKER, b"", form, body,
            RETENTION_MS,
        )  # fmt: skip
        records.append((record, None))
    for state, at, token, fingerprint, (errors, body), attempt in product(
        "RRSSSE", _TIMES, (TOKEN, TOKEN + 7), (KEY.fingerprint, b""), _BODIES, (0, 1, 2, 5)
    ):
        if state == "E" and (fingerprint or body or not errors):
            continue
        # Of a takeover: how long the key was orphaned.
        form = b"17" if state == "S" and attempt == 2 else b""
        # An abandoned execution leaves its worker in the record.
        worker = b"" if state in "RE" and attempt < 2 else _WORKER
        # A quarter of the executions has been abandoned.
        owner = _ONE if state == "S" and not (attempt == 5 and body) else b""
        if state in "RE" and (worker or state == "E" or not fingerprint):
            owner = NOBODY
        elif state == "R" and attempt:
            owner = b"%d" % (len(body) % 3)
        record = Record(
            state, attempt, token, at, fingerprint, FIRST_ID, worker, owner, form, body,
            RETENTION_MS, errors,
        )  # fmt: skip
        records.append((record, -at if at in _NOW else None))
    return records


def _queue(pipeline: Any, script: scripts.Script, name: str, case: Case) -> None:
    # An argument that is only for a turn is the last one.
    values = [case.arguments[name] for name in script.argv if name in case.arguments]
    if case.record is None:
        pipeline.delete(name)
    elif isinstance(case.record, bytes):
        pipeline.set(name, case.record, px=RETENTION_MS)
    else:
        pipeline.set(name, encode(case.record) or b"", pxat=case.record.expires)
    names, has_backend = [name], "backend" in case.arguments
    if has_backend:
        names.append(name + _BACKEND)
        before = case.arguments["backend"]
        if before is None:
            pipeline.delete(names[1])
        else:
            pipeline.set(names[1], before, px=_BACKEND_MS)
    if case.after_ms is None:
        pipeline.evalsha(script.sha, len(names), *names, *values)
    else:
        source = AT_THE_MOMENT % case.after_ms + script.source
        pipeline.eval(source, len(names), *names, *values)
    pipeline.get(name + MOMENT).get(name).pttl(name).time().delete(name)
    if has_backend:
        pipeline.get(names[1]).pttl(names[1]).delete(names[1])


def _compare(
    script: scripts.Script, case: Case, raw_reply: Any, moment: bytes | None, raw: Any, ttl_ms: int,
    time: tuple[int, int],
) -> str:  # fmt: skip
    """Returns how the call differs from the model, or ""."""
    if not isinstance(raw_reply, bytes):
        return f"replies {raw_reply!r}"
    reply = script.reply(raw_reply)
    if script.name == "get" and reply.case == "found":
        replied_ms, _, rest = reply.raw.partition(b" ")
        if abs(int(replied_ms) - ttl_ms) > TOLERANCE_MS:
            return f"replies a time to live of {replied_ms!r}, not {ttl_ms}"
        reply = reply._replace(raw=rest)
    record = case.record
    if isinstance(record, bytes):
        return _compare_damaged(script, case, reply, raw)
    if record is not None and case.after_ms is not None:
        record = record._replace(at=int(moment or 0) - case.after_ms)
    # A reply without a time: the script did not read the clock, which the model may not need, too.
    now_ms = reply.now_ms or (time[0] * 1000 if case.after_ms is None else int(moment or 0))
    clock = Clock(now_ms, microsecond(now_ms, raw))
    expected: Result = getattr(Protocol(), script.name)(record, clock, **case.arguments)
    if reply.case != expected.case:
        return f"replies {reply.case}, not {expected.case}"
    if reply.raw != (encode(expected.replied) or b""):
        return f"replies {reply.raw!r}, not {encode(expected.replied)!r}"
    if raw != encode(expected.after):
        return f"stores {raw!r}, not {encode(expected.after)!r}"
    if expected.after is not None:
        expires = time[0] * 1000 + ttl_ms
        if ttl_ms < 0 or abs(expires - expected.after.expires) > TOLERANCE_MS:
            return f"stores it for {ttl_ms} ms"
    return ""


def _compare_backend(
    script: scripts.Script, case: Case, raw_reply: bytes, backend: bytes | None, ttl_ms: int
) -> str:
    """Returns how what the result backend holds differs from what the reply says, or ""."""
    before, replied = case.arguments["backend"], script.reply(raw_reply).case
    # A resend is `written`, too, if the result is there already.
    is_written = replied == "written" and before != META
    if backend != (META if is_written else before):
        return f"{replied}: the result backend holds {backend!r}"
    expected_ms = case.arguments["expires"] * 1000 if is_written else _BACKEND_MS
    if backend is not None and abs(ttl_ms - (expected_ms or -1)) > TOLERANCE_MS:
        return f"{replied}: the result backend keeps it for {ttl_ms} ms"
    return ""


def _compare_damaged(script: scripts.Script, case: Case, reply: scripts.Reply, raw: Any) -> str:
    """A script that must read the record reports that it cannot, and does not change it."""
    if script.name == "forget":
        any_state = case.arguments["state"] == ""
        as_displayed = (case.arguments["state"], case.arguments["token"]) == ("?", "")
        expected = ("ok", b"", None) if any_state or as_displayed else (
            "changed", case.record, case.record
        )  # fmt: skip
    elif case.arguments.get("token") == 0:  # a replay, which does not read the record
        expected = reply.case, b"", case.record
    else:
        expected = _DAMAGED_CASES.get(script.name, "lost"), case.record, case.record
    actual = reply.case, reply.raw, raw
    return "" if actual == expected else f"replies and stores {actual}, not {expected}"
