"""The contract of the scripts: what each one replies and stores.

`Protocol` has one pure method for each script in lua/, with the arguments that its head lists. The
mutants of the model override a method or two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

RESERVED, STARTED, COMPLETED, FAILED = "R", "S", "C", "F"
#: Holds only errors of ended task ids.
RELEASED = "E"
NOBODY = b"-"
#: The letters of outcomes once their continuation has been sent.
CONTINUED = {COMPLETED: "D", FAILED: "G", "D": "D", "G": "G"}
#: Bytes that older errors may take when another one is added.
OLDER_ERRORS = 16384


class Clock(NamedTuple):
    """The server's time."""

    ms: int
    us: int


class Error(NamedTuple):
    """An error that ended one task id, but not the key."""

    task_id: bytes
    #: F, or G once its continuation has been sent.
    state: str
    #: Of the message that it ended; messages of a higher generation are not copies of that one.
    generation: int
    at: int
    format: bytes
    body: bytes

    @property
    def size(self) -> int:
        """Bytes that it takes in the record."""
        return 23 + len(self.task_id) + len(self.format) + len(self.body)


class Record(NamedTuple):
    """What Redis holds for a key; None if the key is absent."""

    state: str
    attempt: int
    token: int
    #: End of the lease or of the reservation; else when the outcome was stored.
    at: int
    fingerprint: bytes
    task_id: bytes
    worker: bytes
    #: STARTED: the execution id. RESERVED: the generation, in decimals, of the first message that
    #: it is reserved for (empty: any), or NOBODY.
    owner: bytes
    #: Encoding of the outcome; STARTED by a takeover: milliseconds that the key was orphaned.
    format: bytes
    #: The outcome; before there is one, the finished steps.
    body: bytes
    #: When Redis forgets the record. Always set.
    expires: int
    #: Of ended task ids, newest first; none once there is an outcome.
    errors: tuple[Error, ...] = ()

    @property
    def finished(self) -> bool:
        return self.state not in (RESERVED, STARTED, RELEASED)

    @property
    def replacement(self) -> tuple[int, bytes] | None:
        """Of a task that replaced itself: first generation of the replacement, finished steps."""
        end = 9 + int.from_bytes(self.body[7:9], "big")
        if not self.format.startswith(b"=") or len(self.body) < max(9, end):
            return None
        return int.from_bytes(self.body[:7], "big"), self.body[end:]

    def error_of(self, task_id: bytes) -> Error | None:
        return next((error for error in self.errors if error.task_id == task_id), None)

    def without_error_of(self, task_id: bytes) -> tuple[Error, ...]:
        own = self.error_of(task_id)
        return tuple(error for error in self.errors if error is not own)


class Result(NamedTuple):
    """What a script replies and stores."""

    case: str
    #: The record in the reply.
    replied: Record | None
    #: The record that Redis holds afterwards.
    after: Record | None
    #: The task's result that the result backend holds afterwards; of fused_complete alone.
    backend: bytes | None = None


