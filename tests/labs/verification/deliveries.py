"""A message's way through the gate, as gate/ walks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.labs.verification.model import RELEASED, RESERVED, STARTED
from tests.labs.verification.server import Server
from tests.labs.verification.state import (
    ALLOWANCES,
    ERROR,
    IGNORED,
    LEASE,
    OUTCOME,
    UNKEPT,
    Echo,
    Heard,
    Pass,
    State,
    Step,
    StepTaken,
    acknowledge,
    answer,
    changes,
    left,
    publish,
    put,
)


class Passes(Server):
    """What a pass does next, and what may come between."""

    def steps_of(self, state: State, slot: int, one: Pass, name: str) -> Iterator[Step]:
        if one.phase == "send":
            yield from self.sends(state, slot, one, f"{name} resends {one.script}")
        elif one.phase == "run":
            yield from self._run(state, slot, one, name)
        elif one.phase == "publish":
            yield f"{name} publishes its message again", False, self._publishes_again(slot)
        elif one.phase == "ack":
            yield f"{name} acknowledges its message", False, self._acknowledges(slot)

    def _run(self, state: State, slot: int, one: Pass, name: str) -> Iterator[Step]:
        if one.beats and one.trust < LEASE:
            yield f"{name} extends its lease: →", False, self._extends(slot, one, heard=True)
            if self.allows(state, "lost reply"):
                beats = self.uses("lost reply", self._extends(slot, one, heard=False))
                yield f"{name} extends its lease, the answer is lost: →", True, beats
        ends = one._replace(phase="send", script="complete", trust=0, beats=False)
        yield from self.sends(state, slot, ends, f"{name} completes")
        for what, script, told in (
            ("stored error", "fail", "fails"), ("error", "release", "ends with an error"),
            ("exit", "exit", "gives the key back"),
        ):  # fmt: skip
            if self.allows(state, what):
                step = f"{name} {told}"
                yield from self.sends(state, slot, ends._replace(script=script), step, what)
        if self.allows(state, "retry"):
            step = self.uses("retry", self._retries(slot, ends._replace(script="hold")))
            yield f"{name} publishes a retry", False, step
        if self.allows(state, "step"):
            yield f"{name} keeps a step: →", False, self.uses("step", self._step(slot, one))

    def sends(
        self, state: State, slot: int, one: Pass, told: str, choice: str = "",
        before: StepTaken = lambda state: state,
    ) -> Iterator[Step]:  # fmt: skip
        """`one` sends its script: it hears the answer, or the network or a fault sees to it."""

        def step(hears: Callable[[Pass], StepTaken], *uses: str) -> StepTaken:
            def sent(state: State) -> State:
                begin_replied, state = self._answers(before(state), one)
                return hears(begin_replied)(put(state, slot, begin_replied))

            for what in (*uses, choice):
                sent = self.uses(what, sent) if what else sent
            return sent

        yield f"{told}: →", False, step(lambda one: self._hears(slot, one))
        if self.allows(state, "echo") and state.echo is None:
            copy = Echo(one.script, one._replace(message=0, heard=None, doomed=False))
            keeps = step(lambda one: self._hears(slot, one), "echo")
            yield (
                f"{told}, and the network keeps a copy: →", True,
                lambda state: keeps(state._replace(echo=copy)),
            )  # fmt: skip
        if self.allows(state, "lost reply"):
            retries = step(lambda one: changes(slot, phase="send", heard=None), "lost reply")
            yield f"{told}, the answer is lost: →", True, retries
            if one.script == "begin":
                gives_up = step(lambda one: self._gives_up(slot, one), "lost reply")
                yield f"{told}, no answer comes, it gives up: →", True, gives_up
        if one.script == "begin" and self.allows(state, "freeze"):
            freezes = step(lambda one: changes(slot, phase="hear", frozen=True), "freeze")
            yield f"{told}, but freezes before it hears: →", True, freezes

    def allows(self, state: State, what: str) -> bool:
        return left(state, what) > 0

    def uses(self, what: str, step: StepTaken) -> StepTaken:
        index = ALLOWANCES.index(what)

        def used(state: State) -> State:
            left = list(state.left)
            left[index] -= 1
            return step(state._replace(left=tuple(left)))

        return used

    # A pass

    def _answers(self, state: State, one: Pass) -> tuple[Pass, State]:
        answer, state = self.asks(state, one.script, one)
        told = answer.told
        heard = Heard(answer.case)
        # Where only errors are left, there is nobody who could have won.
        if told is not None and (told.state != RELEASED or answer.case != "lost"):
            heard = Heard(answer.case, told.state, told.task_id, told.state in "DG")
        token = told.token if answer.case == "begun" and told is not None else one.token
        return one._replace(heard=heard, token=token), state

    def _thaws(self, slot: int, one: Pass) -> StepTaken:
        hears = self._hears(slot, one)
        return lambda state: hears(changes(slot, frozen=False)(state))

    def _hears(self, slot: int, one: Pass) -> StepTaken:
        heard = one.heard
        assert heard is not None
        finished = heard.state not in ("", RESERVED, STARTED, RELEASED)
        if one.script == "mark_continued":
            return changes(slot, phase="ack", heard=None)
        if heard.case == "begun":
            return changes(slot, phase="run", trust=self.trusts(one), beats=True, heard=None)
        if finished and heard.case in ("finished", "lost"):
            notes = self.continues and heard.task == one.task and not heard.continuation_sent
            return self._answered(slot, OUTCOME, notes)
        if heard.case == "held" and self.policy(one, heard) == "ignore":
            return self._answered(slot, IGNORED if heard.task != one.task else "")
        if one.script == "hold":
            return changes(slot, phase="ack", heard=None)  # its retry is on its way
        if heard.case == "held" or one.script == "stop":
            return self.comes_back(slot)
        if heard.case == "ok":
            kind = ERROR if one.script in ("release", "exit") else OUTCOME
            return self._answered(slot, kind, notes=self.continues and one.script != "exit")
        if heard.state == "":
            return self._answered(slot, ERROR if one.script in ("release", "exit") else UNKEPT)
        return self.comes_back(slot)

    def trusts(self, one: Pass) -> int:
        """Counted from before the request was sent."""
        return one.trust

    def policy(self, one: Pass, heard: Heard) -> str:
        """A copy of the very message that runs is always put back."""
        return "retry" if heard.task == one.task else self.on_conflict

    def comes_back(self, slot: int) -> StepTaken:
        """Publish first, then acknowledge."""
        return self._publishes_again(slot)

    def _answered(self, slot: int, kind: str, notes: bool = False) -> StepTaken:
        if notes:
            return changes(slot, phase="send", script="mark_continued", heard=None, answer=kind)
        return changes(slot, phase="ack", heard=None, answer=kind)

    def _gives_up(self, slot: int, one: Pass) -> StepTaken:
        comes_back = self.comes_back(slot)

        def step(state: State) -> State:
            if state.truth.last == one.execution_id:
                state = state._replace(truth=state.truth._replace(given_up=True))
            return comes_back(changes(slot, unanswered_ids=self.unanswered_ids(one))(state))

        return step

    def unanswered_ids(self, one: Pass) -> bytes:
        """What the message carries to its next pass."""
        return one.unanswered_ids + one.execution_id

    def _publishes_again(self, slot: int, then: str = "ack") -> StepTaken:
        def step(state: State) -> State:
            one = state.deliveries[slot]
            assert one is not None
            state = publish(state, one.task, one.unanswered_ids, one.retries)
            return put(state, slot, one._replace(phase=then, heard=None) if then else None)

        return step

    def _acknowledges(self, slot: int, then: str = "") -> StepTaken:
        def step(state: State) -> State:
            one = state.deliveries[slot]
            assert one is not None
            state = answer(acknowledge(state, one.message), one.task, one.answer)
            return put(state, slot, one._replace(phase=then, heard=None) if then else None)

        return step

    def _extends(self, slot: int, one: Pass, heard: bool) -> StepTaken:
        def step(state: State) -> State:
            answer, state = self.asks(state, "extend", one)
            if not heard:
                return state
            if answer.case == "ok":
                return put(state, slot, one._replace(trust=LEASE))
            return put(state, slot, one._replace(trust=0, beats=False))

        return step

    def _step(self, slot: int, one: Pass) -> StepTaken:
        def step(state: State) -> State:
            answer, state = self.asks(state, "save_step", one)
            if answer.case == "ok":
                return state
            stopped = one._replace(phase="send", script="stop", trust=0, beats=False)
            return put(state, slot, stopped)

        return step

    def _retries(self, slot: int, one: Pass) -> StepTaken:
        return lambda state: put(publish(state, one.task, b"", one.retries + 1), slot, one)
