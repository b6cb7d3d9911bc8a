"""What each script promises: from what is there and the arguments to an answer and what is left.

One method for each file in lua/, with the arguments that its head lists. Pure, and small enough to
be read as the contract. The mutants of the model override a method or two.
"""

from __future__ import annotations

from typing import NamedTuple

RESERVED, STARTED, COMPLETED, FAILED = "R", "S", "C", "F"
#: Only errors of ended task ids are left.
RELEASED = "E"
NOBODY = b"-"
#: The same outcomes, once their continuation has gone out.
CONTINUED = {COMPLETED: "D", FAILED: "G", "D": "D", "G": "G"}
#: Bytes that older errors may take beside a new one.
OLDER_ERRORS = 16384


class Clock(NamedTuple):
    """The server's."""

    ms: int
    us: int


class Error(NamedTuple):
    """The last word for one task id, and not for the key."""

    task_id: bytes
    #: F, or G once its continuation has gone out.
    state: str
    #: Of the message that it ended: messages with a higher number are no copies of that one.
    generation: int
    at: int
    format: bytes
    body: bytes

    @property
    def size(self) -> int:
        """Bytes that it takes in the record."""
        return 23 + len(self.task_id) + len(self.format) + len(self.body)


class Record(NamedTuple):
    """What a key holds. Where there is none, it is absent."""

    state: str
    attempt: int
    token: int
    #: End of the lease or of the reservation; else the moment of the end.
    at: int
    fingerprint: bytes
    task_id: bytes
    worker: bytes
    #: RESERVED: the generation, in decimals, of the first message that it is for (empty: any), or
    #: NOBODY.
    execution_id: bytes
    #: How the outcome is written; before, for how many milliseconds the key stood still before a
    #: takeover.
    format: bytes
    #: The outcome; before there is one, the finished steps.
    body: bytes
    #: When Redis forgets the record. Always set.
    expires: int
    #: Of ended task ids, the latest first; none once there is an outcome.
    errors: tuple[Error, ...] = ()

    @property
    def finished(self) -> bool:
        return self.state not in (RESERVED, STARTED, RELEASED)

    @property
    def replacement(self) -> tuple[int, bytes] | None:
        """Of a task that has replaced itself: the generation from which on a message of its id goes
        on under the key, and the finished steps.
        """
        end = 9 + int.from_bytes(self.body[7:9], "big")
        if not self.format.startswith(b"=") or len(self.body) < max(9, end):
            return None
        return int.from_bytes(self.body[:7], "big"), self.body[end:]

    def error_of(self, task_id: bytes) -> Error | None:
        return next((one for one in self.errors if one.task_id == task_id), None)

    def without_error_of(self, task_id: bytes) -> tuple[Error, ...]:
        own = self.error_of(task_id)
        return tuple(one for one in self.errors if one is not own)


class Answer(NamedTuple):
    case: str
    #: The record that the answer tells.
    told: Record | None
    #: The record that is there from now on.
    after: Record | None


