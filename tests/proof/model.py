"""What each script promises: from what is there and the arguments to an answer and what is left.

One method for each file in lua/, with the arguments that its head lists. Pure, and small enough to
be read as the contract. The mutants of the model override a method or two.
"""

from __future__ import annotations

from typing import NamedTuple

RESERVED, STARTED, COMPLETED, FAILED = "R", "S", "C", "F"
#: The same outcomes, once their continuation has gone out.
CONTINUED = {COMPLETED: "D", FAILED: "G", "D": "D", "G": "G"}


class Clock(NamedTuple):
    """The server's."""

    ms: int
    us: int


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
    owner: bytes
    #: How the outcome is written; before, for how many milliseconds the key stood still before a
    #: takeover.
    format: bytes
    #: The outcome; before there is one, the finished steps.
    body: bytes
    #: When Redis forgets the record. Always set.
    expires: int

    @property
    def finished(self) -> bool:
        return self.state not in (RESERVED, STARTED)


class Answer(NamedTuple):
    case: str
    #: The record that the answer tells.
    told: Record | None
    #: The record that is there from now on.
    after: Record | None


class Protocol:
    """The scripts."""

    def begin(
        self, there: Record | None, clock: Clock, *, owner: bytes, prior: bytes, task_id: bytes,
        fingerprint: bytes, worker: bytes, lease_ms: int, keep_ms: int, max_attempts: int,
        error_ms: int,
    ) -> Answer:  # fmt: skip
        attempt, token, idle, steps = 1, clock.us, b"", b""
        if there is not None:
            if self.differ(there.fingerprint, fingerprint):
                return Answer("reused", there, there)
            if there.finished:
                return Answer("finished", there, there)
            if there.state == RESERVED:
                if there.task_id != task_id and self.lasts(there, clock):
                    return Answer("held", there, there)
                token = self.next_token(there, clock)
            elif self.is_own(there, owner):
                attempt, token, idle = there.attempt, there.token, there.format
            else:
                unanswered = there.owner != b"" and there.owner in prior
                if self.lasts(there, clock) and not unanswered:
                    return Answer("held", there, there)
                attempt = there.attempt if unanswered else there.attempt + 1
                idle = there.format if unanswered else b"%d" % (clock.ms - there.at)
                token = self.next_token(there, clock)
                if attempt > there.attempt and attempt > max_attempts:
                    poisoned = there._replace(
                        state=FAILED, token=token, at=clock.ms, task_id=task_id, owner=b"",
                        format=b"", body=b"poisoned", expires=clock.ms + error_ms,
                    )  # fmt: skip
                    return Answer("finished", poisoned, poisoned)
            fingerprint = fingerprint or there.fingerprint
            steps = there.body
        expires = self.started_until(clock, lease_ms, keep_ms)
        started = Record(
            STARTED, attempt, token, clock.ms + lease_ms, fingerprint, task_id, worker, owner, idle,
            steps, expires,
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
        self, there: Record | None, clock: Clock, *, token: int, hold_ms: int, retention_ms: int
    ) -> Answer:
        if there is None:
            return Answer("ok", None, None)
        if not self.holds(there, token):
            resent = there.state == RESERVED and there.token == token
            return Answer("ok" if resent else "lost", there, there)
        if hold_ms == 0 and not there.body:
            return Answer("ok", None, None)
        reserved = there._replace(
            state=RESERVED, attempt=0, at=clock.ms + hold_ms, worker=b"", owner=b"", format=b"",
            expires=clock.ms + hold_ms + (retention_ms if there.body else 0),
        )  # fmt: skip
        return Answer("ok", None, reserved)

    def extend(
        self, there: Record | None, clock: Clock, *, token: int, lease_ms: int, keep_ms: int
    ) -> Answer:
        if not self.holds(there, token):
            return Answer("lost", there, there)
        return Answer("ok", None, self.alive(there, clock, lease_ms, keep_ms))

    def step(
        self, there: Record | None, clock: Clock, *, token: int, entry: bytes, lease_ms: int,
        keep_ms: int,
    ) -> Answer:  # fmt: skip
        if not self.holds(there, token):
            return Answer("lost", there, there)
        kept = there.body if there.body.endswith(entry) else there.body + entry
        there = there._replace(body=kept)
        return Answer("ok", None, self.alive(there, clock, lease_ms, keep_ms))

    def abandon(
        self, there: Record | None, clock: Clock, *, task_id: bytes, worker: bytes, grace_ms: int
    ) -> Answer:
        if there is None or not self.is_child(there, task_id, worker):
            return Answer("lost", there, there)
        ends = min(there.at, clock.ms + grace_ms)
        abandoned = there._replace(token=there.token + 1, at=ends, owner=b"", format=b"")
        return Answer("ok", None, abandoned)

    def reserve(
        self, there: Record | None, clock: Clock, *, task_id: bytes, fingerprint: bytes,
        hold_ms: int,
    ) -> Answer:  # fmt: skip
        token, steps, expires = clock.us, b"", clock.ms + hold_ms
        if there is not None:
            if self.differ(there.fingerprint, fingerprint):
                return Answer("reused", there, there)
            if there.finished:
                return Answer("finished", there, there)
            if self.lasts(there, clock) and (there.state == STARTED or there.task_id != task_id):
                return Answer("held", there, there)
            if there.state == STARTED:
                return Answer("expired", there, there)
            token = self.next_token(there, clock)
            fingerprint = fingerprint or there.fingerprint
            steps = there.body
            if steps:
                expires = max(expires, there.expires)
        if expires == clock.ms:
            return Answer("reserved", None, None)
        reserved = Record(
            RESERVED, 0, token, clock.ms + hold_ms, fingerprint, task_id, b"", b"", b"", steps,
            expires,
        )  # fmt: skip
        return Answer("reserved", reserved, reserved)

    def dispatched(self, there: Record | None, clock: Clock, *, task_id: bytes) -> Answer:
        if there is None or not there.finished or there.task_id != task_id:
            return Answer("lost", there, there)
        return Answer("ok", None, there._replace(state=CONTINUED[there.state]))

    def forget(self, there: Record | None, clock: Clock, *, token: int | str) -> Answer:
        if there is None:
            return Answer("absent", None, None)
        if token not in ("", there.token):
            return Answer("changed", there, there)
        return Answer("ok", None, None)

    def look_up(self, there: Record | None, clock: Clock) -> Answer:
        return Answer("absent" if there is None else "there", there, there)

    # What several of them ask

    def holds(self, there: Record | None, token: int) -> bool:
        return there is not None and there.state == STARTED and there.token == token

    def is_own(self, there: Record, owner: bytes) -> bool:
        """A begin whose answer was lost, sent again."""
        return there.owner == owner

    def is_child(self, there: Record, task_id: bytes, worker: bytes) -> bool:
        return (there.state, there.task_id, there.worker) == (STARTED, task_id, worker)

    def lasts(self, there: Record, clock: Clock) -> bool:
        """The lease or the reservation."""
        return there.at > clock.ms

    def next_token(self, there: Record, clock: Clock) -> int:
        return max(clock.us, there.token + 1)

    def started_until(self, clock: Clock, lease_ms: int, keep_ms: int) -> int:
        """Longer than the lease: a takeover must see that there was an execution before it."""
        return clock.ms + keep_ms

    def alive(self, there: Record, clock: Clock, lease_ms: int, keep_ms: int) -> Record:
        expires = self.started_until(clock, lease_ms, keep_ms)
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
            state=state, at=clock.ms, owner=b"", format=form, body=body,
            expires=clock.ms + retention_ms,
        )  # fmt: skip
        return Answer("ok", None, outcome)

    @staticmethod
    def differ(one: bytes, other: bytes) -> bool:
        return bool(one and other and one != other)
