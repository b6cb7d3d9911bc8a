"""The contract of the scripts: what each one replies and stores.

`Protocol` has one pure method for each script in lua/, with the arguments that its head lists. The
mutants of the model override a method or two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

RESERVED, STARTED, COMPLETED, FAILED = "R", "S", "C", "F"
NOBODY = b"-"
#: The letters of outcomes whose continuation is being sent.
SENDING = {COMPLETED: "P", FAILED: "Q"}
#: All letters of outcomes, each with the letter of the same outcome without a continuation.
SETTLED = {"P": COMPLETED, "Q": FAILED, COMPLETED: COMPLETED, FAILED: FAILED}


class Clock(NamedTuple):
    """The server's time."""

    ms: int
    us: int


class Waiting(NamedTuple):
    """The message that waits for the next turn."""

    task_id: bytes
    #: End of its reservation.
    at: int
    fingerprint: bytes


class Record(NamedTuple):
    """What Redis holds for a key, or as the entry of one message; None if it is absent."""

    state: str
    attempt: int
    #: In an entry: the generation of the message that ended.
    token: int
    #: End of the lease or of the reservation; else when the outcome was stored.
    at: int
    fingerprint: bytes
    task_id: bytes
    worker: bytes
    #: STARTED: the execution id. RESERVED: the generation, in decimals, of the first message that
    #: it is reserved for (empty: any), or NOBODY. An outcome that something follows: the execution
    #: id that sends that, or has sent it.
    owner: bytes
    #: Encoding of the outcome; STARTED by a takeover: milliseconds that the key was orphaned.
    format: bytes
    #: The outcome; before there is one, the finished steps.
    body: bytes
    #: When Redis forgets the record. Always set.
    expires: int
    #: Of the message whose execution this is, or which it is reserved for; may be empty.
    root: bytes = b""
    #: While its continuation is being sent: end of that lease.
    until: int = 0
    #: In the record of a turn.
    waiting: tuple[Waiting, ...] = ()
    #: STARTED, or RESERVED for a retry: until when calls that met an execution come back.
    met: int | None = None

    @property
    def finished(self) -> bool:
        return self.state in SETTLED

    @property
    def sending(self) -> bool:
        return self.state in SENDING.values()

    @property
    def readable(self) -> bool:
        """Whether this version can read it; newer ones use other letters."""
        return self.state in "RSCFPQ"

    @property
    def is_remnant(self) -> bool:
        """Whether only the attempts are left of an execution whose message has ended."""
        return self.state == RESERVED and self.owner == NOBODY and not self.body

    @property
    def replacement(self) -> tuple[int, bytes] | None:
        """Of a task that replaced itself: first generation of the replacement, finished steps."""
        end = 9 + int.from_bytes(self.body[7:9], "big")
        if not self.format.startswith(b"=") or len(self.body) < max(9, end):
            return None
        return int.from_bytes(self.body[:7], "big"), self.body[end:]


class _Unchanged:
    """The entry that a script leaves as it is."""


UNCHANGED = _Unchanged()


class Result(NamedTuple):
    """What a script replies and stores."""

    case: str
    #: The record in the reply.
    replied: Record | None
    #: The record that Redis holds afterwards.
    after: Record | None
    #: The task's result that the result backend holds afterwards; of fused_complete alone.
    backend: bytes | None = None
    #: The message's entry that Redis holds afterwards.
    entry: Record | _Unchanged = UNCHANGED


#: The scripts that get the entry of a message, too.
WITH_ENTRY = frozenset({"begin", "release", "abandon", "continuation"})