class Protocol:
    """The scripts."""

    def begin(
        self, record: Record | None, clock: Clock, *, execution_id: bytes, unanswered_ids: bytes,
        task_id: bytes, generation: int, fingerprint: bytes, worker: bytes, lease_ms: int,
        ttl_ms: int, max_attempts: int, error_ms: int,
    ) -> Result:  # fmt: skip
        attempt, token, orphaned_ms, steps, errors = 1, clock.us, b"", b"", ()
        if record is not None:
            is_awaited = self.is_awaited(record, task_id)
            error = None if is_awaited else self.error_for(record, task_id, generation)
            if error is not None:
                replied = record._replace(
                    state=error.state, at=error.at, fingerprint=b"", task_id=task_id, worker=b"",
                    owner=b"", format=error.format, body=error.body, errors=(),
                )  # fmt: skip
                return Result("finished", replied, record)
            if self.differ(record.fingerprint, fingerprint) and not self.is_absent(record, clock):
                return Result("reused", record, record)
            is_replacement = record.finished and self.is_replacement(record, task_id, generation)
            if is_replacement:
                record = record._replace(attempt=0, body=record.replacement[1])
            elif record.finished:
                return Result("finished", record, record)
            if record.state == STARTED and self.is_own(record, execution_id):
                attempt, token, orphaned_ms = record.attempt, record.token, record.format
            else:
                unanswered = (
                    record.state == STARTED
                    and record.owner != b""
                    and record.owner in unanswered_ids
                )
                is_retry = is_awaited and not self.is_earlier(record, generation)
                if self.is_active(record, clock) and not (unanswered or is_retry or is_replacement):
                    return Result("held", record, record)
                attempt = record.attempt if unanswered else record.attempt + 1
                if unanswered:
                    orphaned_ms = record.format
                elif record.attempt:
                    orphaned_ms = b"%d" % max(0, clock.ms - record.at)
                token = self.next_token(record, clock)
                if attempt > record.attempt and attempt > max_attempts:
                    poisoned = record._replace(
                        state=FAILED, token=token, at=clock.ms, task_id=task_id, owner=b"",
                        format=b"", body=b"poisoned", expires=clock.ms + error_ms, errors=(),
                    )  # fmt: skip
                    return Result("finished", poisoned, poisoned)
            fingerprint = fingerprint or record.fingerprint
            steps, errors = record.body, record.without_error_of(task_id)
        expires = self.started_expiry(clock, lease_ms, ttl_ms)
        started = Record(
            STARTED, attempt, token, clock.ms + lease_ms, fingerprint, task_id, worker,
            execution_id, orphaned_ms, steps, expires, errors,
        )  # fmt: skip
        return Result("begun", started, started)

    def complete(
        self, record: Record | None, clock: Clock, *, token: int, format: bytes, body: bytes,  # noqa: A002
        retention_ms: int,
    ) -> Result:  # fmt: skip
        return self.settle(record, clock, COMPLETED, token, format, body, retention_ms)

    def fused_complete(
        self, record: Record | None, clock: Clock, *, meta: bytes, expires: int,
        backend: bytes | None = None, **outcome: Any,
    ) -> Result:  # fmt: skip
        """As complete, but for a replay. `backend` is what the result backend holds before."""
        is_replay = outcome["token"] == 0
        is_first = is_replay or self.is_held_by(record, outcome["token"])
        if is_replay:
            result = Result("ok", None, record)
        else:
            result = self.complete(record, clock, **outcome)
        if result.case == "lost":
            return result._replace(backend=backend)
        if is_first and (backend is None or self.is_no_success(backend)):
            return result._replace(case="written", backend=meta)
        return result._replace(case="written" if backend == meta else "ok", backend=backend)

    def fail(
        self, record: Record | None, clock: Clock, *, token: int, format: bytes, body: bytes,  # noqa: A002
        retention_ms: int,
    ) -> Result:  # fmt: skip
        return self.settle(record, clock, FAILED, token, format, body, retention_ms)

    def release(
        self, record: Record | None, clock: Clock, *, token: int, hold_ms: int, retention_ms: int,
        generation: int, format: bytes, error: bytes, error_ms: int,  # noqa: A002
    ) -> Result:  # fmt: skip
        if record is None:
            return Result("ok", None, None)
        state, replacement = FAILED, record.finished and record.replacement
        if error and replacement and record.token == token:
            # Its replacement has failed, and has sent the continuation.
            state, record = CONTINUED[FAILED], record._replace(body=replacement[1])
        elif not self.is_held_by(record, token):
            resent = record.state in (RESERVED, RELEASED) and record.token == token
            return Result("ok" if resent else "lost", record, record)
        if error:
            final = Error(record.task_id, state, generation, clock.ms, format, error)
            record = self.prepend_error(record, final)
        if hold_ms == 0 and not record.body and not record.errors:
            return Result("ok", None, None)
        released = record._replace(
            state=RESERVED, attempt=0, at=clock.ms + hold_ms, worker=b"", format=b"",
            owner=b"%d" % generation if hold_ms else NOBODY,
        )  # fmt: skip
        ttl_ms = hold_ms + (retention_ms if record.body or record.errors else 0)
        if not hold_ms:
            released = self.reserved_for_nobody(released)
        if error:
            ttl_ms = error_ms if released.state == RELEASED else max(error_ms, ttl_ms)
        return Result("ok", None, released._replace(expires=clock.ms + ttl_ms))

    def extend(
        self, record: Record | None, clock: Clock, *, token: int, lease_ms: int, ttl_ms: int
    ) -> Result:
        if not self.is_held_by(record, token):
            return Result("lost", record, record)
        return Result("ok", None, self.extended(record, clock, lease_ms, ttl_ms))

    def save_step(
        self, record: Record | None, clock: Clock, *, token: int, entry: bytes, lease_ms: int,
        ttl_ms: int,
    ) -> Result:  # fmt: skip
        if not self.is_held_by(record, token):
            return Result("lost", record, record)
        steps = record.body if record.body.endswith(entry) else record.body + entry
        record = record._replace(body=steps)
        return Result("ok", None, self.extended(record, clock, lease_ms, ttl_ms))

    def abandon(
        self, record: Record | None, clock: Clock, *, task_id: bytes, worker: bytes, grace_ms: int,
        generation: int, format: bytes, error: bytes, error_ms: int,  # noqa: A002
    ) -> Result:  # fmt: skip
        if record is None or not self.is_child(record, task_id, worker):
            return Result("lost", record, record)
        if record.state != STARTED:
            return Result("ok", None, record)
        at = min(record.at, clock.ms + grace_ms)
        ended_by = b"" if error else format
        abandoned = record._replace(token=record.token + 1, at=at, owner=b"", format=ended_by)
        if error:
            final = Error(task_id, FAILED, generation, clock.ms, format, error)
            abandoned = self.reserved_for_nobody(self.prepend_error(abandoned, final))
        if abandoned.state == RELEASED:
            abandoned = abandoned._replace(expires=clock.ms + error_ms)
        return Result("ok", None, abandoned)

    def reserve(
        self, record: Record | None, clock: Clock, *, task_id: bytes, fingerprint: bytes,
        hold_ms: int,
    ) -> Result:  # fmt: skip
        attempt, token, steps, errors, expires = 0, clock.us, b"", (), clock.ms + hold_ms
        if record is not None:
            if self.differ(record.fingerprint, fingerprint) and not self.is_absent(record, clock):
                return Result("reused", record, record)
            if record.finished:
                return Result("finished", record, record)
            if self.is_active(record, clock) and not self.is_awaited(record, task_id):
                return Result("held", record, record)
            if record.state == STARTED:
                return Result("expired", record, record)
            attempt, token = record.attempt, self.next_token(record, clock)
            fingerprint = fingerprint or record.fingerprint
            steps, errors = record.body, record.errors
            if steps or errors:
                expires = max(expires, record.expires)
        if expires == clock.ms:
            return Result("reserved", None, None)
        reserved = Record(
            RESERVED, attempt, token, clock.ms + hold_ms, fingerprint, task_id, b"", b"", b"",
            steps, expires, errors,
        )  # fmt: skip
        if not hold_ms:
            reserved = self.reserved_for_nobody(reserved)
        return Result("reserved", reserved, reserved)

    def mark_continued(self, record: Record | None, clock: Clock, *, task_id: bytes) -> Result:
        if record is not None and not record.finished:
            error = record.error_of(task_id)
            if error is not None:
                errors = tuple(
                    each._replace(state=CONTINUED[FAILED]) if each is error else each
                    for each in record.errors
                )
                return Result("ok", None, record._replace(errors=errors))
        if record is None or not record.finished or record.task_id != task_id:
            return Result("lost", record, record)
        return Result("ok", None, record._replace(state=CONTINUED[record.state]))

    def forget(
        self, record: Record | None, clock: Clock, *, state: str, token: int | str
    ) -> Result:
        if record is None:
            return Result("absent", None, None)
        if record.state == RELEASED:
            return Result("absent", None, record if state else None)
        if state and not self.was_displayed(record, state, token):
            return Result("changed", record, record)
        return Result("ok", None, None)

    def get(self, record: Record | None, clock: Clock) -> Result:
        if record is None or record.state == RELEASED:
            return Result("absent", record, record)
        return Result("found", record, record)

    def is_no_success(self, backend: bytes) -> bool:
        """Whether what a result backend holds is certainly of another state than SUCCESS."""
        return b"status" in backend and b"SUCCESS" not in backend

    # Conditions and changes that several scripts share

    def is_replacement(self, record: Record, task_id: bytes, generation: int) -> bool:
        """Whether the task replaced itself and this message continues it under the key."""
        replacement = record.replacement
        return bool(replacement and record.task_id == task_id and replacement[0] <= generation)

    def is_held_by(self, record: Record | None, token: int) -> bool:
        return record is not None and record.state == STARTED and record.token == token

    def is_own(self, record: Record, execution_id: bytes) -> bool:
        """Whether this is the resend of a begin whose reply was lost."""
        return record.owner == execution_id

    def is_child(self, record: Record, task_id: bytes, worker: bytes) -> bool:
        return not record.finished and (record.task_id, record.worker) == (task_id, worker)

    def is_awaited(self, record: Record, task_id: bytes) -> bool:
        """Whether the key is reserved for a message of that task id."""
        return record.state == RESERVED and record.task_id == task_id and record.owner != NOBODY

    def is_earlier(self, record: Record, generation: int) -> bool:
        """Whether the message is older than the one that the key is reserved for."""
        return generation < int(record.owner or 0)

    def error_for(self, record: Record, task_id: bytes, generation: int) -> Error | None:
        """Returns the error that ended the message of which this one is a copy."""
        error = record.error_of(task_id)
        return error if error is not None and generation <= error.generation else None

    def is_absent(self, record: Record, clock: Clock) -> bool:
        """Whether the reservation has ended and only errors remain."""
        return record.state == RESERVED and not record.body and not self.is_active(record, clock)

    def prepend_error(self, record: Record, error: Error) -> Record:
        """Adds an error; older ones stay as far as they fit."""
        room, older = OLDER_ERRORS, list[Error]()
        for each in record.errors:
            room -= each.size
            if room >= 0:
                older.append(each)
        return record._replace(errors=(error, *older))

    def reserved_for_nobody(self, record: Record) -> Record:
        """Without steps the fingerprint goes, too: there are no arguments left to compare."""
        if record.body:
            return record._replace(state=RESERVED, owner=NOBODY)
        return record._replace(state=RELEASED, fingerprint=b"", owner=NOBODY)

    def was_displayed(self, record: Record, state: str, token: int | str) -> bool:
        displayed = {"D": "C", "G": "F"}.get(record.state, record.state)
        return displayed == state and record.token == token

    def is_active(self, record: Record, clock: Clock) -> bool:
        """Whether the lease or the reservation has not expired."""
        return record.at > clock.ms

    def next_token(self, record: Record, clock: Clock) -> int:
        return max(clock.us, record.token + 1)

    def started_expiry(self, clock: Clock, lease_ms: int, ttl_ms: int) -> int:
        """Later than the end of the lease: a takeover must see the execution before it."""
        return clock.ms + ttl_ms

    def extended(self, record: Record, clock: Clock, lease_ms: int, ttl_ms: int) -> Record:
        expires = self.started_expiry(clock, lease_ms, ttl_ms)
        return record._replace(at=clock.ms + lease_ms, expires=expires)

    def settle(
        self, record: Record | None, clock: Clock, state: str, token: int, form: bytes,
        body: bytes, retention_ms: int,
    ) -> Result:  # fmt: skip
        if not self.is_held_by(record, token):
            if record is None or (record.state, record.token) != (state, token):
                return Result("lost", record, record)
            return Result("ok", record, record._replace(expires=clock.ms + retention_ms))
        outcome = record._replace(
            state=state, at=clock.ms, owner=b"", format=form, body=body,
            expires=clock.ms + retention_ms, errors=(),
        )  # fmt: skip
        return Result("ok", None, outcome)

    @staticmethod
    def differ(fingerprint: bytes, other: bytes) -> bool:
        return bool(fingerprint and other and fingerprint != other)
