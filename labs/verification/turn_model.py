"""The contract of the scripts for a key that may run again: a message's record, and the turn.

The message's part is that of :class:`Protocol`: only messages with its task id meet its record. One
that is published anew under that id runs, and the outcome before becomes an entry. The turn is a
record, too; its body is the message that waits for the next one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from labs.verification.model import (
    COMPLETED,
    NOBODY,
    RESERVED,
    SETTLED,
    STARTED,
    UNCHANGED,
    Clock,
    Protocol,
    Record,
    Waiting,
)


class TurnResult(NamedTuple):
    """What a script replies and stores."""

    case: str
    #: The record in the reply.
    replied: Record | None
    #: The message's record, and that of the turn, afterwards.
    after: Record | None
    turn: Record | None
    #: The message's entry afterwards.
    entry: Any = UNCHANGED
    #: The outcome that became the entry of the message before, whose root it has.
    moved: Record | None = None


class _Message(Protocol):
    """The message's part of begin: its own resend counts only while it still has the turn."""

    has_turn = False

    def is_own(self, record: Record, execution_id: bytes) -> bool:
        return self.has_turn and super().is_own(record, execution_id)


class TurnProtocol:
    """The scripts with a turn."""

    message = Protocol()

    def begin(
        self, record: Record | None, turn: Record | None, clock: Clock, *, next_turn_ms: int,
        entry: Record | None, **arguments: Any,
    ) -> TurnResult:  # fmt: skip
        result = self._begin(record, turn, clock, next_turn_ms, entry, arguments)
        is_anew = record is not None and self.is_anew(record, arguments["root"])
        if is_anew and result.entry is UNCHANGED:
            moved = record._replace(expires=max(record.expires, clock.ms + 1))
            result = result._replace(moved=moved)
            if result.after is None:
                result = result._replace(after=record)
        return result

    def _begin(
        self, record: Record | None, turn: Record | None, clock: Clock, next_turn_ms: int,
        entry: Record | None, arguments: dict[str, Any],
    ) -> TurnResult:  # fmt: skip
        task_id, root = arguments["task_id"], arguments["root"]
        message = _Message()
        if entry is not None and (
            SETTLED[entry.state] == COMPLETED or message.has_error(entry, arguments["generation"])
        ):
            ids = arguments["execution_id"], arguments["unanswered_ids"]
            until = clock.ms + arguments["lease_ms"]
            claim = {
                "root": root, "owner": ids[0], "worker": arguments["worker"], "until": until,
            }  # fmt: skip
            case, claimed = message.claim(entry, clock, ids, claim)
            return TurnResult(case, claimed, record, turn, claimed)
        if record is not None and self.is_anew(record, root):
            record = None
        continues = record is not None and message.is_replacement(
            record, task_id, arguments["generation"]
        )
        if record is not None and record.finished and record.root != root and not continues:
            differs = message.differ(record.fingerprint, arguments["fingerprint"])
            return TurnResult("reused" if differs else "finished", record, record, turn)
        message.has_turn = self.is_same(record, turn)
        result = message.begin(
            record, self.later_clock(clock, turn), entry=None, keeps_root=True, **arguments
        )
        if result.case == "reused" or (
            record is not None and record.finished and result.case != "begun"
        ):
            return TurnResult(result.case, result.replied, result.after, turn)
        if turn is not None and not turn.readable:
            return TurnResult("corrupt", turn, record, turn)
        waiting = self.waiting(turn, clock)
        if turn is not None and self.blocks(turn, record, task_id, clock):
            waits = waiting is not None and waiting.task_id == task_id
            if self.may_wait(turn, waiting, task_id) and next_turn_ms:
                waits = True
                will_wait = Waiting(task_id, clock.ms + next_turn_ms, arguments["fingerprint"])
                turn_after = turn._replace(waiting=(will_wait,), body=b"")
            else:
                turn_after = turn
            case = "later" if record is not None or waits else "busy"
            return TurnResult(case, turn, record, turn_after)
        if turn is not None and record is None and self.has_ended(turn, task_id, root):
            return TurnResult("finished", turn, record, turn)
        if result.case != "begun":
            return TurnResult(result.case, result.replied, result.after, turn)
        assert result.after is not None
        kept = () if waiting is None or waiting.task_id == task_id else (waiting,)
        return TurnResult(
            "begun", result.replied, result.after, result.after._replace(waiting=kept, body=b"")
        )

    def complete(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        return self._settle("complete", record, turn, clock, arguments)

    def fused_complete(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        return self._settle("fused_complete", record, turn, clock, arguments)

    def fail(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        return self._settle("fail", record, turn, clock, arguments)

    def _settle(
        self, script: str, record: Record | None, turn: Record | None, clock: Clock,
        arguments: dict[str, Any],
    ) -> TurnResult:  # fmt: skip
        token = arguments["token"]
        runs = record is not None and record.state == STARTED
        if runs and not self.holds(turn, token):
            return TurnResult("lost", turn and record, record, turn)
        result = getattr(self.message, script)(record, clock, keeps_root=True, **arguments)
        if result.case == "lost":
            return TurnResult("lost", turn and record, record, turn)
        if runs:
            last = result.after._replace(state=SETTLED[result.after.state], until=0)
            turn = self.end_turn(turn, clock, last, result.after.expires)
        return TurnResult(result.case, result.replied, result.after, turn)

    def release(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        token, hold_ms = arguments["token"], arguments["hold_ms"]
        holds = self.holds(turn, token)
        runs = self.message.is_held_by(record, token)
        if runs and not holds:
            return TurnResult("lost", turn and record, record, turn)
        if record is not None and record.finished:
            # No other message meets the outcome of a task that replaced itself.
            arguments["error"] = b""
        result = self.message.release(record, clock, **arguments)
        after = result.after
        if not runs and (record is not None or not holds):
            return TurnResult(result.case, result.replied, after, turn, result.entry)
        if not runs or not hold_ms:
            turn = self.end_turn(turn, clock, None, 0)
            return TurnResult(result.case, None, after, turn, result.entry)
        assert after is not None
        if not after.body:
            # A retry that comes late has begun before.
            after = after._replace(expires=clock.ms + hold_ms + arguments["retention_ms"])
        waiting = self.waiting(turn, clock)
        expires = max(clock.ms + hold_ms, waiting.at if waiting else clock.ms)
        kept = () if waiting is None else (waiting,)
        turn = after._replace(waiting=kept, body=b"", expires=expires)
        return TurnResult(result.case, None, after, turn, result.entry)

    def extend(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        return self._prolong("extend", record, turn, clock, arguments)

    def save_step(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        return self._prolong("save_step", record, turn, clock, arguments)

    def _prolong(
        self, script: str, record: Record | None, turn: Record | None, clock: Clock,
        arguments: dict[str, Any],
    ) -> TurnResult:  # fmt: skip
        if turn is None or not self.holds(turn, arguments["token"]):
            return TurnResult("lost", record, record, turn)
        result = getattr(self.message, script)(record, clock, **arguments)
        if result.case == "ok":
            turn = self.message.extended(turn, clock, arguments["lease_ms"], arguments["ttl_ms"])
        return TurnResult(result.case, result.replied, result.after, turn)

    def abandon(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        result = self.message.abandon(record, clock, **arguments)
        runs = result.case == "ok" and record is not None and record.state == STARTED
        if runs and turn is not None and self.holds(turn, record.token):
            waiting = self.waiting(turn, clock)
            kept = () if waiting is None else (waiting,)
            turn = result.after._replace(waiting=kept, body=b"", expires=turn.expires)
        return TurnResult(result.case, result.replied, result.after, turn, result.entry)

    def reserve_turn(
        self, record: Record | None, turn: Record | None, clock: Clock, *, task_id: bytes,
        fingerprint: bytes, hold_ms: int, waits: int,
    ) -> TurnResult:  # fmt: skip
        if turn is not None and not turn.readable:
            return TurnResult("corrupt", turn, record, turn)
        waiting = self.waiting(turn, clock)
        if not hold_ms:
            if turn is not None and waiting is not None and waiting.task_id == task_id:
                turn = turn._replace(waiting=(), body=b"")
            elif turn is not None and turn.state == RESERVED and turn.task_id == task_id:
                turn = self.end_turn(turn, clock, None, 0)
            return TurnResult("reserved", None, record, turn)
        token = clock.us
        if turn is not None:
            token = self.message.next_token(turn, clock)
        if turn is not None and not turn.finished:
            if waiting is not None and waiting.task_id != task_id:
                differ = self.message.differ(waiting.fingerprint, fingerprint)
                replied = self.reserved(turn, waiting)
                return TurnResult("reused" if differ else "held", replied, record, turn)
            active = self.message.is_active(turn, clock)
            other = turn.task_id != task_id
            dying = turn.owner == NOBODY and active
            if (turn.state == STARTED and waits and other) or dying:
                will_wait = Waiting(task_id, clock.ms + hold_ms, fingerprint)
                return TurnResult(
                    "reserved", None, record, turn._replace(waiting=(will_wait,), body=b"")
                )
            if active and (turn.state == STARTED or (turn.state == RESERVED and other)):
                differ = self.message.differ(turn.fingerprint, fingerprint)
                return TurnResult("reused" if differ else "held", turn, record, turn)
            if turn.state == STARTED:
                return TurnResult("expired", turn, record, turn)
        expires = clock.ms + hold_ms
        reserved = Record(
            RESERVED, 0, token, expires, fingerprint, task_id, b"", b"", b"", b"", expires
        )
        return TurnResult("reserved", None, record, reserved)

    # Conditions and changes that several scripts share

    def holds(self, turn: Record | None, token: int) -> bool:
        """Whether the execution with this token has the turn."""
        return self.message.is_held_by(turn, token)

    def is_same(self, record: Record | None, turn: Record | None) -> bool:
        """Whether the message's execution has the turn, or had the last one."""
        return record is not None and turn is not None and turn.token == record.token

    def blocks(self, turn: Record, record: Record | None, task_id: bytes, clock: Clock) -> bool:
        """Whether another message has the turn."""
        if turn.finished or not self.message.is_active(turn, clock):
            return False
        is_reserved = turn.state == RESERVED and turn.task_id == task_id
        return not is_reserved and not self.is_same(record, turn)

    def may_wait(self, turn: Record, waiting: Waiting | None, task_id: bytes) -> bool:
        """Whether the next turn is free for a message that meets a run."""
        return turn.state == STARTED and (waiting is None or waiting.task_id == task_id)

    def is_anew(self, record: Record, root: bytes) -> bool:
        """Whether a message is published anew whose task id has ended before."""
        return (
            record.finished
            and record.root not in (b"", root)
            and not record.format.startswith(b"=")
        )

    def has_ended(self, turn: Record, task_id: bytes, root: bytes) -> bool:
        """Whether the turn is the outcome of a message that ended before the option changed."""
        is_its = turn.task_id == task_id and turn.root in (b"", root)
        return turn.finished and is_its and not turn.format.startswith(b"=")

    def waiting(self, turn: Record | None, clock: Clock) -> Waiting | None:
        """Returns the message that waits for the next turn."""
        if turn is None or turn.finished or not turn.waiting:
            return None
        first = turn.waiting[0]
        return first if first.at > clock.ms else None

    def later_clock(self, clock: Clock, turn: Record | None) -> Clock:
        """Returns a clock whose tokens are higher than that of the turn."""
        return clock if turn is None else clock._replace(us=max(clock.us, turn.token + 1))

    def end_turn(
        self, turn: Record | None, clock: Clock, last: Record | None, expires: int
    ) -> Record | None:
        """The waiting message has the next turn reserved; without one, the last call is shown."""
        assert turn is not None
        waiting = self.waiting(turn, clock)
        if waiting is not None:
            return self.reserved(turn, waiting)
        return last and last._replace(expires=expires)

    def reserved(self, turn: Record, waiting: Waiting) -> Record:
        """Returns the turn, reserved for the message that waits."""
        return Record(
            RESERVED, 0, turn.token, waiting.at, waiting.fingerprint, waiting.task_id, b"", b"",
            b"", b"", waiting.at,
        )  # fmt: skip
