"""Everything that may happen to messages of a key that may run again.

The part of one message (lost replies, resends, attempts, steps) is searched in `environment`: only
copies of one message meet its record. Here several messages share the turn, so each delivery is a
step: it begins, and acts on the reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from labs.verification.model import (
    RESERVED,
    STARTED,
    UNCHANGED,
    WITH_ENTRY,
    Clock,
    Record,
)
from labs.verification.state import LEASE, RETENTION, TICK_US, Transition, Violation
from labs.verification.turn_model import TurnProtocol, TurnResult
from labs.verification.turn_state import (
    EVENTS,
    HOLD,
    IGNORED,
    OUTCOME,
    RESERVATION,
    Delivery,
    Message,
    TurnState,
    canonical_state,
    microsecond,
    name_of,
    new_execution_id,
    numbers,
    put,
    replace,
    task_of,
)

Effect = Callable[[TurnState], TurnState]


class TurnEnvironment:
    """A setting.

    Args:
        until: "finished" or "started", as the option.
        tasks: messages with ids of their own.
        dedupes: whether publishers reserve first.
        expires: whether reservations age.
        same_id: whether all tasks are publishes of one task id.
    """

    def __init__(
        self, protocol: TurnProtocol | None = None, *, until: str = "finished", tasks: int = 2,
        workers: int = 2, dedupes: bool = False, on_conflict: str = "retry",
        expires: bool = False, same_id: bool = False, allowed: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        allowed = allowed or {}
        assert not set(allowed) - set(EVENTS)
        self.protocol = protocol or TurnProtocol()
        self.collapses = until == "started"
        self.tasks, self.workers, self.dedupes = tasks, workers, dedupes
        self.on_conflict, self.expires, self.same_id = on_conflict, expires, same_id
        self.remaining = tuple(allowed.get(name, 0) for name in EVENTS)
        self.case = ""

    def start(self) -> TurnState:
        each = range(self.tasks)
        return TurnState(
            turn=None, records=(None,) * self.tasks, entries=(None,) * self.tasks,
            messages=() if self.dedupes else tuple(Message(task, 0, -1) for task in each),
            deliveries=(None,) * self.workers,
            publishers=("reserving" if self.dedupes else "sent",) * self.tasks,
            fresh=(False,) * self.tasks, answers=("",) * self.tasks, begun=(False,) * self.tasks,
            ended=(None,) * self.tasks, holder=b"", token=-(10**9), remaining=self.remaining,
        )  # fmt: skip

    def is_goal(self, state: TurnState) -> bool:
        """Whether every call has an answer, or gets that of another one, which has one."""
        return all(
            state.answers[int(stage)] if stage.isdigit() else answer
            for stage, answer in zip(state.publishers, state.answers, strict=True)
        )

    def transitions(self, state: TurnState) -> Iterator[Transition]:
        for text, event, effect in self._actions(state):
            if event and not state.remaining[EVENTS.index(event)]:
                continue
            try:
                after = effect(self._count(state, event))
                self._check(after)
            except Violation as violation:
                raise Violation(text, *violation.args) from None
            canonical, renamed = canonical_state(after)
            yield Transition(text, bool(event), canonical, renamed)  # type: ignore[arg-type]

    def _actions(self, state: TurnState) -> Iterator[tuple[str, str, Effect]]:
        for task, stage in enumerate(state.publishers):
            if stage == "reserving":
                yield f"T{task} is reserved", "", lambda s, t=task: self._reserve(s, t)
            elif stage == "reserved":
                yield f"T{task} is sent", "", lambda s, t=task: self._send(s, t)
        free = next((slot for slot, used in enumerate(state.deliveries) if used is None), None)
        if free is not None:
            for message in sorted(set(state.messages)):
                event = "" if message.number < 0 else "redelivery"
                text = f"T{message.task} ({message.retries}) is delivered"
                yield text, event, lambda s, m=message: self._deliver(s, free, m)
        for slot, delivery in enumerate(state.deliveries):
            if delivery is not None:
                yield from self._run(slot, delivery)
        if all(
            each is None or each.frozen or (each.lease_left > 1 and not each.retried)
            for each in state.deliveries
        ):
            yield "the clock ticks", "", self._tick

    def _run(self, slot: int, delivery: Delivery) -> Iterator[tuple[str, str, Effect]]:
        name = f"{delivery.execution_id.decode()} (T{delivery.message.task})"

        def end(script: str) -> Effect:
            return lambda state: self._end(state, slot, script)

        yield f"{name} is killed", "crash", lambda s: self._die(s, slot)
        yield (
            f"{name} is killed, and abandoned", "seen crash",
            lambda s: self._die(self._abandon(s, slot), slot),
        )  # fmt: skip
        if delivery.frozen:
            yield f"{name} resumes", "", lambda s: put(s, slot, delivery._replace(frozen=False))
            return
        yield f"{name} freezes", "freeze", lambda s: put(s, slot, delivery._replace(frozen=True))
        if delivery.retried:
            yield f"{name} releases the turn for its retry", "", end("hold")
            return
        if delivery.lease_left < LEASE:
            yield f"{name} extends its lease", "", lambda s: self._extend(s, slot)
        yield f"{name} completes", "", end("complete")
        yield f"{name} ends with an error", "error", end("error")
        retried = delivery._replace(retried=True, lease_left=0)
        retry = Message(delivery.message.task, delivery.message.retries + 1, -1)
        yield (
            f"{name} publishes a retry", "retry",
            lambda s: put(s._replace(messages=(*s.messages, retry)), slot, retried),
        )  # fmt: skip

    # Publishers

    def _reserve(self, state: TurnState, task: int) -> TurnState:
        arguments = {"task_id": self.id_of(task), "fingerprint": b"", "hold_ms": RESERVATION}
        result, state = self._execute(
            state, task, "reserve_turn", **arguments, waits=int(self.collapses)
        )
        if result.case in ("reserved", "expired"):
            return replace(state, "publishers", task, "reserved")
        assert result.case == "held", result.case
        assert result.replied is not None
        other = task_of(result.replied.task_id)
        state = replace(state, "publishers", task, str(other))
        return replace(state, "fresh", task, not self.collapses)

    def _send(self, state: TurnState, task: int) -> TurnState:
        state = replace(state, "publishers", task, "sent")
        return state._replace(messages=(*state.messages, Message(task, 0, -1)))

    # Deliveries

    def _deliver(self, state: TurnState, slot: int, message: Message) -> TurnState:
        task = message.task
        used = numbers(state)
        number = message.number
        if number < 0:
            number = next(each for each in range(len(used) + 1) if each not in used)
        taken = message._replace(number=number)
        messages = list(state.messages)
        if message.number < 0:
            messages[messages.index(message)] = taken
        state = state._replace(messages=tuple(messages))
        execution_id = new_execution_id(state)
        result, state = self._execute(
            state, task, "begin", execution_id=execution_id, unanswered_ids=b"",
            task_id=self.id_of(task), root=name_of(task), generation=message.retries,
            fingerprint=b"", continues=0,
            worker=b"w" + execution_id, lease_ms=LEASE, ttl_ms=LEASE + RETENTION, max_attempts=99,
            error_ms=RETENTION, next_turn_ms=RESERVATION if self.collapses else 0,
        )  # fmt: skip
        if result.case == "begun":
            assert result.replied is not None
            state = self._begun(state, task, message.retries, execution_id, result.replied.token)
            return put(state, slot, Delivery(taken, execution_id, result.replied.token))
        if result.case in ("finished", "sent"):
            assert result.replied is not None
            self._check_replay(state, task, result.replied)
            return self._acknowledge(state, taken, OUTCOME)
        if self.policy(result.case) == "ignore":
            if state.begun[task]:
                raise Violation("a message that has begun is dropped")
            return self._acknowledge(state, taken, IGNORED)
        return self._requeue(state, taken)

    def policy(self, case: str) -> str:
        """A message that has begun before, or waits, is always put back."""
        return self.on_conflict if case == "busy" else "retry"

    def _requeue(self, state: TurnState, message: Message) -> TurnState:
        again = Message(message.task, message.retries, -1)
        state = state._replace(messages=(*state.messages, again))
        return self._acknowledge(state, message, "")

    def _acknowledge(self, state: TurnState, message: Message, answer: str) -> TurnState:
        left = tuple(each for each in state.messages if each.number != message.number)
        state = state._replace(messages=left)
        task = message.task
        if answer and not state.answers[task]:
            state = replace(state, "answers", task, answer)
            for other, stage in enumerate(state.publishers):
                if stage == str(task) and not (state.fresh[other] and answer == OUTCOME):
                    raise Violation(f"the publish of T{other} is swallowed")
        return state

    def _begun(
        self, state: TurnState, task: int, retries: int, execution_id: bytes, token: int
    ) -> TurnState:
        end = state.ended[task]
        if end is not None and retries <= end[0]:
            raise Violation("a copy of a message that has ended runs again")
        if token <= state.token:
            raise Violation("the token does not grow")
        fresh = tuple(
            is_fresh or stage == str(task)
            for is_fresh, stage in zip(state.fresh, state.publishers, strict=True)
        )
        state = replace(state, "begun", task, True)
        return state._replace(holder=execution_id, token=token, fresh=fresh)

    def _end(self, state: TurnState, slot: int, script: str) -> TurnState:
        delivery = state.deliveries[slot]
        assert delivery is not None
        message, token = delivery.message, {"token": delivery.token}
        body = {
            "format": b"", "body": delivery.execution_id, "retention_ms": RETENTION, "lease_ms": "",
        }  # fmt: skip
        release = {
            "retention_ms": RETENTION, "format": b"", "error_ms": RETENTION, "lease_ms": "",
        }  # fmt: skip
        arguments: dict[str, Any] = {
            "complete": body,
            "error": {
                **release, "hold_ms": 0, "error": delivery.execution_id,
                "generation": message.retries,
            },
            "hold": {**release, "hold_ms": HOLD, "error": b"", "generation": message.retries + 1},
        }[script]  # fmt: skip
        name = "complete" if script == "complete" else "release"
        before = state.turn, state.records
        result, state = self._execute(state, message.task, name, **token, **arguments)
        state = put(state, slot, None)
        if name == "release" and result.case == "ok" and (state.turn, state.records) == before:
            # There was no record any more: the key is free.
            return self._acknowledge(state, message, "" if script == "hold" else OUTCOME)
        if result.case == "ok":
            if state.holder != delivery.execution_id:
                raise Violation(f"the {name} of a stale execution is accepted")
            if state.turn is not None and state.turn.state == STARTED:
                raise Violation("the turn is held after its end")
            state = state._replace(holder=b"")
            if script == "hold":
                return self._acknowledge(state, message, "")
            end = message.retries, delivery.execution_id
            return self._acknowledge(replace(state, "ended", message.task, end), message, OUTCOME)
        if state.holder == delivery.execution_id:
            raise Violation("the holder of the turn is rejected")
        if script == "hold":
            return self._acknowledge(state, message, "")
        replied = result.replied
        if replied is not None and replied.finished:
            self._check_replay(state, message.task, replied)
            return self._acknowledge(state, message, OUTCOME)
        return self._requeue(state, message)

    def _check_replay(self, state: TurnState, task: int, replied: Record) -> None:
        end = state.ended[task]
        if end is None or replied.body != end[1]:
            raise Violation("a message gets another outcome than its own")

    def _extend(self, state: TurnState, slot: int) -> TurnState:
        delivery = state.deliveries[slot]
        assert delivery is not None
        result, state = self._execute(
            state, delivery.message.task, "extend", token=delivery.token, lease_ms=LEASE,
            ttl_ms=LEASE + RETENTION,
        )  # fmt: skip
        if result.case == "ok":
            if state.holder != delivery.execution_id:
                raise Violation("a stale execution keeps the turn")
            return put(state, slot, delivery._replace(lease_left=LEASE))
        return self._end(state, slot, "complete")

    def _die(self, state: TurnState, slot: int) -> TurnState:
        delivery = state.deliveries[slot]
        assert delivery is not None
        state = state._replace(
            messages=tuple(
                each._replace(number=-1) if each == delivery.message else each
                for each in state.messages
            )
        )
        return put(state, slot, None)

    def _abandon(self, state: TurnState, slot: int) -> TurnState:
        delivery = state.deliveries[slot]
        assert delivery is not None
        _, state = self._execute(
            state, delivery.message.task, "abandon", task_id=self.id_of(delivery.message.task),
            root=name_of(delivery.message.task), worker=b"w" + delivery.execution_id, grace_ms=0,
            generation=0, format=b"", error=b"", error_ms=RETENTION, execution_id=b"",
            lease_ms="",
        )  # fmt: skip
        return state

    # The server

    def _execute(
        self, state: TurnState, task: int, name: str, **arguments: Any
    ) -> tuple[TurnResult, TurnState]:
        script = getattr(self.protocol, name)
        clock = Clock(0, microsecond(state))
        before, own = state.turn, 0 if self.same_id else task
        if name in WITH_ENTRY:
            arguments["entry"] = state.entries[task]
        result: TurnResult = script(state.records[own], before, clock, **arguments)
        if result.moved is not None:
            state = replace(state, "entries", task_of(result.moved.root), result.moved)
        if result.entry is not UNCHANGED:
            arguments["entry"] = result.entry
            state = replace(state, "entries", task, result.entry)
        again = script(result.after, result.turn, Clock(0, clock.us + 1), **arguments)
        if again.case != result.case:
            raise Violation(f"a resend changes the reply: {result.case}, then {again.case}")
        for record in (result.after, result.turn):
            if record is not None and not 0 < record.expires <= 2 * LEASE + RESERVATION + RETENTION:
                raise Violation(f"a record that {name} stores does not expire in time")
        if result.case == "begun" and before is not None and before.at > 0:
            reserved = before.state == RESERVED and before.task_id != self.id_of(task)
            if reserved or (before.state == STARTED and before.token == state.token):
                raise Violation("an execution begins during the turn of another message")
        records = (*state.records[:own], result.after, *state.records[own + 1 :])
        return result, state._replace(records=records, turn=result.turn)

    def id_of(self, task: int) -> bytes:
        """Returns the task id of a publish, whose root is its name."""
        return name_of(0 if self.same_id else task)

    def _tick(self, state: TurnState) -> TurnState:
        deliveries = tuple(
            each and each._replace(
                lease_left=max(0, each.lease_left - 1), token=each.token - TICK_US
            )
            for each in state.deliveries
        )  # fmt: skip
        return state._replace(
            turn=self._aged_turn(state.turn), records=tuple(map(self._aged, state.records)),
            deliveries=deliveries, token=state.token - TICK_US,
        )  # fmt: skip

    def _aged(self, record: Record | None) -> Record | None:
        """Returns the record after a tick; the copies of a message are known for ever."""
        if record is None:
            return None
        by = 1 if self.expires or record.state != RESERVED or record.owner else 0
        waiting = tuple(
            each._replace(at=max(-1, each.at - self.expires)) for each in record.waiting
        )
        at = record.at if record.finished else max(-1, record.at - by)
        return record._replace(at=at, waiting=waiting, token=record.token - TICK_US)

    def _aged_turn(self, turn: Record | None) -> Record | None:
        """Returns the turn after a tick; Redis forgets a reservation at its end."""
        aged = self._aged(turn)
        if aged is not None and aged.state == RESERVED and aged.at <= 0 and not aged.waiting:
            return None
        return aged

    @staticmethod
    def _count(state: TurnState, event: str) -> TurnState:
        if not event:
            return state
        left = list(state.remaining)
        left[EVENTS.index(event)] -= 1
        return state._replace(remaining=tuple(left))

    # The invariants of every state

    def _check(self, state: TurnState) -> None:
        trusting = [each for each in state.deliveries if each and each.lease_left > 0]
        if len(trusting) > 1:
            raise Violation("two executions trust their lease")
        for task, stage in enumerate(state.publishers):
            has_message = any(each.task == task for each in state.messages)
            if stage == "sent" and not state.answers[task] and not has_message:
                raise Violation(f"the message of T{task} is lost")
        if self.dedupes and self.collapses and not self.expires:
            waiting = [
                task
                for task, stage in enumerate(state.publishers)
                if stage in ("reserved", "sent") and not state.begun[task]
            ]
            if len(waiting) > 1:
                raise Violation("two messages wait")
