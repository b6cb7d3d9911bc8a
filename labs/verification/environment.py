"""What surrounds the scripts: a broker, workers that crash and freeze, lost replies, clocks.

The actions of two deliveries may interleave in any order, and a crash or a freeze may come between.
Actions of one delivery that affect nothing else are one action: a delivery without a fault reads a
reply as soon as it is sent, and settles as soon as its work ends. A healthy delivery is fast
compared with the clock: time passes only while each one either runs under a lease that it has
extended, or is frozen.

All times count from the server's present time, and of old tokens only the order is kept. So there
are finitely many states, and a search visits all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from labs.verification.canonical_state import canonical_state
from labs.verification.deliveries import Deliveries
from labs.verification.model import COMPLETED, FAILED, SETTLED, STARTED, Record, Result
from labs.verification.state import (
    ERROR,
    GRACE,
    HOLD,
    KILLED,
    LEASE,
    NO_RESULT,
    NO_SUCCESS,
    NO_TOKEN,
    NOT_SENT,
    OUTCOME,
    RETENTION,
    TICK_US,
    Action,
    Delivery,
    Effect,
    History,
    LateCopy,
    Message,
    State,
    Transition,
    Violation,
    acknowledge,
    answer_caller,
    new_execution_id,
    publish,
    put,
    put_result,
    replace_message,
    set_publisher,
    update,
    worker_of,
)


def _displayed_state(record: Record) -> str:
    return SETTLED.get(record.state, record.state)


def _display(state: State) -> State:
    assert state.record is not None
    return state._replace(displayed=(state.record.token, _displayed_state(state.record)))


class Environment(Deliveries):
    """A setting, with everything that may happen in it."""

    def start(self) -> State:
        """Returns the first state: messages are published, or publishers are about to reserve."""
        messages = () if self.reserves else tuple(
            Message(-1, task, b"", queued=True) for task in self.tasks
        )  # fmt: skip
        stage = "reserving" if self.reserves else ""
        return State(
            record=None, messages=messages, deliveries=(None,) * self.workers, notices=(),
            late_copy=None, remaining=self.remaining, answers=("",) * len(self.tasks),
            publishers=(stage,) * len(self.tasks), history=History(token=NO_TOKEN),
            results=(NO_RESULT,) * len(self.tasks) if self.fused else (),
            entries=(None,) * len(self.tasks), ever_sent=(False,) * len(self.tasks),
        )  # fmt: skip

    def is_goal(self, state: State) -> bool:
        """Whether every caller has an answer."""
        return all(
            answer or stage.startswith("waits")
            for answer, stage in zip(state.answers, state.publishers, strict=True)
        )

    # Actions

    def transitions(self, state: State) -> Iterator[Transition]:
        """Yields every action that is possible in `state`, with the state after it.

        Raises:
            Violation: if one breaks an invariant; `args` are its description and the reason.
        """
        for text, fault, effect in self._actions(state):
            try:
                after, renamed = canonical_state(effect(state), self.clock_steps_back)
                self._check(after)
            except Violation as violation:
                raise Violation(text.replace("→", self.case), *violation.args) from None
            yield Transition(text.replace("→", self.case), fault, after, renamed)

    def _actions(self, state: State) -> Iterator[Action]:
        for slot, delivery in enumerate(state.deliveries):
            if delivery is not None:
                yield from self._actions_of_slot(state, slot, delivery)
        yield from self._broker(state)
        yield from self._publishers(state)
        for task, worker in state.notices:
            text = f"the parent abandons the lease of {worker.decode()} ({task.decode()})"
            yield text, False, self._abandon(task, worker)
        if state.late_copy is not None:
            sender = state.late_copy.sender.execution_id.decode()
            text = f"the {state.late_copy.script} of {sender} arrives once more"
            yield text, False, self._execute_late_copy(state.late_copy)
        yield from self._operator(state)
        yield from self._result_backend(state)
        if self._may_tick(state):
            yield "the clock ticks", False, self._tick
        if self.allows(state, "clock forward"):
            effect = self.count("clock forward", lambda state: self._shift_clock(state, LEASE))
            yield f"the server's clock leaps forward by {LEASE}", True, effect
        if self.allows(state, "clock back"):
            effect = self.count("clock back", lambda state: self._shift_clock(state, -LEASE))
            yield f"the server's clock falls back by {LEASE}", True, effect

    def _actions_of_slot(self, state: State, slot: int, delivery: Delivery) -> Iterator[Action]:
        name = f"{delivery.execution_id.decode()} ({delivery.task.decode()})"
        if not delivery.frozen:
            yield from self.actions_of(state, slot, delivery, name)
            if self.allows(state, "freeze"):
                yield f"{name} freezes", True, self.count("freeze", update(slot, frozen=True))
        elif delivery.reply is not None:
            text = f"{name} resumes, and reads the reply {delivery.reply.case}"
            yield text, False, self._resume(slot, delivery)
        else:
            yield f"{name} resumes", False, update(slot, frozen=False)
        if delivery.dying:
            yield f"{name} is killed, as announced", False, self._die(slot)
        elif self.allows(state, "crash"):
            yield f"{name} is killed", True, self.count("crash", self._die(slot))
            if any(each and (each.state == STARTED or each.sending) for each in (
                state.record, *state.entries
            )):  # fmt: skip
                noticed = self.count("crash", self._die(slot, noticed=True))
                yield f"{name} is killed, and its parent sees it", True, noticed
        if delivery.phase == "run" and not delivery.dying and self.allows(state, "time limit"):
            text = f"{name} reaches its time limit: its lease is abandoned, it will be killed"
            yield text, True, self.count("time limit", self._time_limit(slot, delivery))
        if delivery.phase == "run" and not delivery.dying and (
            self.allows(state, "final time limit")
        ):  # fmt: skip
            text = f"{name} reaches its time limit: its message is acknowledged, it will be killed"
            limited = self._time_limit(slot, delivery, final=True)
            yield text, True, self.count("final time limit", limited)

    def _broker(self, state: State) -> Iterator[Action]:
        slot = next((slot for slot, used in enumerate(state.deliveries) if used is None), None)
        if slot is None:
            return
        for message in sorted(set(state.messages)):
            name = message.task.decode()
            execution_id = self.execution_id_for(state, message)
            number = message.number if message.number >= 0 else len(state.deliveries)
            delivery = Delivery(
                number, message.task, message.unanswered_ids, execution_id, message.retries
            )
            taken = message._replace(number=number, queued=False)
            take = partial(replace_message, old=message, new=taken)
            if message.queued:
                text = f"{name} is delivered to {execution_id.decode()}"
                yield from self.send(state, slot, delivery, text, before=take)
            elif self.allows(state, "redelivery"):
                text = f"{name} is redelivered to {execution_id.decode()}"
                actions = self.send(state, slot, delivery, text, "redelivery", before=take)
                for sent, _, effect in actions:
                    yield sent, True, effect

    def execution_id_for(self, state: State, message: Message) -> bytes:
        """Each delivery draws a new execution id."""
        return new_execution_id(state)

    def _publishers(self, state: State) -> Iterator[Action]:
        for number, stage in enumerate(state.publishers):
            task = self.tasks[number].decode()
            if stage == "reserving":
                yield f"the publisher of {task} reserves the key", False, self._reserve(number)
            elif stage == "reserved":
                yield f"the publisher of {task} sends it", False, self._publish(number)
                if self.allows(state, "publish fails"):
                    fail = self.count("publish fails", self._cancel_reservation(number))
                    yield f"the publisher of {task} cannot send it", True, fail
                if self.allows(state, "publisher dies"):
                    die = self.count("publisher dies", self._not_sent(number))
                    yield f"the publisher of {task} is killed", True, die

    def _operator(self, state: State) -> Iterator[Action]:
        if self.allows(state, "forget") and state.record is not None:
            yield "an operator forgets the key", True, self.count("forget", self._forget)
        if state.displayed:
            yield "the operator forgets the displayed record", True, self._forget_displayed
        elif (
            state.record and not state.record.is_remnant and self.allows(state, "forget displayed")
        ):
            display = self.count("forget displayed", _display)
            yield "the record is displayed to an operator", True, display

    def _result_backend(self, state: State) -> Iterator[Action]:
        for task, result in zip(self.tasks, state.results, strict=False):
            for event, after, text in (
                ("result expires", NO_RESULT, "expires"),
                ("result overwritten", NO_SUCCESS, "is overwritten by another state"),
            ):
                if result != after and self.allows(state, event):
                    change = partial(put_result, task=task, result=after)
                    yield f"the result of {task.decode()} {text}", True, self.count(event, change)

    # Deaths

    def _die(self, slot: int, noticed: bool = False) -> Effect:
        def effect(state: State) -> State:
            delivery = state.deliveries[slot]
            assert delivery is not None
            for message in state.messages:
                if message.number == delivery.message:
                    state = replace_message(state, message, message._replace(queued=True))
            if noticed:
                notice = delivery.task, worker_of(delivery.execution_id)
                state = state._replace(notices=tuple(sorted({*state.notices, notice})))
            return put(state, slot, None)

        return effect

    def _time_limit(self, slot: int, delivery: Delivery, final: bool = False) -> Effect:
        def effect(state: State) -> State:
            worker = worker_of(delivery.execution_id)
            error = KILLED if final else b""
            state = self.abandon(state, delivery.task, worker, GRACE, delivery.retries, error)
            if final:
                state = acknowledge(state, delivery.message)
                state = answer_caller(state, delivery.task, ERROR)
            return put(state, slot, delivery._replace(dying=True))

        return effect

    def _abandon(self, task: bytes, worker: bytes) -> Effect:
        def effect(state: State) -> State:
            notices = tuple(notice for notice in state.notices if notice != (task, worker))
            return self.abandon(state._replace(notices=notices), task, worker, 0)

        return effect

    # Publishers

    def _reserve(self, number: int) -> Effect:
        task = self.tasks[number]

        def effect(state: State) -> State:
            arguments = {"task_id": self.id_of(task), "fingerprint": b"", "hold_ms": HOLD}
            result, state = self.execute(state, "reserve", **arguments)
            if result.case == "finished":
                return answer_caller(set_publisher(state, number, ""), task, OUTCOME)
            if result.case == "held":
                # The caller gets the result of the task that has the key.
                assert result.replied is not None
                stage = f"waits for {result.replied.task_id.decode()}"
                return set_publisher(state, number, stage)
            return set_publisher(state, number, "reserved")

        return effect

    def _publish(self, number: int) -> Effect:
        return lambda state: publish(set_publisher(state, number, ""), self.tasks[number], b"")

    def _cancel_reservation(self, number: int) -> Effect:
        def effect(state: State) -> State:
            task_id = self.id_of(self.tasks[number])
            arguments = {"task_id": task_id, "fingerprint": b"", "hold_ms": 0}
            _, state = self.execute(state, "reserve", **arguments)
            return self._not_sent(number)(state)

        return effect

    def _not_sent(self, number: int) -> Effect:
        """The caller knows that the message was not sent: it got an error, or it is dead."""
        return lambda state: answer_caller(
            set_publisher(state, number, ""), self.tasks[number], NOT_SENT
        )

    # Time

    def _may_tick(self, state: State) -> bool:
        for delivery in state.deliveries:
            if delivery is None or (delivery.frozen and not delivery.dying):
                continue
            must_extend = delivery.lease_left == 1 and delivery.has_heartbeat
            if delivery.dying or delivery.phase != "run" or must_extend:
                return False
        return True

    def _tick(self, state: State) -> State:
        deliveries = tuple(
            each and each._replace(lease_left=max(0, each.lease_left - 1))
            for each in state.deliveries
        )
        return self._shift_clock(state._replace(deliveries=deliveries), 1)

    def _shift_clock(self, state: State, ticks: int) -> State:
        record = state.record
        if record is not None and record.expires - ticks <= 0:
            if record.state == STARTED and record.at + RETENTION > ticks:
                raise Violation("the record of a lease expires before its retention ends")
            state = self.remove_record(state)
        for task, entry in zip(self.tasks, state.entries, strict=True):
            if entry is not None and entry.expires - ticks <= 0:
                state = self.remove_entry(state, task)
        us = ticks * TICK_US
        record, copy, history = state.record, state.late_copy, state.history
        return state._replace(
            record=record and record._replace(
                at=record.at - ticks, expires=record.expires - ticks, token=record.token - us,
                until=record.until - ticks,
            ),
            entries=tuple(
                each and each._replace(expires=each.expires - ticks, until=each.until - ticks)
                for each in state.entries
            ),
            deliveries=tuple(
                each and each._replace(token=each.token - us) for each in state.deliveries
            ),
            late_copy=copy and copy._replace(
                sender=copy.sender._replace(token=copy.sender.token - us)
            ),
            history=history._replace(token=history.token - us),
            displayed=state.displayed and (state.displayed[0] - us, state.displayed[1]),
        )  # fmt: skip

    # Operators and late requests

    def _forget(self, state: State) -> State:
        _, state = self.execute(state, "forget", state="", token="")
        return state

    def _forget_displayed(self, state: State) -> State:
        assert state.displayed is not None
        token, letter = state.displayed

        def check(history: History, before: Record | None, result: Result) -> History:
            if result.case == "ok":
                if history.outcome and letter not in (COMPLETED, FAILED):
                    raise Violation("an outcome is forgotten that was not displayed")
                if before is None or (before.token, _displayed_state(before)) != state.displayed:
                    raise Violation("a record is forgotten that was not displayed")
            return history

        _, after = self.execute(state, "forget", check, state=letter, token=token)
        return after._replace(displayed=None)

    def _execute_late_copy(self, copy: LateCopy) -> Effect:
        def effect(state: State) -> State:
            _, state = self.execute_for(state._replace(late_copy=None), copy.script, copy.sender)
            return state

        return effect

    # Invariants of every state

    def _check(self, state: State) -> None:
        trusting = sum(each is not None and each.trusts_lease for each in state.deliveries)
        if self.exclusive and trusting > 1:
            raise Violation("two executions trust their lease")
        for number, task in enumerate(self.tasks):
            stage = state.publishers[number]
            if state.answers[number] or stage in ("reserving", "reserved"):
                continue
            if stage.startswith("waits"):
                awaited = stage.rpartition(" ")[2].encode()
                if state.answers[self.tasks.index(awaited)] == NOT_SENT:
                    raise Violation(f"{task.decode()} waits for a message that was never sent")
            elif not any(message.task == task for message in state.messages):
                raise Violation(
                    f"the message of {task.decode()} is dropped, but its caller has no answer"
                )
