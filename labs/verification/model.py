"""The scripts in lua/, as pure functions on the keys of one slot.

Each function takes the server's time in microseconds, names of keys and the arguments of its
script, and returns the reply: its case, and the record that the script replies with. `OFF` has the
names of the guards that are left out: see `guards`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: Guards that are left out.
OFF: set[str] = set()

#: Letters of records: of executions, of outcomes whose continuation is to be sent, of other ends.
RUNNING, SENDING, ENDED = "BAba", "Tt", "VEX"
#: Of what may hold a key.
HOLDING = "W" + RUNNING
EXECUTION_ID_BYTES = 8


class Record(NamedTuple):
    """A record, a slot included."""

    letter: str
    attempt: int
    token: int
    #: Milliseconds: the end of the lease, of the reservation or of the quiet time.
    at: int
    fingerprint: bytes = b""
    task_id: bytes = b""
    worker: bytes = b""
    owner: bytes = b""
    tail: bytes = b""
    body: bytes = b""


class Turn(NamedTuple):
    """Points to the record that holds a key."""

    token: int
    record: str


class Names(NamedTuple):
    """The keys of a script."""

    record: str
    slot: str | None = None
    turn: str | None = None


#: Bytes are a value that is not a record.
Value = Record | Turn | bytes
Reply = tuple[str, "Value | None"]


class Keys(dict[str, "Value"]):
    """The keys of a server, with their expiries in milliseconds."""

    def __init__(self, values: dict[str, Value] | None = None) -> None:
        super().__init__(values or {})
        self.expires: dict[str, Any] = {}

    def put(self, name: str, value: Value, expires: float | None = None) -> None:
        """Stores `value`; without `expires`, with the expiry that the key has."""
        self[name] = value
        if expires is not None:
            self.expires[name] = expires

    def record(self, name: str | None) -> Record | None:
        """Returns the record of that name."""
        value = None if name is None else self.get(name)
        return value if isinstance(value, Record) else None

    def turn(self, names: Names) -> Turn | None:
        """Returns the turn of a key, also of one whose ``idempotency_until`` has changed."""
        value = self.get(names.turn or names.record)
        if isinstance(value, Record):
            return Turn(value.token, names.turn) if names.turn else None
        return value if isinstance(value, Turn) else None

    def lengthen(self, name: str, expires: float) -> None:
        """Moves the expiry of a key, if that is earlier."""
        if name in self:
            self.expires[name] = max(expires, self.expires.get(name, 0))


def is_off(guard: str) -> bool:
    return guard in OFF


def _live(keys: Keys, name: str, record: Record, now: int, lease: int) -> Record | None:
    """Returns what may still go on. The first begin after the lease only marks it."""
    if record.at > now:
        return record
    if record.letter in "BAT" and not is_off("mark"):
        marked = record._replace(letter=record.letter.lower(), at=now + lease // 10)
        keys.put(name, marked)
        return marked
    return None


def begin(
    keys: Keys,
    now_us: int,
    names: Names,
    execution: bytes,
    task_id: bytes,
    generation: int,
    fingerprint: bytes,
    worker: bytes,
    tail: bytes,
    lease: int,
    ttl: int,
    hold: int,
    deadline: int,
    replaces: int = 0,
) -> Reply:
    """lua/begin.lua."""
    now = now_us // 1000
    if isinstance(keys.get(names.record), bytes):
        return "corrupt", keys[names.record]
    record, is_next = keys.record(names.record), False
    if record:
        if record.fingerprint and fingerprint and record.fingerprint != fingerprint:
            return "reused", record
        is_next = (
            record.letter in "WD"
            and record.task_id == task_id
            and (generation >= int(record.owner) or is_off("generation"))
        )
        if (
            record.letter in ENDED
            or (record.letter == "D" and not is_next)
            or (record.letter in SENDING and record.task_id != task_id)
        ):
            return "finished", record
    if now > deadline and not is_off("deadline"):
        return "late", None
    is_resent = (
        record is not None
        and record.owner[:EXECUTION_ID_BYTES] == execution
        and record.letter in RUNNING
        and not is_off("resent")
    )
    held = None
    if record and not is_next and not is_resent:
        held = _live(keys, names.record, record, now, lease)
    if record and not held and record.letter in SENDING:
        if not is_off("claim"):
            by = record.worker if is_off("worker of a claim") else worker
            record = record._replace(letter="T", at=now + lease, worker=by, owner=b"")
            keys.put(names.record, record)
        return "send", record
    if is_off("own lease") and names.turn:
        held = None
    is_replaced = held is not None and replaces == 1 and record.task_id != task_id
    waits = bool(names.turn and record)
    slot = keys.record(names.slot)
    is_waiting = slot is not None and slot.task_id == task_id
    if is_waiting:
        waits = True
        for name in (names.slot, names.record):
            keys.lengthen(name, now + hold)
        if not held and slot.at > now and not is_off("quiet time"):
            held = slot
    last, has_turn = (record.token if record else 0), not names.turn
    turn = keys.turn(names)
    if turn and not held:
        has_turn = turn.record == names.record
        if not is_off("last token"):
            last = max(last, turn.token)
        other = None if has_turn else keys.record(turn.record)
        if other and other.letter in HOLDING:
            held = _live(keys, turn.record, other, now, lease)
            if replaces == 1 or not held:
                if not is_off("fence"):
                    fenced = other._replace(token=other.token + 1)
                    if (replaces == 1 or (replaces and is_waiting)) and not is_off("replaced ends"):
                        letter = "X" if replaces == 1 else "D"
                        fenced = fenced._replace(
                            letter=letter, at=now, owner=b"9" * 16, body=task_id
                        )
                    keys.put(turn.record, fenced)
                held = None
    if held and not is_replaced:
        return ("wait" if waits else "held"), held
    if is_resent and (has_turn or is_off("turn of a resent begin")):
        if not is_off("resent renews"):
            record = record._replace(letter=record.letter.upper(), at=now + lease)
            keys.put(names.record, record, now + ttl)
        return "begun", record
    attempt, orphaned, body = 1, b"", b""
    if record and not is_replaced and record.letter != "D":
        counts = (
            record.letter == "a"
            or (is_off("mark") and record.letter == "A")
            or (is_off("confirm") and record.letter in RUNNING)
        )
        attempt = max(1, min(255, record.attempt + counts))
        body = b"" if is_off("body stays") else record.body
        orphaned = b"" if record.letter == "W" else b"%d" % (now - record.at)
        fingerprint = fingerprint or record.fingerprint
    token = max(now_us, last + 1)
    owner = execution + orphaned
    record = Record(
        "B", attempt, token, now + lease, fingerprint, task_id, worker, owner, tail, body
    )
    keys.put(names.record, record, now + ttl)
    if is_waiting and not is_off("slot ends"):
        del keys[names.slot]
    if names.turn:
        keys.put(names.turn, Turn(token, names.record), now + ttl)
    return "begun", record


def extend(
    keys: Keys, now_us: int, names: Names, token: int, lease: int, ttl: int, step: bytes = b""
) -> Reply:
    """lua/extend.lua."""
    now = now_us // 1000
    record = keys.record(names.record)
    if (
        record is None
        or record.letter not in RUNNING
        or (record.token != token and not is_off("token of extend"))
    ):
        return "lost", keys.get(names.record)
    body = record.body if record.body.endswith(step) else record.body + step
    keys.put(names.record, record._replace(letter="A", at=now + lease, body=body), now + ttl)
    if names.turn in keys:
        keys.expires[names.turn] = now + ttl
    return "ok", None


def settle(
    keys: Keys,
    now_us: int,
    names: Names,
    token: int,
    letter: str,
    at: int = 0,
    owner: bytes = b"",
    tail: bytes = b"",
    body: bytes = b"",
    retention: int = 0,
    result: str | None = None,
    meta: bytes = b"",
    expires: int = 0,
    *,
    may_publish: bool = True,
) -> Reply:
    """lua/settle.lua.

    Args:
        result: the key of the task's result.
        may_publish: the server does not refuse it.
    """
    if token:
        case, record = _settle(
            keys, now_us // 1000, names, token, letter, at, owner, tail, body, retention
        )
        if case != "stored":
            return case, record
    found = keys.get(result) if result else None
    is_success = isinstance(found, bytes) and (b"status" not in found or b"SUCCESS" in found)
    if result is None or is_success or not may_publish:
        return "ok", None
    keys.put(result, meta)
    keys.expires[result] = now_us // 1000 + expires * 1000 if expires else None
    return "written", None


def _settle(
    keys: Keys,
    now: int,
    names: Names,
    token: int,
    letter: str,
    at: int,
    owner: bytes,
    tail: bytes,
    body: bytes,
    retention: int,
) -> Reply:
    if names.record not in keys and not letter:
        return "ok", None
    record = keys.record(names.record)
    if record is None or (record.token != token and not is_off("token of settle")):
        return "lost", keys.get(names.record)
    if record.letter in SENDING and letter == "V":
        keys.put(names.record, record._replace(letter="V", at=now))
        return "ok", None
    is_reopened = record.letter == "D" and not letter
    if record.letter not in RUNNING and not is_reopened and not is_off("settled records stay"):
        keys.lengthen(names.record, now + retention)
        return "ok", None
    steps = b"" if record.letter == "D" else record.body
    attempt, fingerprint = record.attempt, record.fingerprint
    if not letter and not steps:
        del keys[names.record]
        return "ok", None
    if letter == "W" and names.turn in keys:
        keys.expires[names.turn] = now + retention
    if letter in ("", "W"):
        attempt, owner, tail, body = 0, owner if letter else b"0", record.tail, steps
        letter, fingerprint = "W", fingerprint if steps else b""
    ended = record._replace(
        letter=letter, attempt=attempt, at=now + at, fingerprint=fingerprint, owner=owner,
        tail=tail, body=body,
    )  # fmt: skip
    keys.put(names.record, ended, now + retention)
    return "stored", None


def abandon(
    keys: Keys,
    now_us: int,
    names: Names,
    task_id: bytes,
    worker: bytes,
    grace: int,
    reason: bytes = b"",
) -> Reply:
    """lua/abandon.lua."""
    record = keys.record(names.record)
    if (
        record is None
        or record.letter not in RUNNING + SENDING
        or record.task_id != task_id
        or (record.worker != worker and not is_off("worker of abandon"))
    ):
        return "lost", keys.get(names.record)
    sends = record.letter in SENDING
    token = record.token + (not sends and not is_off("token of abandon"))
    at = min(record.at, now_us // 1000 + grace)
    letter = "t" if sends else "a"
    keys.put(names.record, record._replace(letter=letter, token=token, at=at, owner=reason))
    return ("sending" if sends else "ok"), None


def _is_live(record: Record | None, now: int) -> bool:
    return record is not None and record.letter in HOLDING and record.at > now


def queue(
    keys: Keys,
    now_us: int,
    names: Names,
    task_id: bytes,
    deadline: int,
    hold: int,
    fingerprint: bytes = b"",
    tail: bytes = b"",
    arguments: bytes = b"",
    keep: int = 0,
    quiet: int = 0,
    max_wait: int = 0,
) -> Reply:
    """lua/queue.lua."""
    now = now_us // 1000
    slot = keys.record(names.slot)
    if not hold:
        if slot and slot.task_id == task_id:
            del keys[names.slot]
        return "reserved", None
    if now > deadline and not is_off("deadline"):
        return "late", None
    if isinstance(keys.get(names.record), bytes):
        return "finished", keys[names.record]
    record = keys.record(names.record)
    if record and record.letter in ENDED + "D" + SENDING:
        return "finished", record
    if _is_live(record, now):
        return "held", record
    pointer = keys.get(names.turn) if names.turn else None
    holder = keys.record(pointer.record) if isinstance(pointer, Turn) else None
    if _is_live(holder, now):
        return "held", holder
    if slot and slot.task_id != task_id:
        name = slot.body.decode()
        known = keys.get(name)
        waits = isinstance(known, Record) and known.letter == "W" and not _is_live(known, now)
        has_begun = known is not None and not waits
        if not has_begun or is_off("stale slot"):
            until = slot.token
            if arguments == b"=":
                answered = Record("D", 0, 0, now, b"", slot.task_id, b"", b"9" * 16, b"", task_id)
                keys.put(name, answered, now + keep)
                reserved = _slot(names, task_id, fingerprint, tail, min(now + quiet, until), until)
                keys.put(names.slot, reserved, now + hold)
                return "reserved", None
            if arguments and not is_off("newest arguments"):
                waiting = Record("W", 0, 0, 0, b"", slot.task_id, b"", b"0", b"", arguments)
                keys.put(name, waiting, now + keep)
            if quiet:
                slot = slot._replace(at=min(now + quiet, until))
                keys.put(names.slot, slot)
            return "held", slot
    reserved = _slot(names, task_id, fingerprint, tail, now + quiet, now + max_wait)
    keys.put(names.slot, reserved, now + hold)
    return "reserved", None


def _slot(
    names: Names, task_id: bytes, fingerprint: bytes, tail: bytes, at: int, until: int
) -> Record:
    body = names.record.encode()
    return Record("W", 0, until, at, fingerprint, task_id, b"", b"0", tail, body)


def forget(
    keys: Keys, now_us: int, names: Names, deadline: int, token: int | None = None,
    letters: str = "", force: bool = True,
) -> Reply:  # fmt: skip
    """lua/forget.lua.

    Args:
        token: of the record that was displayed; 0: none was; None: any.
        letters: of the state that was displayed.
    """
    now = now_us // 1000
    if now > deadline and not is_off("deadline"):
        return "late", None
    value, holder = keys.get(names.record), None
    if isinstance(value, Turn):
        holder, value = value.record, keys.get(value.record)
    if value is None:
        value = keys.record(names.slot)
    record = value if isinstance(value, Record) else None
    is_same = record is not None and token == record.token and record.letter in letters
    if value is not None and token is not None and not is_same:
        return "changed", record
    if record and not force and record.letter in RUNNING and record.at > now:
        return "running", record
    if record and holder and record.letter in HOLDING and not is_off("holder is forgotten"):
        keys.pop(holder, None)
    count = sum(keys.pop(name, None) is not None for name in names[:2] if name)
    return ("ok" if count else "absent"), record
