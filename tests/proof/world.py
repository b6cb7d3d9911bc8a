"""All that surrounds the scripts: a broker, workers that crash and freeze, lost replies, clocks.

Whatever two passes do in turn may interleave, and a crash or a freeze may come between. What is one
pass's own affair goes with the step before or after it: a pass that nothing befalls hears an answer
as soon as it is given, and settles when its work ends. A healthy pass is fast against the clock:
time passes when each either runs with a lease that it has extended, or is frozen.

All times count from the server's now, and only the order of old tokens is kept: so there are
finitely many states, and a search can see them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from tests.proof.model import RESERVED, STARTED, Answer, Clock, Protocol, Record

# Ticks of the clock.
LEASE, HOLD, GRACE, RETENTION = 2, 2, 1, 3
#: Microseconds in a tick, so to speak: more than the tokens that can be drawn in one.
TICK_US = 1000

POISONED = b"poisoned"

# How a message's caller has been answered.
OUTCOME, ERROR, UNKEPT, IGNORED, NOT_SENT = "outcome", "error", "unkept", "ignored", "not sent"


class Violation(Exception):
    """The invariant that does not hold."""


class Message(NamedTuple):
    """At the broker, until it is acknowledged."""

    #: The tag of its delivery; -1 while it has none.
    number: int
    task: bytes
    #: Owners of passes that had no answer.
    prior: bytes
    #: Else a worker has it.
    queued: bool


class Heard(NamedTuple):
    """What an answer told."""

    case: str
    #: Of the record in the answer, if one was.
    state: str = ""
    task: bytes = b""
    continued: bool = False


class Pass(NamedTuple):
    """One message on its way through the gate."""

    message: int
    task: bytes
    prior: bytes
    owner: bytes
    #: "run"; "send" a script again; "hear" an answer late; "publish" again; "ack" the message.
    phase: str = "send"
    script: str = "begin"
    heard: Heard | None = None
    token: int = 0
    #: Ticks, by its own clock, for which it trusts its lease.
    trust: int = LEASE
    #: While it runs: the heartbeat extends its lease.
    beats: bool = False
    frozen: bool = False
    #: Its parent has ended the lease, and kills it within the grace.
    doomed: bool = False
    #: What its caller is answered when it acknowledges.
    answer: str = ""

    @property
    def trusting(self) -> bool:
        """It works, and believes that nobody else does."""
        return self.phase == "run" and self.trust > 0


class Echo(NamedTuple):
    """A request that reaches the server once more, late and unheard."""

    script: str
    who: Pass


class Truth(NamedTuple):
    """What really happened; no script sees it."""

    #: The first accepted outcome, until retention ends or an operator forgets it.
    outcome: bytes = b""
    #: Owner of the last begin that still has the right to complete.
    holder: bytes = b""
    #: Owner of the last begin that has not ended; its lease may have been abandoned.
    last: bytes = b""
    #: It had no answer, and its message has come back with its id.
    given_up: bool = False
    #: Executions in a row that began and never ended, the last one left out ...
    died: int = 0
    #: ... and with those that nobody ran, because the answer to their begin was lost.
    begun: int = 0
    #: The highest token that a begin gave.
    token: int = 0
    #: Finished steps.
    steps: bytes = b""


class State(NamedTuple):
    record: Record | None
    messages: tuple[Message, ...]
    passes: tuple[Pass | None, ...]
    #: Parents who have seen a child die, each with the task and the worker.
    notices: tuple[tuple[bytes, bytes], ...]
    echo: Echo | None
    #: Faults, retries and the like that are left.
    left: tuple[int, ...]
    #: By task: how its caller was answered, "" while it is not.
    answers: tuple[str, ...]
    #: By task: where its publisher stands.
    publishers: tuple[str, ...]
    truth: Truth


#: A step, told and taken: its text, whether it is a fault, where it leads. A text that ends in →
#: goes on with the case of the answer.
StepTaken = Callable[[State], State]
Step = tuple[str, bool, StepTaken]


class Move(NamedTuple):
    text: str
    fault: bool
    state: State


#: What a world may allow, each a number of times.
ALLOWANCES = (
    "crash", "freeze", "lost reply", "echo", "handed out again", "clock back", "clock forward",
    "forget", "time limit", "retry", "error", "stored error", "step", "publish fails",
    "publisher dies",
)  # fmt: skip
#: Lower than any token.
_NONE = -(10**9)
_CLOCK_BACK = ALLOWANCES.index("clock back")
#: Names of executions.
_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class World:
    """One setting: so many tasks of the same key, workers, and faults.

    Args:
        protocol: the scripts.
        tasks: how many messages with ids of their own.
        workers: how many passes at a time.
        reserves: whether publishers reserve the key first.
        on_conflict: "retry" or "ignore", as the setting.
        continues: whether something follows each task, so that its dispatch is noted.
        max_attempts: as the setting.
        exclusive: whether to judge that at most one trusts its lease; None where that can hold.
        remembers: whether tokens must grow past a record that is gone; None where they can.
        allowed: how often each of `ALLOWANCES`.
    """

    def __init__(
        self,
        protocol: Protocol | None = None,
        *,
        tasks: int = 2,
        workers: int = 2,
        reserves: bool = False,
        on_conflict: str = "retry",
        continues: bool = False,
        max_attempts: int = 3,
        exclusive: bool | None = None,
        remembers: bool | None = None,
        allowed: Mapping[str, int],
    ) -> None:
        unknown = set(allowed) - set(ALLOWANCES)
        assert not unknown, unknown
        self.protocol = protocol or Protocol()
        self.tasks = tuple(b"T%d" % (number + 1) for number in range(tasks))
        self.workers = workers
        self.reserves = reserves
        self.on_conflict = on_conflict
        self.continues = continues
        self.max_attempts = max_attempts
        self.left = tuple(allowed.get(name, 0) for name in ALLOWANCES)
        # An operator who forgets a running execution, and a clock that leaps, let a second one in.
        leaps = allowed.get("forget") or allowed.get("clock forward")
        self.exclusive = not leaps if exclusive is None else exclusive
        # One message that nothing copies: whoever takes over from a pass without an answer knows
        # that it had none.
        copies = ("handed out again", "echo", "crash", "time limit")
        self.alone = tasks == 1 and not any(map(allowed.get, copies))
        #: Of the last answer.
        self._case = ""
        # Without a record its token is not remembered, and the clock alone makes the next one: it
        # is higher unless the clock has fallen back meanwhile.
        self.steps_back = bool(allowed.get("clock back"))
        self.remembers = not self.steps_back if remembers is None else remembers

    def start(self) -> State:
        """Every message is published, or to be published under a reservation."""
        messages = () if self.reserves else tuple(
            Message(-1, task, b"", queued=True) for task in self.tasks
        )  # fmt: skip
        publisher = "comes" if self.reserves else ""
        return State(
            record=None, messages=messages, passes=(None,) * self.workers, notices=(), echo=None,
            left=self.left, answers=("",) * len(self.tasks),
            publishers=(publisher,) * len(self.tasks), truth=Truth(token=_NONE),
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
                after = self._checked(_normal(step(state), self.steps_back))
                yield Move(text.replace("→", self._case), fault, after)
            except Violation as violation:
                raise Violation(text.replace("→", self._case), *violation.args) from None

    def _steps(self, state: State) -> Iterator[Step]:
        for slot, one in enumerate(state.passes):
            if one is None:
                continue
            name = f"{one.owner.decode()} ({one.task.decode()})"
            if not one.frozen:
                yield from self._pass(state, slot, one, name)
                if self._allows(state, "freeze"):
                    yield f"{name} freezes", True, self._uses("freeze", _with(slot, frozen=True))
            elif one.heard is not None:
                yield f"{name} thaws, and hears {one.heard.case}", False, self._thaws(slot, one)
            else:
                yield f"{name} thaws", False, _with(slot, frozen=False)
            if one.doomed:
                yield f"{name} is killed, as announced", False, self._dies(slot, told=False)
            elif self._allows(state, "crash"):
                yield f"{name} is killed", True, self._uses("crash", self._dies(slot, told=False))
                if state.record is not None and state.record.state == STARTED:
                    yield (
                        f"{name} is killed, and its parent sees it", True,
                        self._uses("crash", self._dies(slot, told=True)),
                    )  # fmt: skip
            if one.phase == "run" and not one.doomed and self._allows(state, "time limit"):
                yield (
                    f"{name} is at its time limit: the parent abandons its lease and is about to "
                    "kill it", True, self._uses("time limit", self._time_limit(slot, one)),
                )  # fmt: skip
        yield from self._broker(state)
        yield from self._publishers(state)
        for task, worker in state.notices:
            text = f"the parent abandons the lease of {worker.decode()} ({task.decode()})"
            yield text, False, self._abandons(task, worker)
        if state.echo is not None:
            text = f"the {state.echo.script} of {state.echo.who.owner.decode()} arrives once more"
            yield text, False, self._echoes(state.echo)
        if self._allows(state, "forget") and state.record is not None:
            yield "an operator forgets the key", True, self._uses("forget", self._forgets)
        if self._may_tick(state):
            yield "the clock ticks", False, self._ticks
        if self._allows(state, "clock forward"):
            step = self._uses("clock forward", lambda state: self._clock_steps(state, LEASE))
            yield f"the server's clock leaps forward by {LEASE}", True, step
        if self._allows(state, "clock back"):
            step = self._uses("clock back", lambda state: self._clock_steps(state, -LEASE))
            yield f"the server's clock falls back by {LEASE}", True, step

    def _pass(self, state: State, slot: int, one: Pass, name: str) -> Iterator[Step]:
        if one.phase == "send":
            yield from self._sends(state, slot, one, f"{name} resends {one.script}")
        elif one.phase == "run":
            yield from self._run(state, slot, one, name)
        elif one.phase == "publish":
            yield f"{name} publishes its message again", False, self._publishes_again(slot)
        elif one.phase == "ack":
            yield f"{name} acknowledges its message", False, self._acknowledges(slot)

    def _run(self, state: State, slot: int, one: Pass, name: str) -> Iterator[Step]:
        if one.beats and one.trust < LEASE:
            yield f"{name} extends its lease: →", False, self._extends(slot, one, heard=True)
            if self._allows(state, "lost reply"):
                beats = self._uses("lost reply", self._extends(slot, one, heard=False))
                yield f"{name} extends its lease, the answer is lost: →", True, beats
        ends = one._replace(phase="send", script="complete", trust=0, beats=False)
        yield from self._sends(state, slot, ends, f"{name} completes")
        for what, script, told in (
            ("stored error", "fail", "fails"), ("error", "release", "ends with an error"),
        ):  # fmt: skip
            if self._allows(state, what):
                step = f"{name} {told}"
                yield from self._sends(state, slot, ends._replace(script=script), step, what)
        if self._allows(state, "retry"):
            step = self._uses("retry", self._retries(slot, ends._replace(script="hold")))
            yield f"{name} publishes a retry", False, step
        if self._allows(state, "step"):
            yield f"{name} keeps a step: →", False, self._uses("step", self._step(slot, one))

    def _sends(
        self, state: State, slot: int, one: Pass, told: str, choice: str = "",
        before: StepTaken = lambda state: state,
    ) -> Iterator[Step]:  # fmt: skip
        """`one` sends its script: it hears the answer, or the network or a fault sees to it."""

        def step(hears: Callable[[Pass], StepTaken], *uses: str) -> StepTaken:
            def sent(state: State) -> State:
                answered, state = self._answers(before(state), one)
                return hears(answered)(_set(state, slot, answered))

            for what in (*uses, choice):
                sent = self._uses(what, sent) if what else sent
            return sent

        yield f"{told}: →", False, step(lambda one: self._hears(slot, one))
        if self._allows(state, "echo") and state.echo is None:
            copy = Echo(one.script, one._replace(message=0, heard=None, doomed=False))
            keeps = step(lambda one: self._hears(slot, one), "echo")
            yield (
                f"{told}, and the network keeps a copy: →", True,
                lambda state: keeps(state._replace(echo=copy)),
            )  # fmt: skip
        if self._allows(state, "lost reply"):
            resends = step(lambda one: _with(slot, phase="send", heard=None), "lost reply")
            yield f"{told}, the answer is lost: →", True, resends
            if one.script == "begin":
                gives_up = step(lambda one: self._gives_up(slot, one), "lost reply")
                yield f"{told}, no answer comes, it gives up: →", True, gives_up
        if one.script == "begin" and self._allows(state, "freeze"):
            freezes = step(lambda one: _with(slot, phase="hear", frozen=True), "freeze")
            yield f"{told}, but freezes before it hears: →", True, freezes

    def _broker(self, state: State) -> Iterator[Step]:
        slot = next((slot for slot, one in enumerate(state.passes) if one is None), None)
        if slot is None:
            return
        for message in sorted(set(state.messages)):
            name = message.task.decode()
            owner = self.owner_of(state, message)
            number = message.number if message.number >= 0 else len(state.passes)
            one = Pass(number, message.task, message.prior, owner)
            taken = message._replace(number=number, queued=False)
            takes = partial(_replace_message, old=message, new=taken)
            text = f"{name} is handed out to {owner.decode()}"
            if message.queued:
                yield from self._sends(state, slot, one, text, before=takes)
            elif self._allows(state, "handed out again"):
                text = f"{name} is handed out again, to {owner.decode()}"
                again = "handed out again"
                for told, _, step in self._sends(state, slot, one, text, again, before=takes):
                    yield told, True, step

    def owner_of(self, state: State, message: Message) -> bytes:
        """The id of an execution: drawn afresh for each pass."""
        return _fresh(state)

    def _publishers(self, state: State) -> Iterator[Step]:
        for number, stage in enumerate(state.publishers):
            task = self.tasks[number].decode()
            if stage == "comes":
                yield f"the publisher of {task} reserves the key", False, self._reserves(number)
            elif stage == "reserved":
                yield f"the publisher of {task} sends it", False, self._publishes(number)
                if self._allows(state, "publish fails"):
                    fails = self._uses("publish fails", self._gives_back(number))
                    yield f"the publisher of {task} cannot send it", True, fails
                if self._allows(state, "publisher dies"):
                    dies = self._uses("publisher dies", self._not_sent(number))
                    yield f"the publisher of {task} is killed", True, dies

    def _allows(self, state: State, what: str) -> bool:
        return state.left[ALLOWANCES.index(what)] > 0

    def _uses(self, what: str, step: StepTaken) -> StepTaken:
        index = ALLOWANCES.index(what)

        def used(state: State) -> State:
            left = list(state.left)
            left[index] -= 1
            return step(state._replace(left=tuple(left)))

        return used

    # A pass

    def _answers(self, state: State, one: Pass) -> tuple[Pass, State]:
        answer, state = self._asks(state, one.script, one)
        told = answer.told
        heard = Heard(answer.case)
        if told is not None:
            heard = Heard(answer.case, told.state, told.task_id, told.state in "DG")
        token = told.token if answer.case == "begun" and told is not None else one.token
        return one._replace(heard=heard, token=token), state

    def _thaws(self, slot: int, one: Pass) -> StepTaken:
        hears = self._hears(slot, one)
        return lambda state: hears(_with(slot, frozen=False)(state))

    def _hears(self, slot: int, one: Pass) -> StepTaken:
        heard = one.heard
        assert heard is not None
        finished = heard.state not in ("", RESERVED, STARTED)
        if one.script == "dispatched":
            return _with(slot, phase="ack", heard=None)
        if heard.case == "begun":
            return _with(slot, phase="run", trust=self.trusts(one), beats=True, heard=None)
        if finished and heard.case in ("finished", "lost"):
            notes = self.continues and heard.task == one.task and not heard.continued
            return self._answered(slot, OUTCOME, notes)
        if heard.case == "held" and self.policy(one, heard) == "ignore":
            return self._answered(slot, IGNORED if heard.task != one.task else "")
        if one.script == "hold":
            return _with(slot, phase="ack", heard=None)  # its retry is on its way
        if heard.case == "held" or one.script == "stop":
            return self.comes_back(slot)
        if heard.case == "ok":
            kind = ERROR if one.script == "release" else OUTCOME
            return self._answered(slot, kind, notes=self.continues and kind == OUTCOME)
        if heard.state == "":
            return self._answered(slot, ERROR if one.script == "release" else UNKEPT)
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
            return _with(slot, phase="send", script="dispatched", heard=None, answer=kind)
        return _with(slot, phase="ack", heard=None, answer=kind)

    def _gives_up(self, slot: int, one: Pass) -> StepTaken:
        comes_back = self.comes_back(slot)

        def step(state: State) -> State:
            if state.truth.last == one.owner:
                state = state._replace(truth=state.truth._replace(given_up=True))
            return comes_back(_with(slot, prior=self.prior(one))(state))

        return step

    def prior(self, one: Pass) -> bytes:
        """What the message carries to its next pass."""
        return one.prior + one.owner

    def _publishes_again(self, slot: int, then: str = "ack") -> StepTaken:
        def step(state: State) -> State:
            one = state.passes[slot]
            assert one is not None
            state = _publish(state, one.task, one.prior)
            return _set(state, slot, one._replace(phase=then, heard=None) if then else None)

        return step

    def _acknowledges(self, slot: int, then: str = "") -> StepTaken:
        def step(state: State) -> State:
            one = state.passes[slot]
            assert one is not None
            # Copies of one delivery bear one tag: the broker forgets it for all of them.
            messages = tuple(
                message for message in state.messages
                if message.queued or message.number != one.message
            )  # fmt: skip
            state = _answer(state._replace(messages=messages), one.task, one.answer)
            return _set(state, slot, one._replace(phase=then, heard=None) if then else None)

        return step

    def _extends(self, slot: int, one: Pass, heard: bool) -> StepTaken:
        def step(state: State) -> State:
            answer, state = self._asks(state, "extend", one)
            if not heard:
                return state
            if answer.case == "ok":
                return _set(state, slot, one._replace(trust=LEASE))
            return _set(state, slot, one._replace(trust=0, beats=False))

        return step

    def _step(self, slot: int, one: Pass) -> StepTaken:
        def step(state: State) -> State:
            answer, state = self._asks(state, "step", one)
            if answer.case == "ok":
                return state
            stopped = one._replace(phase="send", script="stop", trust=0, beats=False)
            return _set(state, slot, stopped)

        return step

    def _retries(self, slot: int, one: Pass) -> StepTaken:
        return lambda state: _set(_publish(state, one.task, b""), slot, one)

    # Who ends it

    def _dies(self, slot: int, told: bool) -> StepTaken:
        def step(state: State) -> State:
            one = state.passes[slot]
            assert one is not None
            for message in state.messages:
                if message.number == one.message:
                    state = _replace_message(state, message, message._replace(queued=True))
            if told:
                notice = one.task, _worker(one.owner)
                state = state._replace(notices=tuple(sorted({*state.notices, notice})))
            return _set(state, slot, None)

        return step

    def _time_limit(self, slot: int, one: Pass) -> StepTaken:
        def step(state: State) -> State:
            state = self._abandoned(state, one.task, _worker(one.owner), GRACE)
            return _set(state, slot, one._replace(doomed=True))

        return step

    def _abandons(self, task: bytes, worker: bytes) -> StepTaken:
        def step(state: State) -> State:
            notices = tuple(notice for notice in state.notices if notice != (task, worker))
            return self._abandoned(state._replace(notices=notices), task, worker, 0)

        return step

    # Publishers

    def _reserves(self, number: int) -> StepTaken:
        task = self.tasks[number]

        def step(state: State) -> State:
            answer, state = self._calls(state, "reserve", task_id=task, fingerprint=b"", hold_ms=HOLD)
            stage = {"reserved": "reserved", "expired": "reserved", "held": "waits"}
            stages = list(state.publishers)
            stages[number] = stage.get(answer.case, "")
            if answer.case == "held":
                # Its caller gets the result of the one who has the key.
                assert answer.told is not None
                stages[number] = f"waits for {answer.told.task_id.decode()}"
            state = state._replace(publishers=tuple(stages))
            return _answer(state, task, OUTCOME) if answer.case == "finished" else state

        return step

    def _publishes(self, number: int) -> StepTaken:
        def step(state: State) -> State:
            return _publish(_stage(state, number, ""), self.tasks[number], b"")

        return step

    def _gives_back(self, number: int) -> StepTaken:
        def step(state: State) -> State:
            task = self.tasks[number]
            _, state = self._calls(state, "reserve", task_id=task, fingerprint=b"", hold_ms=0)
            return self._not_sent(number)(state)

        return step

    def _not_sent(self, number: int) -> StepTaken:
        """Its caller knows that it is not sent: there was an error, or it is no more."""
        return lambda state: _answer(_stage(state, number, ""), self.tasks[number], NOT_SENT)

    # Time

    def _may_tick(self, state: State) -> bool:
        for one in state.passes:
            if one is None or (one.frozen and not one.doomed):
                continue
            about_to_lapse = one.trust == 1 and one.beats
            if one.doomed or one.phase != "run" or about_to_lapse:
                return False
        return True

    def _ticks(self, state: State) -> State:
        passes = tuple(one and one._replace(trust=max(0, one.trust - 1)) for one in state.passes)
        return self._clock_steps(state._replace(passes=passes), 1)

    def _clock_steps(self, state: State, ticks: int) -> State:
        there = state.record
        if there is not None and there.expires - ticks <= 0:
            if there.state == STARTED and there.at + RETENTION > ticks:
                raise Violation("a lease's record is forgotten before its retention is over")
            state = self._vanishes(state)
        us = ticks * TICK_US
        record, echo, truth = state.record, state.echo, state.truth
        return state._replace(
            record=record and record._replace(
                at=record.at - ticks, expires=record.expires - ticks, token=record.token - us
            ),
            passes=tuple(one and one._replace(token=one.token - us) for one in state.passes),
            echo=echo and echo._replace(who=echo.who._replace(token=echo.who.token - us)),
            truth=truth._replace(token=truth.token - us),
        )  # fmt: skip

    def _vanishes(self, state: State) -> State:
        token = state.truth.token if self.remembers else _NONE
        return state._replace(record=None, truth=Truth(token=token))

    def _forgets(self, state: State) -> State:
        _, state = self._calls(state, "forget", token="")
        return state

    # The server

    def _echoes(self, echo: Echo) -> StepTaken:
        return lambda state: self._asks(state._replace(echo=None), echo.script, echo.who)[1]

    def _asks(self, state: State, script: str, one: Pass) -> tuple[Answer, State]:
        """A script, as the pass `one` calls it."""
        token = {"token": one.token}
        keeps = {"retention_ms": RETENTION}
        lease = {"lease_ms": LEASE, **keeps}
        arguments: dict[str, dict[str, Any]] = {
            "begin": {
                "owner": one.owner, "prior": one.prior, "task_id": one.task, "fingerprint": b"",
                "worker": _worker(one.owner), **lease, "max_attempts": self.max_attempts,
                "error_ms": RETENTION,
            },
            "complete": {**token, "format": b"", "body": one.owner, **keeps},
            "fail": {**token, "format": b"", "body": one.owner, **keeps},
            "release": {**token, "hold_ms": 0, **keeps},
            "stop": {**token, "hold_ms": 0, **keeps},
            "hold": {**token, "hold_ms": HOLD, **keeps},
            "extend": {**token, **lease},
            "step": {**token, "entry": b"1", **lease},
            "dispatched": {"task_id": one.task},
        }  # fmt: skip
        name = "release" if script in ("hold", "stop") else script
        judge = getattr(self, f"_judge_{name}", self._judge_others)
        return self._calls(state, name, lambda *told: judge(*told, one), **arguments[script])

    def _abandoned(self, state: State, task: bytes, worker: bytes, grace: int) -> State:
        def judge(truth: Truth, before: Record | None, answer: Answer) -> Truth:
            if answer.case == "ok" and worker != _worker(truth.last):
                raise Violation("the lease of another execution is abandoned")
            return truth._replace(holder=b"") if answer.case == "ok" else truth

        arguments = {"task_id": task, "worker": worker, "grace_ms": grace}
        return self._calls(state, "abandon", judge, **arguments)[1]

    def _calls(
        self, state: State, name: str,
        judge: Callable[[Truth, Record | None, Answer], Truth] = lambda truth, *_: truth,
        **arguments: Any,
    ) -> tuple[Answer, State]:  # fmt: skip
        """A script: at the server, once; what it answers is what it would answer a resend."""
        script = getattr(self.protocol, name)
        clock = Clock(0, _microsecond(state))
        answer = script(state.record, clock, **arguments)
        self._case = answer.case
        again = script(answer.after, Clock(0, clock.us + 1), **arguments)
        if again.case != answer.case and name != "forget":
            raise Violation(f"a resend changes the answer: {answer.case}, then {again.case}")
        if answer.case == "begun" and again.told != answer.told:
            raise Violation("a resend of begin begins another execution")
        self._judge_record(state, name, answer)
        truth = judge(state.truth, state.record, answer)
        gone = answer.after is None and state.record is not None
        state = state._replace(record=answer.after, truth=truth)
        return answer, self._vanishes(state) if gone else state

    # What must hold

    def _judge_record(self, state: State, name: str, answer: Answer) -> None:
        before, after = state.record, answer.after
        if after is not None:
            if not 0 < (after.expires or 10**9) <= LEASE + HOLD + RETENTION + LEASE:
                raise Violation(f"the record that {name} leaves does not expire in time")
            if after.token < (before.token if before else 0):
                raise Violation(f"{name} lowers the token")
        if before is not None and before.finished and name != "forget" and (
            after is None or not after.finished or after.body != before.body
        ):  # fmt: skip
            raise Violation(f"{name} overwrites an outcome")
        told = answer.told
        if told is not None and told.finished:
            if after is None or after.body != told.body:
                raise Violation("an outcome is told that is not stored")
            known = state.truth.outcome or (POISONED if name == "begin" else b"")
            if told.body != known:
                raise Violation("a reader sees another outcome than the first")

    def _judge_begin(
        self, truth: Truth, before: Record | None, answer: Answer, one: Pass
    ) -> Truth:
        told = answer.told
        if answer.case == "finished" and not truth.outcome:
            assert told is not None
            if truth.begun < self.max_attempts:
                raise Violation("it is poisoned before its attempts are used up")
            return Truth(outcome=told.body, token=told.token)
        if answer.case == "held" and before is not None and before.at <= 0:
            raise Violation("it is refused, and nobody has a lease")
        if answer.case != "begun" or told is None:
            return truth
        if truth.outcome:
            raise Violation("an execution begins though there is an outcome")
        if told.body != truth.steps:
            raise Violation("the finished steps are not those that were kept")
        if before is not None and before.state == RESERVED and before.at > 0 and (
            before.task_id not in (one.task, b"")
        ):  # fmt: skip
            raise Violation("an execution begins over another task's reservation")
        if truth.holder == one.owner:
            if told.token != truth.token:
                raise Violation("a resend of begin changes the token")
            return truth
        if told.token <= truth.token:
            raise Violation("the token does not grow")
        died = truth.died + bool(truth.last and not truth.given_up)
        if told.attempt > self.max_attempts:
            raise Violation("an execution begins after the last attempt")
        at_most = died if self.alone else truth.begun
        if not died <= told.attempt - 1 <= at_most:
            raise Violation(f"attempt {told.attempt} begins after {died} that died")
        return truth._replace(
            holder=one.owner, last=one.owner, died=died, begun=truth.begun + 1, token=told.token,
            given_up=False,
        )  # fmt: skip

    def _judge_complete(
        self, truth: Truth, before: Record | None, answer: Answer, one: Pass
    ) -> Truth:
        if answer.case == "lost":
            return self._judge_others(truth, before, answer, one)
        if truth.outcome:
            if truth.outcome != one.owner:
                raise Violation("a second completion is told that it was accepted")
            return truth
        if truth.holder != one.owner:
            raise Violation("the completion of a stale token is accepted")
        return Truth(outcome=one.owner, token=truth.token)

    _judge_fail = _judge_complete

    def _judge_release(
        self, truth: Truth, before: Record | None, answer: Answer, one: Pass
    ) -> Truth:
        if answer.case == "lost" or before is None or before == answer.after:
            return self._judge_others(truth, before, answer, one)
        if truth.holder != one.owner:
            raise Violation("the release of a stale token is accepted")
        return Truth(token=truth.token, steps=truth.steps)

    def _judge_others(
        self, truth: Truth, before: Record | None, answer: Answer, one: Pass
    ) -> Truth:
        """extend, step, and every refusal."""
        held = (truth.holder, truth.token) == (one.owner, one.token)
        if answer.case == "lost" and held and not truth.outcome:
            raise Violation("the holder of the lease is refused")
        if answer.case == "ok" and answer.after is not None and answer.after.state == STARTED:
            if truth.holder != one.owner:
                raise Violation("a stale token keeps the lease")
            return truth._replace(steps=answer.after.body)
        return truth

    def _checked(self, state: State) -> State:
        if self.exclusive:
            if sum(one is not None and one.trusting for one in state.passes) > 1:
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


def _worker(owner: bytes) -> bytes:
    # Each pass in a process of its own. A process that is reused bears its name for one at a time.
    return b"w" + owner


def _with(slot: int, **changes: Any) -> StepTaken:
    def step(state: State) -> State:
        one = state.passes[slot]
        assert one is not None
        return _set(state, slot, one._replace(**changes))

    return step


def _set(state: State, slot: int, one: Pass | None) -> State:
    passes = state.passes
    return state._replace(passes=(*passes[:slot], one, *passes[slot + 1 :]))


def _replace_message(state: State, old: Message, new: Message) -> State:
    messages = list(state.messages)
    messages[messages.index(old)] = new
    return state._replace(messages=tuple(messages))


def _publish(state: State, task: bytes, prior: bytes) -> State:
    return state._replace(messages=(*state.messages, Message(-1, task, prior, queued=True)))


def _answer(state: State, task: bytes, kind: str) -> State:
    answers = list(state.answers)
    number = int(task[1:]) - 1
    answers[number] = answers[number] or kind
    return state._replace(answers=tuple(answers))


def _stage(state: State, number: int, stage: str) -> State:
    stages = list(state.publishers)
    stages[number] = stage
    return state._replace(publishers=tuple(stages))


def _fresh(state: State) -> bytes:
    """The first letter that nobody bears."""
    used = set(state.truth.outcome + state.truth.holder + state.truth.last)
    for one in (*state.passes, state.echo and state.echo.who):
        if one:
            used.update(one.owner + one.prior)
    for message in state.messages:
        used.update(message.prior)
    for _, worker in state.notices:
        used.update(worker)
    if state.record:
        used.update(state.record.owner + state.record.worker + state.record.body)
    return next(bytes([letter]) for letter in _LETTERS if letter not in used)


def _tokens(state: State) -> set[int]:
    tokens = {one.token for one in state.passes if one} | {state.truth.token}
    if state.record:
        tokens.add(state.record.token)
    if state.echo:
        tokens.add(state.echo.who.token)
    return tokens


def _microsecond(state: State) -> int:
    """The server's clock, later than whatever was drawn in this tick."""
    return max((token for token in _tokens(state) if 0 <= token < TICK_US), default=0) + 1