class Protocol:
    """The scripts."""

    def begin(
        self, there: Record | None, clock: Clock, *, execution_id: bytes, unanswered_ids: bytes,
        task_id: bytes,
        generation: int, fingerprint: bytes, worker: bytes, lease_ms: int, ttl_ms: int,
        max_attempts: int, error_ms: int,
    ) -> Answer:  # fmt: skip
        attempt, token, orphaned_seconds, steps, errors = 1, clock.us, b"", b"", ()
        if there is not None:
            awaits = self.awaits(there, task_id)
            error = None if awaits else self.answering(there, task_id, generation)
            if error is not None:
                told = there._replace(
                    state=error.state, at=error.at, fingerprint=b"", task_id=task_id, worker=b"",
                    execution_id=b"", format=error.format, body=error.body, errors=(),
                )  # fmt: skip
                return Answer("finished", told, there)
            if self.differ(there.fingerprint, fingerprint) and not self.is_absent(there, clock):
                return Answer("reused", there, there)
            goes_on = there.finished and self.goes_on(there, task_id, generation)
            if goes_on:
                there = there._replace(attempt=0, body=there.replacement[1])
            elif there.finished:
                return Answer("finished", there, there)
            if there.state == STARTED and self.is_own(there, execution_id):
                attempt, token, orphaned_seconds = there.attempt, there.token, there.format
            else:
                started = there.state == STARTED
                unanswered = (
                    started and there.execution_id != b"" and there.execution_id in unanswered_ids
                )
                mine = awaits and not self.is_earlier(there, generation)
                if self.lasts(there, clock) and not (unanswered or mine or goes_on):
                    return Answer("held", there, there)
                attempt = there.attempt if unanswered else there.attempt + 1
                if unanswered:
                    orphaned_seconds = there.format
                elif there.attempt:
                    orphaned_seconds = b"%d" % max(0, clock.ms - there.at)
                token = self.next_token(there, clock)
                if attempt > there.attempt and attempt > max_attempts:
                    poisoned = there._replace(
                        state=FAILED, token=token, at=clock.ms, task_id=task_id, execution_id=b"",
                        format=b"", body=b"poisoned", expires=clock.ms + error_ms, errors=(),
                    )  # fmt: skip
                    return Answer("finished", poisoned, poisoned)
            fingerprint = fingerprint or there.fingerprint
            steps, errors = there.body, there.without_error_of(task_id)
        expires = self.started_until(clock, lease_ms, ttl_ms)
        started = Record(
            STARTED, attempt, token, clock.ms + lease_ms, fingerprint, task_id, worker,
            execution_id, orphaned_seconds,
            steps, expires, errors,
        )  # fmt: skip
        return Answer("begun", started, started)

    def complete(
        self, there: Record | None, clock: Clock, *, token: int, format: bytes, body: bytes,  # noqa: A002
        retention_ms: int,
    ) -> Answer:  # fmt: skip
        return self.settle(there, clock, COMPLETED, token, format, body, retention_ms)

    def fail(
        self, there: Record | None, clock: Clock, *, token: int, format: bytes, body: bytes,  # noqa: A002
        retention_ms: int,
    ) -> Answer:  # fmt: skip
        return self.settle(there, clock, FAILED, token, format, body, retention_ms)

    def release(
        self, there: Record | None, clock: Clock, *, token: int, hold_ms: int, retention_ms: int,
        generation: int, format: bytes, error: bytes, error_ms: int,  # noqa: A002
    ) -> Answer:  # fmt: skip
        if there is None:
            return Answer("ok", None, None)
        if not self.holds(there, token):
            resent = there.state in (RESERVED, RELEASED) and there.token == token
            return Answer("ok" if resent else "lost", there, there)
        if error:
            last_word = Error(there.task_id, FAILED, generation, clock.ms, format, error)
            there = self.with_error(there, last_word)
        if hold_ms == 0 and not there.body and not there.errors:
            return Answer("ok", None, None)
        left = there._replace(
            state=RESERVED, attempt=0, at=clock.ms + hold_ms, worker=b"", format=b"",
            execution_id=b"%d" % generation if hold_ms else NOBODY,
        )  # fmt: skip
        ttl_ms = hold_ms + (retention_ms if there.body or there.errors else 0)
        if not hold_ms:
            left = self.given_up(left)
        if error:
            ttl_ms = error_ms if left.state == RELEASED else max(error_ms, ttl_ms)
        return Answer("ok", None, left._replace(expires=clock.ms + ttl_ms))

    def extend(
        self, there: Record | None, clock: Clock, *, token: int, lease_ms: int, ttl_ms: int
    ) -> Answer:
        if not self.holds(there, token):
            return Answer("lost", there, there)
        return Answer("ok", None, self.alive(there, clock, lease_ms, ttl_ms))

    def save_step(
        self, there: Record | None, clock: Clock, *, token: int, entry: bytes, lease_ms: int,
        ttl_ms: int,
    ) -> Answer:  # fmt: skip
        if not self.holds(there, token):
            return Answer("lost", there, there)
        kept = there.body if there.body.endswith(entry) else there.body + entry
        there = there._replace(body=kept)
        return Answer("ok", None, self.alive(there, clock, lease_ms, ttl_ms))

    def abandon(
        self, there: Record | None, clock: Clock, *, task_id: bytes, worker: bytes, grace_ms: int,
        generation: int, format: bytes, error: bytes, error_ms: int,  # noqa: A002
    ) -> Answer:  # fmt: skip
        if there is None or not self.is_child(there, task_id, worker):
            return Answer("lost", there, there)
        if there.state != STARTED:
            return Answer("ok", None, there)
        ends = min(there.at, clock.ms + grace_ms)
        abandoned = there._replace(token=there.token + 1, at=ends, execution_id=b"", format=b"")
        if error:
            last_word = Error(task_id, FAILED, generation, clock.ms, format, error)
            abandoned = self.given_up(self.with_error(abandoned, last_word))
        if abandoned.state == RELEASED:
            abandoned = abandoned._replace(expires=clock.ms + error_ms)
        return Answer("ok", None, abandoned)

    def reserve(
        self, there: Record | None, clock: Clock, *, task_id: bytes, fingerprint: bytes,
        hold_ms: int,
    ) -> Answer:  # fmt: skip
        attempt, token, steps, errors, expires = 0, clock.us, b"", (), clock.ms + hold_ms
        if there is not None:
            if self.differ(there.fingerprint, fingerprint) and not self.is_absent(there, clock):
                return Answer("reused", there, there)
            if there.finished:
                return Answer("finished", there, there)
            if self.lasts(there, clock) and not self.awaits(there, task_id):
                return Answer("held", there, there)
            if there.state == STARTED:
                return Answer("expired", there, there)
            attempt, token = there.attempt, self.next_token(there, clock)
            fingerprint = fingerprint or there.fingerprint
            steps, errors = there.body, there.errors
            if steps or errors:
                expires = max(expires, there.expires)
        if expires == clock.ms:
            return Answer("reserved", None, None)
        reserved = Record(
            RESERVED, attempt, token, clock.ms + hold_ms, fingerprint, task_id, b"", b"", b"",
            steps, expires, errors,
        )  # fmt: skip
        if not hold_ms:
            reserved = self.given_up(reserved)
        return Answer("reserved", reserved, reserved)

    def mark_continued(self, there: Record | None, clock: Clock, *, task_id: bytes) -> Answer:
        if there is not None and not there.finished:
            error = there.error_of(task_id)
            if error is not None:
                out = tuple(
                    one._replace(state=CONTINUED[FAILED]) if one is error else one
                    for one in there.errors
                )
                return Answer("ok", None, there._replace(errors=out))
        if there is None or not there.finished or there.task_id != task_id:
            return Answer("lost", there, there)
        return Answer("ok", None, there._replace(state=CONTINUED[there.state]))

    def forget(self, there: Record | None, clock: Clock, *, state: str, token: int | str) -> Answer:
        if there is None:
            return Answer("absent", None, None)
        if there.state == RELEASED:
            return Answer("absent", None, there if state else None)
        if state and not self.was_shown(there, state, token):
            return Answer("changed", there, there)
        return Answer("ok", None, None)

    def get(self, there: Record | None, clock: Clock) -> Answer:
        if there is None or there.state == RELEASED:
            return Answer("absent", there, there)
        return Answer("found", there, there)

    # What several of them ask

    def goes_on(self, there: Record, task_id: bytes, generation: int) -> bool:
        """What a task has become by replacing itself, under the key that it had."""
        replacement = there.replacement
        return bool(replacement and there.task_id == task_id and replacement[0] <= generation)

    def holds(self, there: Record | None, token: int) -> bool:
        return there is not None and there.state == STARTED and there.token == token

    def is_own(self, there: Record, execution_id: bytes) -> bool:
        """A begin whose answer was lost, sent again."""
        return there.execution_id == execution_id

    def is_child(self, there: Record, task_id: bytes, worker: bytes) -> bool:
        return not there.finished and (there.task_id, there.worker) == (task_id, worker)

    def awaits(self, there: Record, task_id: bytes) -> bool:
        """Reserved for a message of that task id."""
        return there.state == RESERVED and there.task_id == task_id and there.execution_id != NOBODY

    def is_earlier(self, there: Record, generation: int) -> bool:
        """A copy of a message before the one that the reservation is for."""
        return generation < int(there.execution_id or 0)

    def answering(self, there: Record, task_id: bytes, generation: int) -> Error | None:
        """The error that ended the message, if it is a copy."""
        error = there.error_of(task_id)
        return error if error is not None and generation <= error.generation else None

    def is_absent(self, there: Record, clock: Clock) -> bool:
        """Nobody has it, and only errors are left."""
        return there.state == RESERVED and not there.body and not self.lasts(there, clock)

    def with_error(self, there: Record, error: Error) -> Record:
        """The older ones stay as long as there is room."""
        room, older = OLDER_ERRORS, list[Error]()
        for one in there.errors:
            room -= one.size
            if room >= 0:
                older.append(one)
        return there._replace(errors=(error, *older))

    def given_up(self, there: Record) -> Record:
        """Reserved for nobody; without steps there are no arguments to compare, either."""
        if there.body:
            return there._replace(state=RESERVED, execution_id=NOBODY)
        return there._replace(state=RELEASED, fingerprint=b"", execution_id=NOBODY)

    def was_shown(self, there: Record, state: str, token: int | str) -> bool:
        return {"D": "C", "G": "F"}.get(there.state, there.state) == state and there.token == token

    def lasts(self, there: Record, clock: Clock) -> bool:
        """The lease or the reservation."""
        return there.at > clock.ms

    def next_token(self, there: Record, clock: Clock) -> int:
        return max(clock.us, there.token + 1)

    def started_until(self, clock: Clock, lease_ms: int, ttl_ms: int) -> int:
        """Longer than the lease: a takeover must see that there was an execution before it."""
        return clock.ms + ttl_ms

    def alive(self, there: Record, clock: Clock, lease_ms: int, ttl_ms: int) -> Record:
        expires = self.started_until(clock, lease_ms, ttl_ms)
        return there._replace(at=clock.ms + lease_ms, expires=expires)

    def settle(
        self, there: Record | None, clock: Clock, state: str, token: int, form: bytes, body: bytes,
        retention_ms: int,
    ) -> Answer:  # fmt: skip
        if not self.holds(there, token):
            if there is None or (there.state, there.token) != (state, token):
                return Answer("lost", there, there)
            return Answer("ok", there, there._replace(expires=clock.ms + retention_ms))
        outcome = there._replace(
            state=state, at=clock.ms, execution_id=b"", format=form, body=body,
            expires=clock.ms + retention_ms, errors=(),
        )  # fmt: skip
        return Answer("ok", None, outcome)

    @staticmethod
    def differ(one: bytes, other: bytes) -> bool:
        return bool(one and other and one != other)