class Protocol:
    """The scripts."""

    def begin(
        self, record: Record | None, clock: Clock, *, entry: Record | None, execution_id: bytes,
        unanswered_ids: bytes, task_id: bytes, root: bytes, generation: int, fingerprint: bytes,
        worker: bytes, lease_ms: int, ttl_ms: int, max_attempts: int, error_ms: int,
        continues: int, next_turn_ms: int = 0, min_retention_ms: int = 0, keeps_root: bool = False,
    ) -> Result:  # fmt: skip
        ids = execution_id, unanswered_ids
        claim = {
            "root": root,
            "owner": execution_id,
            "worker": worker,
            "until": clock.ms + lease_ms,
        }
        if entry is not None and self.has_error(entry, generation):
            case, claimed = self.claim(entry, clock, ids, claim)
            return Result(case, claimed, record, entry=claimed)
        attempt, token, orphaned_ms, met, steps = 1, clock.us, b"", None, b""
        if record is not None:
            if self.differ(record.fingerprint, fingerprint) and not self.is_absent(record, clock):
                return Result("reused", record, record)
            is_replacement = record.finished and self.is_replacement(record, task_id, generation)
            if is_replacement:
                record = record._replace(attempt=0, body=record.replacement[1])
            elif record.finished and not continues:
                return Result("finished", record, record)
            elif record.finished and self.is_of(record, root):
                case, claimed = self.claim(record, clock, ids, claim)
                return Result(case, claimed, claimed)
            elif record.finished:
                return self.duplicate(record, entry, clock, ids, claim, task_id, generation)
            if record.state == STARTED and self.is_own(record, execution_id):
                attempt, token, orphaned_ms = record.attempt, record.token, record.format
                met = record.met
            else:
                unanswered = (
                    record.state == STARTED
                    and record.owner != b""
                    and record.owner in unanswered_ids
                )
                is_awaited = self.is_awaited(record, task_id, root, generation)
                if self.is_active(record, clock) and not (
                    unanswered or is_awaited or is_replacement
                ):
                    record = self.meet(record, clock, min_retention_ms)
                    return Result("held", record, record)
                attempt, met = record.attempt + 1, record.met
                if unanswered:
                    attempt, orphaned_ms = record.attempt, record.format
                elif record.attempt:
                    orphaned_ms = b"%d" % max(0, clock.ms - record.at)
                token = self.next_token(record, clock)
                if attempt > record.attempt and attempt > max_attempts:
                    poisoned = record._replace(
                        state=SENDING[FAILED] if continues else FAILED, token=token, at=clock.ms,
                        task_id=task_id, format=b"", body=b"poisoned", met=None,
                        expires=self.kept(record, clock, error_ms),
                        owner=execution_id if continues or keeps_root else b"",
                        root=root if continues or keeps_root else b"",
                        until=clock.ms + lease_ms if continues else 0,
                    )  # fmt: skip
                    return Result("finished", poisoned, poisoned)
            fingerprint = fingerprint or record.fingerprint
            steps = record.body
        expires = self.started_expiry(clock, lease_ms, ttl_ms)
        started = Record(
            STARTED, attempt, token, clock.ms + lease_ms, fingerprint, task_id, worker,
            execution_id, orphaned_ms, steps, expires, root, met=met,
        )  # fmt: skip
        return Result("begun", started, started)

    def claim(
        self, outcome: Record, clock: Clock, ids: tuple[bytes, bytes], claim: dict[str, Any]
    ) -> tuple[str, Record]:
        """Answers a copy of the message that has the outcome; it may have to send what follows."""
        if not outcome.sending:
            return "sent", outcome
        if self.is_sent_by_another(outcome, clock, ids):
            return "held", outcome
        return "finished", outcome._replace(**claim)

    def duplicate(
        self, record: Record, entry: Record | None, clock: Clock, ids: tuple[bytes, bytes],
        claim: dict[str, Any], task_id: bytes, generation: int,
    ) -> Result:  # fmt: skip
        """Answers another message, which has a continuation of its own."""
        if entry is not None and entry.state == COMPLETED:
            return Result("sent", record, record)
        is_sending = entry is not None and entry.state == SENDING[COMPLETED]
        if entry is not None and is_sending and self.is_sent_by_another(entry, clock, ids):
            return Result("held", entry, record)
        expires = max(record.expires, claim["until"])
        sending = Record(
            SENDING[COMPLETED], 0, generation, clock.ms, b"", task_id, b"", b"", b"", b"", expires
        )
        return Result("finished", record, record, entry=sending._replace(**claim))

    def complete(
        self, record: Record | None, clock: Clock, *, token: int, format: bytes, body: bytes,  # noqa: A002
        retention_ms: int, lease_ms: int | str, keeps_root: bool = False,
    ) -> Result:  # fmt: skip
        return self.settle(
            record, clock, COMPLETED, token, format, body, retention_ms, lease_ms, keeps_root
        )

    def fused_complete(
        self, record: Record | None, clock: Clock, *, meta: bytes, expires: int,
        backend: bytes | None = None, is_mute: bool = False, **outcome: Any,
    ) -> Result:  # fmt: skip
        """As complete, but for a replay.

        `backend` is what the result backend holds before; `is_mute`: the server does not publish.
        """
        is_replay = outcome["token"] == 0
        is_first = is_replay or self.is_held_by(record, outcome["token"])
        if is_replay:
            result = Result("ok", None, record)
        else:
            result = self.complete(record, clock, **outcome, lease_ms="")
        if result.case == "lost":
            return result._replace(backend=backend)
        if is_first and not is_mute and (backend is None or self.is_no_success(backend)):
            return result._replace(case="written", backend=meta)
        return result._replace(case="written" if backend == meta else "ok", backend=backend)

    def fail(
        self, record: Record | None, clock: Clock, *, token: int, format: bytes, body: bytes,  # noqa: A002
        retention_ms: int, lease_ms: int | str, keeps_root: bool = False,
    ) -> Result:  # fmt: skip
        return self.settle(
            record, clock, FAILED, token, format, body, retention_ms, lease_ms, keeps_root
        )

    def release(
        self, record: Record | None, clock: Clock, *, entry: Record | None, token: int,
        hold_ms: int, retention_ms: int, generation: int, format: bytes, error: bytes,  # noqa: A002
        error_ms: int, lease_ms: int | str,
    ) -> Result:  # fmt: skip
        if record is None:
            return Result("ok", None, None)
        replacement = record.state == COMPLETED and record.replacement
        if error and replacement and record.token == token:
            # Its replacement has failed, and has sent the continuation.
            record = record._replace(body=replacement[1])
        elif not self.is_held_by(record, token):
            resent = record.state == RESERVED and record.token == token
            return Result("ok" if resent else "lost", record, record)
        left = entry
        if error:
            left = self.ended(record, clock, generation, format, error, error_ms, lease_ms)
        if hold_ms == 0 and not record.body:
            return Result("ok", None, None, entry=left)
        released = record._replace(
            state=RESERVED, attempt=0, at=clock.ms + hold_ms, worker=b"", format=b"",
            owner=b"%d" % generation if hold_ms else NOBODY, root=record.root if hold_ms else b"",
            met=record.met if hold_ms else None,
        )  # fmt: skip
        ttl_ms = hold_ms + (retention_ms if record.body else 0)
        released = released._replace(expires=clock.ms + ttl_ms)
        return Result("ok", None, released, entry=left)

    def ended(
        self, record: Record, clock: Clock, generation: int, form: bytes, error: bytes,
        error_ms: int, lease_ms: int | str,
    ) -> Record:  # fmt: skip
        """Returns the entry with the error that ended the message of an execution."""
        return Record(
            FAILED if lease_ms == "" else SENDING[FAILED], 0, generation, clock.ms, b"",
            record.task_id, record.worker, record.owner, form, error,
            self.kept(record, clock, error_ms), record.root,
            0 if lease_ms == "" else clock.ms + int(lease_ms),
        )  # fmt: skip

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
        self, record: Record | None, clock: Clock, *, entry: Record | None, task_id: bytes,
        root: bytes, worker: bytes, grace_ms: int, generation: int, format: bytes,  # noqa: A002
        error: bytes, error_ms: int, execution_id: bytes, lease_ms: int | str,
    ) -> Result:  # fmt: skip
        until = clock.ms + grace_ms
        if record is not None and self.is_child(record, task_id, worker):
            if record.state != STARTED:
                return Result("ok", None, record)
            abandoned = record._replace(
                token=record.token + 1, at=min(record.at, until), owner=b"", root=b"",
                format=b"" if error else format,
            )  # fmt: skip
            if not error:
                return Result("ok", None, abandoned)
            dead = record._replace(owner=execution_id, root=root)
            left = self.ended(dead, clock, generation, format, error, error_ms, lease_ms)
            abandoned = abandoned._replace(state=RESERVED, owner=NOBODY, met=None)
            if not record.body:
                abandoned = abandoned._replace(fingerprint=b"", expires=left.expires)
            return Result("ok", None, abandoned, entry=left)
        if record is not None and self.is_sent_by(record, root, worker):
            return Result("sending", None, record._replace(until=min(record.until, until)))
        if entry is not None and self.is_sent_by(entry, root, worker):
            left = entry._replace(until=min(entry.until, until))
            return Result("sending", None, record, entry=left)
        return Result("lost", record, record)

    def reserve(
        self, record: Record | None, clock: Clock, *, task_id: bytes, fingerprint: bytes,
        hold_ms: int,
    ) -> Result:  # fmt: skip
        attempt, token, steps, expires = 0, clock.us, b"", clock.ms + hold_ms
        if record is not None:
            if self.differ(record.fingerprint, fingerprint) and not self.is_absent(record, clock):
                return Result("reused", record, record)
            if record.finished:
                return Result("finished", record, record)
            is_reserved = (
                record.state == RESERVED and record.task_id == task_id and record.owner != NOBODY
            )
            if self.is_active(record, clock) and not is_reserved:
                return Result("held", record, record)
            if record.state == STARTED:
                return Result("expired", record, record)
            attempt, token = record.attempt, self.next_token(record, clock)
            fingerprint = fingerprint or record.fingerprint
            steps = record.body
            if steps or attempt:
                expires = max(expires, record.expires)
        if expires == clock.ms:
            return Result("reserved", None, None)
        if not (hold_ms or steps):
            fingerprint = b""
        reserved = Record(
            RESERVED, attempt, token, clock.ms + hold_ms, fingerprint, task_id, b"",
            b"" if hold_ms else NOBODY, b"", steps, expires,
        )  # fmt: skip
        return Result("reserved", reserved, reserved)

    def continuation(
        self, record: Record | None, clock: Clock, *, entry: Record | None, execution_id: bytes,
        lease_ms: int | str,
    ) -> Result:  # fmt: skip
        if record is not None and self.is_sender(record, execution_id):
            case, after = self.continued(record, clock, lease_ms)
            return Result(case, None if case == "ok" else record, after)
        if entry is not None and self.is_sender(entry, execution_id):
            case, left = self.continued(entry, clock, lease_ms)
            return Result(case, None if case == "ok" else record, record, entry=left)
        return Result("lost", record, record)

    def continued(self, outcome: Record, clock: Clock, lease_ms: int | str) -> tuple[str, Record]:
        if lease_ms == "":
            return "ok", outcome._replace(state=SETTLED[outcome.state], until=0)
        if not outcome.sending:
            return "lost", outcome
        return "ok", outcome._replace(until=clock.ms + int(lease_ms))

    def forget(
        self, record: Record | None, clock: Clock, *, state: str, token: int | str
    ) -> Result:
        if record is None:
            return Result("absent", None, None)
        if record.is_remnant:
            return Result("absent", None, record if state else None)
        if state and not self.was_displayed(record, state, token):
            return Result("changed", record, record)
        return Result("ok", record, None)

    def get(self, record: Record | None, clock: Clock) -> Result:
        if record is None or record.is_remnant:
            return Result("absent", record, record)
        return Result("found", record, record)

    def is_no_success(self, backend: bytes) -> bool:
        """Whether what a result backend holds is certainly of another state than SUCCESS."""
        return b"status" in backend and b"SUCCESS" not in backend

    # Conditions and changes that several scripts share

    def has_error(self, entry: Record, generation: int) -> bool:
        """Whether the message has ended in an error: this one, or a later one of its root."""
        return SETTLED.get(entry.state) == FAILED and generation <= entry.token

    def is_of(self, record: Record, root: bytes) -> bool:
        """Whether the outcome is that of the message."""
        return record.root == root

    def is_sent_by_another(self, outcome: Record, clock: Clock, ids: tuple[bytes, bytes]) -> bool:
        """Whether another delivery is sending the continuation."""
        execution_id, unanswered_ids = ids
        is_mine = outcome.owner == execution_id or outcome.owner in unanswered_ids
        return outcome.until > clock.ms and not is_mine

    def is_sent_by(self, outcome: Record, root: bytes, worker: bytes) -> bool:
        """Whether a process of that name is sending the continuation of the message."""
        return outcome.sending and (outcome.root, outcome.worker) == (root, worker)

    def is_sender(self, outcome: Record, execution_id: bytes) -> bool:
        """Whether that delivery sends the continuation, or has sent it."""
        return outcome.finished and outcome.owner == execution_id

    def is_replacement(self, record: Record, task_id: bytes, generation: int) -> bool:
        """Whether the task replaced itself and this message continues it under the key.

        By the task id: a process that does not know the task publishes it without a root.
        """
        replacement = record.replacement
        return bool(replacement and record.task_id == task_id and replacement[0] <= generation)

    def is_held_by(self, record: Record | None, token: int) -> bool:
        return record is not None and record.state == STARTED and record.token == token

    def is_own(self, record: Record, execution_id: bytes) -> bool:
        """Whether this is the resend of a begin whose reply was lost."""
        return record.owner == execution_id

    def is_child(self, record: Record, task_id: bytes, worker: bytes) -> bool:
        return not record.finished and (record.task_id, record.worker) == (task_id, worker)

    def is_awaited(self, record: Record, task_id: bytes, root: bytes, generation: int) -> bool:
        """Whether the key is reserved for this message."""
        if record.state != RESERVED or record.owner == NOBODY:
            return False
        if record.owner == b"":
            return record.task_id == task_id
        return record.root == root and int(record.owner) <= generation

    def is_absent(self, record: Record, clock: Clock) -> bool:
        """Whether the reservation has ended and nothing remains."""
        return record.state == RESERVED and not record.body and not self.is_active(record, clock)

    def was_displayed(self, record: Record, state: str, token: int | str) -> bool:
        displayed = SETTLED.get(record.state, record.state)
        return displayed == state and record.token == token

    def is_active(self, record: Record, clock: Clock) -> bool:
        """Whether the lease or the reservation has not expired."""
        return record.at > clock.ms

    def meet(self, record: Record, clock: Clock, min_retention_ms: int) -> Record:
        """Keeps the outcome for a call that comes back; not each time, since others are waiting."""
        met = max(record.met or 0, clock.ms) - clock.ms
        if record.state != STARTED or not min_retention_ms or met >= min_retention_ms / 2:
            return record
        return record._replace(met=clock.ms + min_retention_ms)

    def kept(self, record: Record, clock: Clock, retention_ms: int) -> int:
        """Returns when an outcome expires: not before those who met the execution came back."""
        return max(clock.ms + retention_ms, record.met or 0)

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
        body: bytes, retention_ms: int, lease_ms: int | str, keeps_root: bool,
    ) -> Result:  # fmt: skip
        if not self.is_held_by(record, token):
            if record is None or (SETTLED.get(record.state), record.token) != (state, token):
                return Result("lost", record, record)
            expires = max(record.expires, clock.ms + retention_ms)
            return Result("ok", record, record._replace(expires=expires))
        sends = lease_ms not in ("", 0)
        outcome = record._replace(
            state=SENDING[state] if sends else state, at=clock.ms, format=form, body=body,
            expires=self.kept(record, clock, retention_ms), met=None,
            until=clock.ms + int(lease_ms) if sends else 0,
        )  # fmt: skip
        if lease_ms == "" and not keeps_root:
            outcome = outcome._replace(owner=b"", root=b"")
        return Result("ok", None, outcome)

    @staticmethod
    def differ(fingerprint: bytes, other: bytes) -> bool:
        """Whether the arguments differ; a label may follow the eight bytes, and zeros are none."""
        fingerprint, other = fingerprint[:8].strip(b"\0"), other[:8].strip(b"\0")
        return bool(fingerprint and other and fingerprint != other)
