"""What a worker does with a delivery, as the flow does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from labs.verification.model import COMPLETED, RESERVED, SENDING, STARTED, Result
from labs.verification.server import Server
from labs.verification.state import (
    ERROR,
    EVENTS,
    IGNORED,
    LEASE,
    NO_RESULT,
    NO_SUCCESS,
    NOT_STORED,
    OUTCOME,
    UNRECORDED,
    Action,
    Delivery,
    Effect,
    LateCopy,
    Reply,
    State,
    Violation,
    acknowledge,
    answer_caller,
    is_success,
    publish,
    put,
    remaining,
    result_of,
    update,
)


class Deliveries(Server):
    """The next actions of a delivery, and the faults that may happen to it."""

    def actions_of(
        self, state: State, slot: int, delivery: Delivery, name: str
    ) -> Iterator[Action]:
        if delivery.phase == "send":
            verb = "sends" if delivery.script == "write_result" else "resends"
            yield from self.send(state, slot, delivery, f"{name} {verb} {delivery.script}")
        elif delivery.phase == "run":
            yield from self._run(state, slot, delivery, name)
        elif delivery.phase == "continue":
            yield f"{name} sends what follows", False, self._continue(slot)
        elif delivery.phase == "publish":
            yield f"{name} publishes its message again", False, self._publish_again(slot)
        elif delivery.phase == "read":
            yield f"Celery reads the result of {name}: →", False, self._celery_reads(slot)
        elif delivery.phase == "write":
            yield f"Celery writes the result of {name}", False, self._celery_writes(slot)
        elif delivery.phase == "ack":
            yield f"{name} acknowledges its message", False, self._acknowledge(slot)

    def _run(self, state: State, slot: int, delivery: Delivery, name: str) -> Iterator[Action]:
        if delivery.has_heartbeat and delivery.lease_left < LEASE:
            yield f"{name} extends its lease: →", False, self._extend(slot, delivery)
            if self.allows(state, "lost reply"):
                extend = self.count("lost reply", self._extend(slot, delivery, reply_lost=True))
                yield f"{name} extends its lease, the reply is lost: →", True, extend
        script = "fused_complete" if self.fused else "complete"
        ended = delivery._replace(phase="send", script=script, lease_left=0, has_heartbeat=False)
        yield from self.send(state, slot, ended, f"{name} completes")
        for event, script, verb in (
            ("stored error", "fail", "fails"), ("error", "release", "ends with an error"),
            ("exit", "exit", "releases the key"),
        ):  # fmt: skip
            if self.allows(state, event):
                sender = ended._replace(script=script)
                yield from self.send(state, slot, sender, f"{name} {verb}", event)
        if self.allows(state, "retry"):
            retry = self.count("retry", self._retry(slot, ended._replace(script="hold")))
            yield f"{name} publishes a retry", False, retry
        if self.allows(state, "step"):
            save_step = self.count("step", self._save_step(slot, delivery))
            yield f"{name} saves a step: →", False, save_step

    def send(
        self, state: State, slot: int, delivery: Delivery, text: str, event: str = "",
        before: Effect = lambda state: state,
    ) -> Iterator[Action]:  # fmt: skip
        """Yields what may happen when the delivery sends its script: a reply, or a fault."""

        def action(then: Callable[[Delivery], Effect], *events: str) -> Effect:
            def sent(state: State) -> State:
                replied, state = self._execute(before(state), delivery)
                return then(replied)(put(state, slot, replied))

            for counted in (*events, event):
                sent = self.count(counted, sent) if counted else sent
            return sent

        yield f"{text}: →", False, action(lambda replied: self._on_reply(slot, replied))
        if self.allows(state, "late copy") and state.late_copy is None:
            copy = LateCopy(delivery.script, delivery._replace(message=0, reply=None, dying=False))
            copied = action(lambda replied: self._on_reply(slot, replied), "late copy")
            yield (
                f"{text}, and the network keeps a copy: →", True,
                lambda state: copied(state._replace(late_copy=copy)),
            )  # fmt: skip
        if self.allows(state, "lost reply"):
            resend = action(lambda _: update(slot, phase="send", reply=None), "lost reply")
            yield f"{text}, the reply is lost: →", True, resend
            if delivery.script == "begin":
                give_up = action(lambda replied: self._give_up(slot, replied), "lost reply")
                yield f"{text}, the reply is lost, it gives up: →", True, give_up
        if delivery.script == "begin" and self.allows(state, "freeze"):
            freeze = action(lambda _: update(slot, phase="await", frozen=True), "freeze")
            yield f"{text}, but freezes before the reply: →", True, freeze

    def allows(self, state: State, event: str) -> bool:
        return remaining(state, event) > 0

    def count(self, event: str, effect: Effect) -> Effect:
        """Returns the effect that also counts the event as happened."""
        index = EVENTS.index(event)

        def counted(state: State) -> State:
            remaining = list(state.remaining)
            remaining[index] -= 1
            return effect(state._replace(remaining=tuple(remaining)))

        return counted

    # One delivery

    def _execute(self, state: State, delivery: Delivery) -> tuple[Delivery, State]:
        result, state = self.execute_for(state, delivery.script, delivery)
        record = result.replied
        reply = Reply(result.case)
        # What remains of a killed execution has no winner whose outcome could count.
        if record is not None and not (record.is_remnant and result.case == "lost"):
            reply = Reply(result.case, record.state, record.task_id)
        began = result.case == "begun" and record is not None
        token = record.token if began else delivery.token
        delivery = delivery._replace(reply=reply, token=token)
        if self.fused and delivery.script != "write_result":
            delivery = delivery._replace(result=self.result_after(delivery, result))
        return delivery, state

    def result_after(self, delivery: Delivery, result: Result) -> bytes:
        """Returns the result that the reply gives the task, unless its message is put back."""
        record = result.replied
        if record is not None and record.finished:
            is_result = record.state in (COMPLETED, SENDING[COMPLETED])
            return record.body if is_result else NO_SUCCESS
        if delivery.script in ("fail", "release"):
            return NO_SUCCESS
        if delivery.script != "fused_complete":
            return NO_RESULT
        return UNRECORDED if result.case == "lost" else delivery.execution_id

    def _resume(self, slot: int, delivery: Delivery) -> Effect:
        on_reply = self._on_reply(slot, delivery)
        return lambda state: on_reply(update(slot, frozen=False)(state))

    def _on_reply(self, slot: int, delivery: Delivery) -> Effect:
        script, reply = delivery.script, delivery.reply
        assert reply is not None
        finished = reply.state not in ("", RESERVED, STARTED)
        if script == "mark":
            return update(slot, phase="ack", reply=None)
        if reply.case == "begun":
            lease_left = self.lease_left_at_begin(delivery)
            return update(slot, phase="run", lease_left=lease_left, has_heartbeat=True, reply=None)
        if reply.case == "lost" and self.continues:
            return self.requeue(slot)  # the next begin decides what it has to send
        if finished and reply.case in ("finished", "sent", "lost"):
            is_own = reply.task == self.id_of(delivery.task)
            continues = self.continues and reply.case == "finished"
            if reply.case == "finished" and not is_own and is_success(delivery.result):
                return update(slot, phase="send", script="write_result", reply=None, answer=OUTCOME)
            return self._answer(slot, delivery, OUTCOME, continues)
        if reply.case == "held" and self.conflict_policy(delivery, reply) == "ignore":
            return self._answer(
                slot, delivery, IGNORED if reply.task != self.id_of(delivery.task) else ""
            )
        if script == "hold":
            return update(slot, phase="ack", reply=None)  # its retry has been published
        if reply.case == "held" or script == "stop":
            return self.requeue(slot)
        if reply.case == "written":
            return self._on_result(slot, OUTCOME)
        is_error = script in ("release", "exit")
        if reply.case == "ok":
            continues = self.continues and script != "exit"
            return self._answer(slot, delivery, ERROR if is_error else OUTCOME, continues)
        if reply.state == "":
            return self._answer(slot, delivery, ERROR if is_error else NOT_STORED)
        return self.requeue(slot)

    def lease_left_at_begin(self, delivery: Delivery) -> int:
        """Counted from before the request was sent."""
        return delivery.lease_left

    def conflict_policy(self, delivery: Delivery, reply: Reply) -> str:
        """A copy of the message that is running is always put back."""
        return "retry" if reply.task == self.id_of(delivery.task) else self.on_conflict

    def requeue(self, slot: int) -> Effect:
        """Publishes first, then acknowledges."""
        return self._publish_again(slot)

    def _answer(
        self, slot: int, delivery: Delivery, answer: str, continues: bool = False
    ) -> Effect:
        """Acknowledges next, or has Celery write the result first."""
        if continues:
            return update(slot, phase="continue", reply=None, answer=answer)
        phase = "ack" if delivery.result == NO_RESULT else "read"
        return update(slot, phase=phase, reply=None, answer=answer)

    def _continue(self, slot: int) -> Effect:
        def effect(state: State) -> State:
            delivery = state.deliveries[slot]
            assert delivery is not None
            state = self.note_sent(state, delivery.task)
            return update(slot, phase="send", script="mark")(state)

        return effect

    def _on_result(self, slot: int, answer: str) -> Effect:
        """Acknowledges next; a SUCCESS that the result backend does not have stays awaited."""

        def effect(state: State) -> State:
            delivery = state.deliveries[slot]
            assert delivery is not None
            is_there = is_success(result_of(state, delivery.task))
            result = NO_RESULT if is_there else delivery.result
            return update(slot, phase="ack", reply=None, answer=answer, result=result)(state)

        return effect

    def _celery_reads(self, slot: int) -> Effect:
        """Celery writes only if it reads no SUCCESS."""

        def effect(state: State) -> State:
            delivery = state.deliveries[slot]
            assert delivery is not None
            if is_success(result_of(state, delivery.task)):
                self.case = "SUCCESS"
                return self._on_result(slot, delivery.answer)(state)
            self.case = "no SUCCESS"
            return put(state, slot, delivery._replace(phase="write"))

        return effect

    def _celery_writes(self, slot: int) -> Effect:
        def effect(state: State) -> State:
            delivery = state.deliveries[slot]
            assert delivery is not None
            before = result_of(state, delivery.task)
            if self.keeps_success and is_success(before) and before != delivery.result:
                raise Violation("Celery replaces a SUCCESS")
            state = self.store_result(state, delivery.task, delivery.result)
            return self._on_result(slot, delivery.answer)(state)

        return effect

    def _give_up(self, slot: int, delivery: Delivery) -> Effect:
        requeue = self.requeue(slot)

        def effect(state: State) -> State:
            if state.history.last == delivery.execution_id:
                state = state._replace(history=state.history._replace(given_up=True))
            return requeue(update(slot, unanswered_ids=self.unanswered_ids(delivery))(state))

        return effect

    def unanswered_ids(self, delivery: Delivery) -> bytes:
        """The execution ids that the message carries to its next delivery."""
        return delivery.unanswered_ids + delivery.execution_id

    def _publish_again(self, slot: int, then: str = "ack") -> Effect:
        def effect(state: State) -> State:
            delivery = state.deliveries[slot]
            assert delivery is not None
            state = publish(state, delivery.task, delivery.unanswered_ids, delivery.retries)
            published = delivery._replace(phase=then, reply=None, result=NO_RESULT)
            return put(state, slot, published if then else None)

        return effect

    def _acknowledge(self, slot: int, then: str = "") -> Effect:
        def effect(state: State) -> State:
            delivery = state.deliveries[slot]
            assert delivery is not None
            if is_success(delivery.result):
                raise Violation("the result backend has never had the result")
            if delivery.answer in (OUTCOME, ERROR) and delivery.script != "exit":
                self.check_sent(state, delivery.task)
            state = acknowledge(state, delivery.message)
            state = answer_caller(state, delivery.task, delivery.answer)
            return put(state, slot, delivery._replace(phase=then, reply=None) if then else None)

        return effect

    def _extend(self, slot: int, delivery: Delivery, reply_lost: bool = False) -> Effect:
        def effect(state: State) -> State:
            result, state = self.execute_for(state, "extend", delivery)
            if reply_lost:
                return state
            if result.case == "ok":
                return put(state, slot, delivery._replace(lease_left=LEASE))
            return put(state, slot, delivery._replace(lease_left=0, has_heartbeat=False))

        return effect

    def _save_step(self, slot: int, delivery: Delivery) -> Effect:
        def effect(state: State) -> State:
            result, state = self.execute_for(state, "save_step", delivery)
            if result.case == "ok":
                return state
            stopped = delivery._replace(
                phase="send", script="stop", lease_left=0, has_heartbeat=False
            )
            return put(state, slot, stopped)

        return effect

    def _retry(self, slot: int, delivery: Delivery) -> Effect:
        return lambda state: put(
            publish(state, delivery.task, b"", delivery.retries + 1), slot, delivery
        )