def _normal(state: State, steps_back: bool) -> State:
    """The same state, written in one way: what nobody can tell apart is made equal."""
    floor = -LEASE * state.left[_CLOCK_BACK] if steps_back else 0
    record, echo, truth = state.record, state.echo, state.truth
    if record is not None:
        at = 0 if record.finished else max(record.at, floor - RETENTION)
        record = record._replace(at=at)
    passes = [one for one in state.passes if one is not None]
    passes.sort(key=_nameless)
    # Letters and numbers in the order in which they are met.
    letters = "".join(map(_letters, (record, truth, *passes))).encode()
    letters += b"".join(one.prior for one in state.messages)
    letters += b"".join(worker for _, worker in state.notices)
    if echo is not None:
        letters += _letters(echo.who).encode()
    rename = _renaming(letters)
    numbers = {one.message: number for number, one in reversed([*enumerate(passes)])}
    tokens = _old_tokens(state, floor * TICK_US)

    def named(one: Pass) -> Pass:
        return one._replace(
            message=numbers.get(one.message, -1), token=tokens.get(one.token, one.token),
            owner=one.owner.translate(rename), prior=one.prior.translate(rename),
        )  # fmt: skip

    return State(
        record=record and record._replace(
            token=tokens.get(record.token, record.token), owner=record.owner.translate(rename),
            worker=record.worker.translate(rename), body=record.body.translate(rename),
        ),
        messages=tuple(sorted(
            Message(numbers.get(one.number, -1), one.task, one.prior.translate(rename), one.queued)
            for one in state.messages
        )),
        passes=(*map(named, passes), *(None,) * (len(state.passes) - len(passes))),
        notices=tuple((task, worker.translate(rename)) for task, worker in state.notices),
        echo=echo and echo._replace(who=named(echo.who)),
        left=state.left, answers=state.answers, publishers=state.publishers,
        truth=truth._replace(
            token=tokens.get(truth.token, truth.token), outcome=truth.outcome.translate(rename),
            holder=truth.holder.translate(rename), last=truth.last.translate(rename),
        ),
    )  # fmt: skip


def _nameless(one: Pass) -> tuple[Any, ...]:
    return one.task, one.phase, one.script, one.trust, one.frozen, one.doomed, one.heard or (), one


def _letters(one: Record | Truth | Pass | None) -> str:
    if one is None:
        return ""
    if isinstance(one, Record):
        return (one.owner + one.worker + one.body).decode()
    if isinstance(one, Truth):
        return (one.outcome + one.holder + one.last).decode()
    return (one.owner + one.prior).decode()


@cache
def _renaming(letters: bytes) -> bytes:
    met = bytes(dict.fromkeys(letter for letter in letters if letter in _LETTERS))
    return bytes.maketrans(met, _LETTERS[: len(met)])


def _old_tokens(state: State, floor_us: int) -> dict[int, int]:
    """Tokens older than any clock to come: their order is all that matters.

    Ten apart, so that the one more of an abandon meets none of the others.
    """
    old = sorted(token for token in _tokens(state) if token < floor_us)
    return {token: floor_us - 10 * (len(old) - rank) for rank, token in enumerate(old)}
