"""All that surrounds the scripts: a broker, workers that crash and freeze, lost replies, clocks.

Whatever two passes do in turn may interleave, and a crash or a freeze may come between. What is one
pass's own affair goes with the step before or after it: a pass that nothing befalls hears an answer
as soon as it is given, and settles when its work ends. A healthy pass is fast against the clock:
time passes when each either runs with a lease that it has extended, or is frozen.

All times count from the server's now, and only the order of old tokens is kept: so there are
finitely many states, and a search can see them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.labs.verification.canonical_state import canonical_state
from tests.labs.verification.deliveries import Passes
from tests.labs.verification.model import COMPLETED, FAILED, RELEASED, STARTED, Answer, Record
from tests.labs.verification.state import (
    ERROR,
    GRACE,
    HOLD,
    KILLED,
    LEASE,
    NONE,
    NOT_SENT,
    OUTCOME,
    RETENTION,
    TICK_US,
    Echo,
    Message,
    Move,
    Pass,
    State,
    Step,
    StepTaken,
    Truth,
    Violation,
    acknowledge,
    answer,
    changes,
    fresh,
    publish,
    publisher_at,
    put,
    replace_message,
    worker_of,
)


def _as_shown(record: Record) -> str:
    return {"D": COMPLETED, "G": FAILED}.get(record.state, record.state)


def _is_shown(state: State) -> State:
    assert state.record is not None
    return state._replace(shown=(state.record.token, _as_shown(state.record)))


class Runtime(Passes):
    """One setting, with all that may happen in it."""

    def start(self) -> State:
        """Every message is published, or to be published under a reservation."""
        messages = () if self.reserves else tuple(
            Message(-1, task, b"", queued=True) for task in self.tasks
        )  # fmt: skip
        publisher = "comes" if self.reserves else ""
        return State(
            record=None, messages=messages, deliveries=(None,) * self.workers, notices=(),
            echo=None,
            left=self.left, answers=("",) * len(self.tasks),
            publishers=(publisher,) * len(self.tasks), truth=Truth(token=NONE),
        )  # fmt: skip

    def is_goal(self, state: State) -> bool:
        """Every caller has an answer."""
        return all(
            answer or stage.startswith("waits")
            for answer, stage in zip(state.answers, state.publishers, strict=True)
        )

    # What may happen next

    def moves(self, state: State) -> Iterator[Move]:
        """Every step that is possible in `state`, each with where it leads.

        Raises:
            Violation: if one of them breaks an invariant; `args` are its text and the reason.
        """
        for text, fault, step in self._steps(state):
            try:
                after, met = canonical_state(step(state), self.steps_back)
                yield Move(text.replace("→", self.case), fault, self._checked(after), met)
            except Violation as violation:
                raise Violation(text.replace("→", self.case), *violation.args) from None

    def _steps(self, state: State) -> Iterator[Step]:
        for slot, one in enumerate(state.deliveries):
            if one is None:
                continue
            name = f"{one.execution_id.decode()} ({one.task.decode()})"
            if not one.frozen:
                yield from self.steps_of(state, slot, one, name)
                if self.allows(state, "freeze"):
                    yield f"{name} freezes", True, self.uses("freeze", changes(slot, frozen=True))
            elif one.heard is not None:
                yield f"{name} thaws, and hears {one.heard.case}", False, self._thaws(slot, one)
            else:
                yield f"{name} thaws", False, changes(slot, frozen=False)
            if one.doomed:
                yield f"{name} is killed, as announced", False, self._dies(slot, told=False)
            elif self.allows(state, "crash"):
                yield f"{name} is killed", True, self.uses("crash", self._dies(slot, told=False))
                if state.record is not None and state.record.state == STARTED:
                    yield (
                        f"{name} is killed, and its parent sees it", True,
                        self.uses("crash", self._dies(slot, told=True)),
                    )  # fmt: skip
            if one.phase == "run" and not one.doomed and self.allows(state, "time limit"):
                text = f"{name} is at its time limit: its lease is abandoned, its end is near"
                yield text, True, self.uses("time limit", self._time_limit(slot, one))
            if one.phase == "run" and not one.doomed and self.allows(state, "fatal time limit"):
                text = f"{name} is at its time limit: its message is acknowledged, its end is near"
                limited = self._time_limit(slot, one, fatal=True)
                yield text, True, self.uses("fatal time limit", limited)
        yield from self._broker(state)
        yield from self._publishers(state)
        for task, worker in state.notices:
            text = f"the parent abandons the lease of {worker.decode()} ({task.decode()})"
            yield text, False, self._abandons(task, worker)
        if state.echo is not None:
            sender = state.echo.who.execution_id.decode()
            text = f"the {state.echo.script} of {sender} arrives once more"
            yield text, False, self._echoes(state.echo)
        if self.allows(state, "forget") and state.record is not None:
            yield "an operator forgets the key", True, self.uses("forget", self._forgets)
        if state.shown:
            yield "the operator forgets what was shown", True, self._forgets_shown
        elif state.record and state.record.state != RELEASED and self.allows(state, "forget shown"):
            yield "an operator is shown the record", True, self.uses("forget shown", _is_shown)
        if self._may_tick(state):
            yield "the clock ticks", False, self._ticks
        if self.allows(state, "clock forward"):
            step = self.uses("clock forward", lambda state: self._clock_steps(state, LEASE))
            yield f"the server's clock leaps forward by {LEASE}", True, step
        if self.allows(state, "clock back"):
            step = self.uses("clock back", lambda state: self._clock_steps(state, -LEASE))
            yield f"the server's clock falls back by {LEASE}", True, step

    def _broker(self, state: State) -> Iterator[Step]:
        slot = next((slot for slot, one in enumerate(state.deliveries) if one is None), None)
        if slot is None:
            return
        for message in sorted(set(state.messages)):
            name = message.task.decode()
            execution_id = self.owner_of(state, message)
            number = message.number if message.number >= 0 else len(state.deliveries)
            one = Pass(number, message.task, message.unanswered_ids, execution_id, message.retries)
            taken = message._replace(number=number, queued=False)
            takes = partial(replace_message, old=message, new=taken)
            text = f"{name} is handed out to {execution_id.decode()}"
            if message.queued:
                yield from self.sends(state, slot, one, text, before=takes)
            elif self.allows(state, "handed out again"):
                text = f"{name} is handed out again, to {execution_id.decode()}"
                again = "handed out again"
                for told, _, step in self.sends(state, slot, one, text, again, before=takes):
                    yield told, True, step

    def owner_of(self, state: State, message: Message) -> bytes:
        """The id of an execution: drawn afresh for each pass."""
        return fresh(state)

    def _publishers(self, state: State) -> Iterator[Step]:
        for number, stage in enumerate(state.publishers):
            task = self.tasks[number].decode()
            if stage == "comes":
                yield f"the publisher of {task} reserves the key", False, self._reserves(number)
            elif stage == "reserved":
                yield f"the publisher of {task} sends it", False, self._publishes(number)
                if self.allows(state, "publish fails"):
                    fails = self.uses("publish fails", self._gives_back(number))
                    yield f"the publisher of {task} cannot send it", True, fails
                if self.allows(state, "publisher dies"):
                    dies = self.uses("publisher dies", self._not_sent(number))
                    yield f"the publisher of {task} is killed", True, dies

    # Who ends it

    def _dies(self, slot: int, told: bool) -> StepTaken:
        def step(state: State) -> State:
            one = state.deliveries[slot]
            assert one is not None
            for message in state.messages:
                if message.number == one.message:
                    state = replace_message(state, message, message._replace(queued=True))
            if told:
                notice = one.task, worker_of(one.execution_id)
                state = state._replace(notices=tuple(sorted({*state.notices, notice})))
            return put(state, slot, None)

        return step

    def _time_limit(self, slot: int, one: Pass, fatal: bool = False) -> StepTaken:
        def step(state: State) -> State:
            error = KILLED if fatal else b""
            state = self.abandoned(
                state, one.task, worker_of(one.execution_id), GRACE, one.retries, error
            )
            if fatal:
                state = answer(acknowledge(state, one.message), one.task, ERROR)
            return put(state, slot, one._replace(doomed=True))

        return step

    def _abandons(self, task: bytes, worker: bytes) -> StepTaken:
        def step(state: State) -> State:
            notices = tuple(notice for notice in state.notices if notice != (task, worker))
            return self.abandoned(state._replace(notices=notices), task, worker, 0)

        return step

    # Publishers

    def _reserves(self, number: int) -> StepTaken:
        task = self.tasks[number]

        def step(state: State) -> State:
            call = {"task_id": task, "fingerprint": b"", "hold_ms": HOLD}
            reply, state = self.calls(state, "reserve", **call)
            if reply.case == "finished":
                return answer(publisher_at(state, number, ""), task, OUTCOME)
            if reply.case == "held":
                # Its caller gets the result of the one who has the key.
                assert reply.told is not None
                waits = f"waits for {reply.told.task_id.decode()}"
                return publisher_at(state, number, waits)
            return publisher_at(state, number, "reserved")

        return step

    def _publishes(self, number: int) -> StepTaken:
        def step(state: State) -> State:
            return publish(publisher_at(state, number, ""), self.tasks[number], b"")

        return step

    def _gives_back(self, number: int) -> StepTaken:
        def step(state: State) -> State:
            task = self.tasks[number]
            _, state = self.calls(state, "reserve", task_id=task, fingerprint=b"", hold_ms=0)
            return self._not_sent(number)(state)

        return step

    def _not_sent(self, number: int) -> StepTaken:
        """Its caller knows that it is not sent: there was an error, or it is no more."""
        return lambda state: answer(publisher_at(state, number, ""), self.tasks[number], NOT_SENT)

    # Time

    def _may_tick(self, state: State) -> bool:
        for one in state.deliveries:
            if one is None or (one.frozen and not one.doomed):
                continue
            about_to_lapse = one.trust == 1 and one.beats
            if one.doomed or one.phase != "run" or about_to_lapse:
                return False
        return True

    def _ticks(self, state: State) -> State:
        deliveries = tuple(
            one and one._replace(trust=max(0, one.trust - 1)) for one in state.deliveries
        )
        return self._clock_steps(state._replace(deliveries=deliveries), 1)

    def _clock_steps(self, state: State, ticks: int) -> State:
        there = state.record
        if there is not None and there.expires - ticks <= 0:
            if there.state == STARTED and there.at + RETENTION > ticks:
                raise Violation("a lease's record is forgotten before its retention is over")
            state = self.vanishes(state)
        us = ticks * TICK_US
        record, echo, truth = state.record, state.echo, state.truth
        return state._replace(
            record=record and record._replace(
                at=record.at - ticks, expires=record.expires - ticks, token=record.token - us
            ),
            deliveries=tuple(
                one and one._replace(token=one.token - us) for one in state.deliveries
            ),
            echo=echo and echo._replace(who=echo.who._replace(token=echo.who.token - us)),
            truth=truth._replace(token=truth.token - us),
            shown=state.shown and (state.shown[0] - us, state.shown[1]),
        )  # fmt: skip

    def _forgets(self, state: State) -> State:
        _, state = self.calls(state, "forget", state="", token="")
        return state

    def _forgets_shown(self, state: State) -> State:
        assert state.shown is not None
        token, letter = state.shown

        def judge(truth: Truth, before: Record | None, answer: Answer) -> Truth:
            if answer.case == "ok":
                if truth.outcome and letter not in (COMPLETED, FAILED):
                    raise Violation("an outcome is forgotten that was not shown")
                if before is None or (before.token, _as_shown(before)) != state.shown:
                    raise Violation("a record is forgotten that was not shown")
            return truth

        _, after = self.calls(state, "forget", judge, state=letter, token=token)
        return after._replace(shown=None)

    def _echoes(self, echo: Echo) -> StepTaken:
        return lambda state: self.asks(state._replace(echo=None), echo.script, echo.who)[1]

    # What must hold at all times

    def _checked(self, state: State) -> State:
        trusting = sum(one is not None and one.trusting for one in state.deliveries)
        if self.exclusive and trusting > 1:
            raise Violation("two executions have reason to trust their lease")
        for number, task in enumerate(self.tasks):
            stage = state.publishers[number]
            if state.answers[number] or stage in ("comes", "reserved"):
                continue
            if stage.startswith("waits"):
                awaited = stage.rpartition(" ")[2].encode()
                if state.answers[self.tasks.index(awaited)] == NOT_SENT:
                    raise Violation(f"{task.decode()} waits for a message that was never sent")
            elif not any(message.task == task for message in state.messages):
                raise Violation(f"the message of {task.decode()} is dropped, and nobody answered")
        return state
