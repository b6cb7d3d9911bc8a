"""The environment of the protocol: broker, workers, publishers and faults, in every order.

Times are abstract: that of a record is past or future. Each passes on its own and at any moment, so
leases, retentions and freezes have every length and every relation to each other. Only a lease that
a living process renews ends no earlier than that process or the server is frozen; then the
process's heartbeat is on its way. The grace of a marked lease does not pass while its execution
lives: a server first executes what its sockets hold. Commands on their way are executed at any
time, also after their call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from labs.verification import model
from labs.verification.model import ENDED, RUNNING, SENDING, Keys, Names, Record, Turn
from labs.verification.scenarios import FAULTS, Scenario

#: Milliseconds, and microseconds of the first token.
_NOW, _FIRST, _LEASE = 1_000, 1_000_000, 500
_TTL = 10_000
_PAST, _FUTURE = 0, _NOW + _LEASE
#: The id of the task that has replaced one.
_OTHER_TASK = b"=x"
#: As the newest arguments of a call that must not run any more.
_NEVER = 99
_FAULT_NUMBERS = {name: number for number, name in enumerate(FAULTS)}
#: What of a generation is the level of replacement.
_LEVEL = 10**9
_KEY, _SLOT = "K", "Q"
#: The body of a chord, a task whose key is its task id.
_BODY = "z"
#: Phases of an execution after its outcome: a part returns to its chord, the last one publishes the
#: body and deletes the chord.
_SENDING_PHASES = ("send", "publish", "delete", "sent")


class Violation(Exception):
    """An invariant is broken."""


class Message(NamedTuple):
    """A message, or a copy of it."""

    task: str
    generation: int


class Execution(NamedTuple):
    """A delivery that a worker handles."""

    number: int
    task: str
    generation: int
    #: ``calling`` (its begin is sent again), ``confirm``, ``run``, ``release`` (its retry is
    #: published), one of `_SENDING_PHASES`, ``zombie`` (to be killed).
    phase: str
    token: int
    is_frozen: bool = False
    #: The arguments that it runs with, as the number of their publish.
    arguments: int = 0

    @property
    def message(self) -> Message:
        return Message(self.task, self.generation)

    def __str__(self) -> str:
        return f"{self.task}.{self.generation}#{self.number}"


class Begin(NamedTuple):
    """A begin on its way."""

    number: int
    task: str
    generation: int
    replaces: int


class Extend(NamedTuple):
    token: int
    task: str


class Settle(NamedTuple):
    task: str
    token: int
    letter: str
    body: bytes
    owner: bytes


class Abandon(NamedTuple):
    number: int
    task: str


class Queue(NamedTuple):
    task: str
    arguments: int


class Forget(NamedTuple):
    pass


Command = Begin | Extend | Settle | Abandon | Queue | Forget
Pairs = tuple[tuple[str, Any], ...]


class State(NamedTuple):
    """All that the future depends on, and a history that the scripts do not see."""

    keys: tuple[tuple[str, Record | Turn], ...]
    broker: tuple[Message, ...]
    executions: tuple[Execution, ...]
    network: tuple[Command, ...]
    #: Messages that are still to be published with a reservation.
    unpublished: str
    #: By fault: how often it may still happen.
    budget: tuple[int, ...]
    #: The highest token.
    top: int
    #: A begin was granted to a killed child.
    granted_late: bool = False
    #: By unit: deaths since the last end, possible and certain ones.
    deaths: Pairs = ()
    #: By unit: the task that has completed it.
    completed_by: Pairs = ()
    #: Tasks whose message has ended, with an answer; those that ended in an error.
    answered: tuple[str, ...] = ()
    #: By task: continuations sent.
    sent: Pairs = ()
    dead_senders: int = 0
    #: The parts that have returned to the chord; None: it was deleted.
    returned: tuple[str, ...] | None = ()
    #: How often its body was published.
    bodies: int = 0
    #: By task that waits: the newest arguments that were published meanwhile.
    promised: Pairs = ()
    #: By task: the arguments in its message.
    arguments: Pairs = ()
    #: The keys before the last write, while a failover may lose it.
    before: tuple[tuple[str, Record | Turn], ...] | None = None


class Transition(NamedTuple):
    text: str
    is_fault: bool
    state: State


def _get(pairs: Pairs, name: str, default: Any = 0) -> Any:
    return next((value for key, value in pairs if key == name), default)


def _put(pairs: Pairs, name: str, value: Any) -> Pairs:
    rest = [pair for pair in pairs if pair[0] != name]
    return tuple(sorted(rest if value is None else [*rest, (name, value)]))


def _add(items: tuple[Any, ...], *new: Any) -> tuple[Any, ...]:
    return tuple(sorted((*items, *new), key=_sort_key))


def _remove(items: tuple[Any, ...], item: Any) -> tuple[Any, ...]:
    rest = list(items)
    rest.remove(item)
    return tuple(rest)


def _sort_key(item: Any) -> Any:
    return type(item).__name__, item


class Environment:
    """A scenario, as a graph of states."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.tasks = scenario.direct + scenario.queued
        self.options = scenario.options
        self.is_chord = "chord" in self.options
        self.continues = self.is_chord or "continues" in self.options
        self._budget = tuple(scenario.faults.get(fault, 0) for fault in FAULTS)
        self._runs_again = scenario.mode in ("turn", "finished", "started")
        self._slot = _SLOT if scenario.queued else None

    def start(self) -> State:
        broker = tuple(Message(task, 0) for task in self.scenario.direct)
        return State((), broker, (), (), self.scenario.queued, self._budget, _FIRST)

    def is_goal(self, state: State) -> bool:
        return not (state.broker or state.executions or state.unpublished)

    def transitions(self, state: State) -> Iterator[Transition]:
        """Yields what may happen next.

        Raises:
            Violation: if an invariant is broken in `state` or by what happens.
        """
        self._check(state)
        for text, is_fault, target in self._actions(state):
            yield Transition(text, is_fault, self._canonical(target))

    def _actions(self, state: State) -> Iterator[tuple[str, bool, State]]:
        yield from self._publish(state)
        yield from self._let_time_pass(state)
        yield from self._execute_late(state)
        if len(state.executions) < self.scenario.workers:
            for message in sorted(set(state.broker)):
                yield from self._deliver(state, message)
        for execution in state.executions:
            yield from self._act(state, execution)
        if self._may(state, "forget"):
            yield from self._forget(state)
        if self._may(state, "failover") and state.before is not None:
            lost = self._pay(state, "failover")._replace(keys=state.before, before=None)
            yield "a replica without the last write is promoted", True, lost

    # Helpers

    def _names(self, task: str) -> Names:
        if self.scenario.mode == "task" or task == _BODY:
            return Names(task)
        if not self._runs_again:
            return Names(_KEY, self._slot)
        return Names(task, self._slot, _KEY)

    def _unit(self, task: str) -> str:
        """Returns the name of the record of a message."""
        return self._names(task).record

    def _may(self, state: State, *faults: str) -> bool:
        return all(state.budget[_FAULT_NUMBERS[fault]] for fault in faults)

    def _has_happened(self, state: State, *faults: str) -> bool:
        numbers = [_FAULT_NUMBERS[fault] for fault in faults]
        return any(state.budget[number] < self._budget[number] for number in numbers)

    def _pay(self, state: State, *faults: str) -> State:
        budget = list(state.budget)
        for fault in faults:
            budget[_FAULT_NUMBERS[fault]] -= 1
        return state._replace(budget=tuple(budget))

    def _with(self, state: State, keys: Keys) -> State:
        after = tuple(sorted(keys.items()))
        if after == state.keys:
            return state
        before = state.keys if self._may(state, "failover") else None
        return state._replace(keys=after, before=before)

    @staticmethod
    def _now_us(state: State) -> int:
        return state.top + 10

    def _killed(self, state: State, unit: str, possible: int, certain: int) -> State:
        """Counts a death of an execution of `unit`."""
        deaths = _get(state.deaths, unit, (0, 0))
        counted = deaths[0] + possible, deaths[1] + certain
        return state._replace(deaths=_put(state.deaths, unit, counted))

    @staticmethod
    def _with_answer(state: State, task: str) -> State:
        return state._replace(answered=tuple(sorted({*state.answered, task})))

    # Commands

    def _begin(
        self, state: State, begin: Begin, *, us: int | None = None, knows_slot: bool = True
    ) -> tuple[str, Record | None, State]:
        keys, names = Keys(dict(state.keys)), self._names(begin.task)
        execution = b"%08d" % begin.number
        case, record = model.begin(
            keys, us or self._now_us(state), names if knows_slot else names._replace(slot=None),
            execution, begin.task.encode(), begin.generation, b"", b"%d" % begin.number, b"",
            _LEASE, _TTL, _TTL, _NOW + 1, begin.replaces,
        )  # fmt: skip
        after = self._with(state, keys)
        former = dict(state.keys)
        if case == "begun" and keys != former:
            assert record is not None
            known = [value.token for name, value in former.items() if name == _KEY]
            is_resent = any(
                isinstance(value, Record)
                and (value.owner, value.token) == (record.owner, record.token)
                for value in former.values()
            )
            if known and record.token <= max(known) and not is_resent:
                raise Violation("a token does not grow")
            after = after._replace(top=max(state.top, record.token))
        turn = former.get(names.turn) if case == "begun" and begin.replaces and names.turn else None
        if isinstance(turn, Turn) and turn.record != names.record:
            holder = former.get(turn.record)
            if isinstance(holder, Record) and (
                keys[turn.record].letter == "D"
                or (begin.replaces == 1 and holder.letter in "WBAT" and holder.at > _NOW)
            ):
                after = after._replace(promised=_put(after.promised, turn.record, _NEVER))
        others = [{**each, names.record: None} for each in (keys, former)]
        if case in ("send", "finished") and others[0] != others[1]:
            raise Violation(f"a begin that is answered {case} changes another record")
        return case, record, after

    def _queue(self, keys: Keys, state: State, command: Queue, deadline: int) -> model.Reply:
        names = self._names(command.task)
        if self.scenario.mode != "finished":
            names = names._replace(turn=None)
        arguments = b""
        if "large" in self.options:
            arguments = b"="
        elif "arguments" in self.options:
            arguments = b"%d" % command.arguments
        quiet = 300 if "quiet" in self.options else 0
        return model.queue(
            keys, self._now_us(state), names, command.task.encode(), deadline, _TTL, b"", b"",
            arguments, _TTL, quiet, 900,
        )  # fmt: skip

    def _settle(self, keys: Keys, state: State, settle: Settle) -> model.Reply:
        at = _LEASE if settle.letter in ("T", "W") else 0
        names = self._names(settle.task)
        return model.settle(
            keys, self._now_us(state), names, settle.token, settle.letter, at, settle.owner, b"",
            settle.body, _TTL,
        )  # fmt: skip

    def _extend(self, keys: Keys, state: State, extend: Extend) -> model.Reply:
        names = self._names(extend.task)
        return model.extend(keys, self._now_us(state), names, extend.token, _LEASE, _TTL)

    def _forget(self, state: State) -> Iterator[tuple[str, bool, State]]:
        keys = Keys(dict(state.keys))
        model.forget(keys, self._now_us(state), Names(_KEY, self._slot), _NOW + 1)
        # A known limit: executions trust a forgotten lease.
        frozen = tuple(each._replace(is_frozen=True) for each in state.executions)
        after = self._with(state, keys)._replace(executions=_add(frozen))
        after = self._pay(after, "forget")
        yield "an operator forgets the key", True, after
        if self._may(state, "late") and model.is_off("deadline"):
            late = self._pay(after, "late")
            late = late._replace(network=_add(late.network, Forget()))
            yield "an operator forgets the key; a copy is on its way", True, late

    # Publishers

    def _publish(self, state: State) -> Iterator[tuple[str, bool, State]]:
        if not state.unpublished:
            return
        task, rest = state.unpublished[0], state.unpublished[1:]
        number = len(self.scenario.queued) - len(rest)
        command = Queue(task, number)
        keys, former = Keys(dict(state.keys)), dict(state.keys)
        case, record = self._queue(keys, state, command, _NOW + 1)
        after = self._with(state, keys)._replace(unpublished=rest)
        may_be_late = self._may(state, "late") and model.is_off("deadline")
        published = after._replace(
            broker=_add(after.broker, Message(task, 0)),
            arguments=_put(after.arguments, task, number),
        )
        text = f"{task} is published: {case}"
        if case == "reserved":
            slot = former.get(_SLOT)
            if isinstance(slot, Record) and slot.task_id != task.encode():
                name = slot.task_id.decode()
                if "large" in self.options and keys.get(name) != former.get(name):
                    promised = _put(published.promised, name, _NEVER)
                    after, published = (
                        each._replace(promised=promised) for each in (after, published)
                    )
            yield text, False, published
            if self._may(state, "publisher"):
                dead = self._pay(self._with_answer(after, task), "publisher")
                yield f"{text}, but its publisher dies first", True, dead
            after = published
        elif case == "held":
            assert record is not None
            after = self._follow(state, after, task, record.task_id.decode(), number)
            text += f" by {record.task_id.decode()}"
            yield text, False, after
        else:
            after = self._with_answer(after, task)
            yield text, False, after
        if may_be_late and case != "finished":
            late = self._pay(after, "late")
            late = late._replace(network=_add(late.network, command))
            yield f"{text}; a copy is on its way", True, late
        if self._may(state, "late"):
            sent = state._replace(
                unpublished=rest,
                broker=_add(state.broker, Message(task, 0)),
                arguments=_put(state.arguments, task, number),
            )
            if model.is_off("deadline"):
                sent = sent._replace(network=_add(sent.network, command))
            yield f"{task} is published without a reply", True, self._pay(sent, "late")

    def _follow(self, state: State, after: State, task: str, holder: str, number: int) -> State:
        """Answers a publish with the result of `holder`."""
        after = self._with_answer(after, task)
        if self.scenario.mode == "started":
            newest = max(number, _get(after.promised, holder))
            return after._replace(promised=_put(after.promised, holder, newest))
        exists = (
            holder in after.answered
            or any(message.task == holder for message in after.broker)
            or any(execution.task == holder for execution in after.executions)
            or self._has_happened(state, "publisher")
        )
        if not exists:
            raise Violation(f"{task} is answered by {holder}, which does not exist")
        # A known limit: for a lease after a child was killed while its begin was on its way.
        has_failed = holder in after.answered and not _get(
            after.completed_by, self._unit(holder), None
        )
        if has_failed and not after.granted_late:
            raise Violation(f"{task} is answered by {holder}, which has ended in an error")
        return after

    # Time

    def _let_time_pass(self, state: State) -> Iterator[tuple[str, bool, State]]:
        for name, record in state.keys:
            if isinstance(record, Turn):
                continue
            if name == _SLOT:
                yield from self._let_slot_end(state, record)
            elif record.letter in ENDED + "D":
                if self._may(state, "expiry"):
                    keys = Keys(dict(state.keys))
                    del keys[name]
                    after = self._pay(self._with(state, keys), "expiry")
                    after = after._replace(completed_by=_put(after.completed_by, name, None))
                    yield f"the retention of {name} ends", True, after
            elif record.at > _NOW:
                yield from self._let_lease_end(state, name, record)

    def _let_slot_end(self, state: State, slot: Record) -> Iterator[tuple[str, bool, State]]:
        keys = Keys(dict(state.keys))
        if slot.at > _NOW:
            ready = Keys({**keys, _SLOT: slot._replace(at=_PAST)})
            yield "the quiet time ends", False, self._with(state, ready)
        task = slot.task_id.decode()
        exists = any(message.task == task for message in state.broker) or any(
            execution.task == task for execution in state.executions
        )
        del keys[_SLOT]
        ended = self._with(state, keys)
        if not exists and task not in state.unpublished:
            yield "the reservation of nobody ends", False, ended
        elif self._may(state, "slow"):
            yield f"the reservation of {task} ends", True, self._pay(ended, "slow")

    def _let_lease_end(
        self, state: State, name: str, record: Record
    ) -> Iterator[tuple[str, bool, State]]:
        keys = Keys({**dict(state.keys), name: record._replace(at=_PAST)})
        ended = self._with(state, keys)
        task = record.task_id.decode()
        if record.letter == "W":
            waits = any(
                message.task == task and message.generation >= int(record.owner)
                for message in state.broker
            )
            if not waits:
                yield f"the reservation for the retry of {task} ends", False, ended
            elif self._may(state, "slow"):
                yield f"the retry of {task} is late", True, self._pay(ended, "slow")
            return
        phases = _SENDING_PHASES if record.letter in SENDING else ("confirm", "run", "release")
        holders = [
            each
            for each in state.executions
            if each.token == record.token and each.phase in phases and each.task == task
        ]
        if any(
            each.phase == "zombie" and each.token + 1 == record.token for each in state.executions
        ):
            return  # the parent kills it within the grace
        if all(each.is_frozen for each in holders):
            yield f"the lease of {name} ends", False, ended
            return
        extend = Extend(record.token, task)
        if record.letter in "BAT" and self._may(state, "server frozen"):
            frozen = self._pay(ended, "server frozen")
            if record.letter != "T":
                frozen = frozen._replace(network=_add(frozen.network, extend))
            yield f"the server is frozen beyond the lease of {name}", True, frozen
        elif record.letter in "ba" and extend in state.network and self._may(state, "again"):
            yield "the server is frozen again", True, self._pay(ended, "again")

    # Late commands

    def _execute_late(self, state: State) -> Iterator[tuple[str, bool, State]]:
        for command in sorted(set(state.network), key=_sort_key):
            rest = state._replace(network=_remove(state.network, command))
            keys = Keys(dict(rest.keys))
            case = ""
            if isinstance(command, Begin):
                case, _, after = self._begin(rest, command)
                after = after._replace(granted_late=after.granted_late or case == "begun")
            else:
                if isinstance(command, Extend):
                    case, _ = self._extend(keys, rest, command)
                elif isinstance(command, Settle):
                    case, _ = self._settle(keys, rest, command)
                    if case == "ok" and keys != dict(rest.keys):
                        raise Violation(f"a late settle {command.letter!r} changes the record")
                elif isinstance(command, Abandon):
                    names = self._names(command.task)
                    case, _ = model.abandon(
                        keys, self._now_us(rest), names, command.task.encode(),
                        b"%d" % command.number, 0,
                    )  # fmt: skip
                elif isinstance(command, Queue):
                    case, _ = self._queue(keys, rest, command, 0)
                else:
                    names = Names(_KEY, self._slot)
                    case, _ = model.forget(keys, self._now_us(rest), names, 0)
                after = self._with(rest, keys)
            what = type(command).__name__.lower()
            yield f"late {what} {' '.join(map(str, command))}: {case}", False, after

    # Deliveries

    def _unused_number(self, state: State) -> int:
        used = {execution.number for execution in state.executions}
        used |= {each.number for each in state.network if isinstance(each, Begin | Abandon)}
        for _, record in state.keys:
            if isinstance(record, Record) and record.letter in RUNNING + SENDING:
                used |= {int(record.worker or 0), int(record.owner[:8] or 0)}
        return next(number for number in range(1, 50) if number not in used)

    def _deliver(self, state: State, message: Message) -> Iterator[tuple[str, bool, State]]:
        task, generation = message
        number = self._unused_number(state)
        replaces = int("replace" in self.options and task == self.tasks[-1])
        replaces = replaces or 2 * ("older" in self.options)
        begin = Begin(number, task, generation, replaces)
        execution = Execution(number, task, generation, "calling", 0)
        case, record, after = self._begin(state, begin)
        slot = dict(state.keys).get(_SLOT)
        if (
            case == "begun"
            and "quiet" in self.options
            and isinstance(slot, Record)
            and slot.task_id == task.encode()
            and slot.at > _NOW
        ):
            raise Violation(f"{task} begins within the quiet time")
        text = f"{execution} begins: {case}"
        answered = self._answered(state, after, case, record, execution)
        yield text, False, answered
        # A client sends the next copy of a begin only after the deadline of the one before. So what
        # is executed is executed within the call, unless one of the two rules is left out.
        may_be_late = self._may(state, "late") and (
            model.is_off("deadline") or model.is_off("one copy at a time")
        )
        if may_be_late:
            late = self._pay(answered, "late")
            late = late._replace(network=_add(late.network, begin))
            yield f"{text}; a copy is on its way", True, late
            late = self._pay(state, "late")
            late = late._replace(network=_add(late.network, begin))
            yield f"{execution} is put back; its begin is on its way", True, late
        if self._may(state, "lost") and case in ("begun", "send"):
            lost = self._pay(after, "lost")
            calling = lost._replace(
                broker=_remove(lost.broker, message), executions=_add(lost.executions, execution)
            )
            yield f"{text}, the reply is lost", True, calling
            yield f"{text}, the reply is lost, {task} is put back", True, lost
        if self._may(state, "kill"):
            killed = self._killed(self._pay(state, "kill"), self._unit(task), 1, 0)
            killed = killed._replace(network=_add(killed.network, begin, Abandon(number, task)))
            yield f"child {execution} is killed while its begin is on its way", True, killed
        if self._may(state, "old worker"):
            case, record, after = self._begin(state, begin, knows_slot=False)
            answered = self._answered(state, after, case, record, execution)
            yield (
                f"{execution} begins without the slot: {case}",
                True,
                self._pay(answered, "old worker"),
            )
        if self._may(state, "clock") and case == "begun":
            case, record, after = self._begin(state, begin, us=_FIRST)
            answered = self._answered(state, after, case, record, execution)
            yield (
                f"{execution} begins, the clock has fallen back: {case}",
                True,
                self._pay(answered, "clock"),
            )

    def _answered(
        self, state: State, after: State, case: str, record: Record | None, execution: Execution
    ) -> State:
        """Returns the state after a reply to a begin."""
        task, unit = execution.task, self._unit(execution.task)
        if case in ("held", "wait"):
            return after
        assert record is not None
        after = after._replace(broker=_remove(after.broker, execution.message))
        completed_by = _get(after.completed_by, unit, None)
        if case == "begun":
            arguments = int(record.body) if record.body else _get(after.arguments, task)
            possible, certain = _get(after.deaths, unit, (0, 0))
            if record.attempt > possible + 1:
                raise Violation(f"attempt {record.attempt} after {possible} deaths")
            if record.attempt < certain and "replace" not in self.options:
                raise Violation(f"attempt {record.attempt} after {certain} deaths")
            if completed_by is not None:
                raise Violation(f"{task} runs after {completed_by} has completed {unit}")
            if arguments < _get(after.promised, task):
                raise Violation(f"{task} runs with older arguments than were published")
            takes_over = len(record.owner) > model.EXECUTION_ID_BYTES
            confirms = takes_over and not model.is_off("takeover confirms")
            execution = execution._replace(
                phase="confirm" if confirms else "run", token=record.token, arguments=arguments
            )
            return after._replace(executions=_add(after.executions, execution))
        if case == "send":
            sender = execution._replace(phase="send", token=record.token)
            return after._replace(executions=_add(after.executions, sender))
        if record.letter in "VETt":
            if record.body.decode() != completed_by:
                raise Violation(f"{task} gets the outcome {record.body!r}, not {completed_by}")
            was_sent = record.task_id.decode() == task and record.letter != "E"
            if was_sent and model.is_off("sent before"):
                was_sent = False
            if self.is_chord and task != _BODY and not was_sent:
                sender = execution._replace(phase="send")
                return after._replace(executions=_add(after.executions, sender))
            if self.continues and task != _BODY and not was_sent:
                after = after._replace(sent=_put(after.sent, task, _get(after.sent, task) + 1))
        return self._with_answer(after, task)

    # Executions

    def _act(self, state: State, execution: Execution) -> Iterator[tuple[str, bool, State]]:
        rest = state._replace(executions=_remove(state.executions, execution))
        if execution.phase == "calling":
            yield from self._call_again(state, rest, execution)
            return
        if execution.phase == "zombie":
            yield from self._live_on(rest, execution)
            return
        if self._may(state, "kill"):
            yield from self._kill(rest, execution)
        if self._may(state, "copy"):
            copied = state._replace(broker=_add(state.broker, execution.message))
            yield f"a copy of {execution} is delivered", True, self._pay(copied, "copy")
        phases = ("run", "send", "publish")
        may_freeze = not execution.is_frozen and execution.phase in phases
        if may_freeze and self._may(state, "freeze"):
            frozen = execution._replace(is_frozen=True)
            after = self._pay(rest, "freeze")
            after = after._replace(executions=_add(after.executions, frozen))
            if execution.phase == "run":
                after = self._killed(after, self._unit(execution.task), 1, 1)
            else:
                after = after._replace(dead_senders=after.dead_senders + 1)
            yield f"{execution} is frozen", True, after
        if execution.phase in ("confirm", "run"):
            yield from self._heartbeat(state, rest, execution)
        if execution.phase == "run":
            yield from self._end_body(state, rest, execution)
        elif execution.phase == "release":
            yield from self._end(rest, execution, "W", "")
        elif execution.phase in _SENDING_PHASES:
            yield self._send(state, rest, execution)

    def _send(self, state: State, rest: State, execution: Execution) -> tuple[str, bool, State]:
        """Takes the next step of sending the continuation."""
        task, phase = execution.task, execution.phase
        if phase == "sent":
            keys = Keys(dict(state.keys))
            self._settle(keys, state, Settle(task, execution.token, "V", b"", b""))
            after = self._with_answer(self._with(rest, keys), task)
            return f"{execution} marks its continuation as sent", False, after
        after = rest
        if phase == "send":
            text, phase = "sends its continuation", "sent"
            after = after._replace(sent=_put(after.sent, task, _get(after.sent, task) + 1))
            if self.is_chord and after.returned is not None:
                after = after._replace(returned=tuple(sorted({*after.returned, task})))
                phase = "publish" if after.returned == tuple(self.tasks) else "sent"
        elif phase == "publish":
            text, phase = "publishes the body", "delete"
            after = after._replace(
                broker=_add(after.broker, Message(_BODY, 0)), bodies=after.bodies + 1
            )
        else:
            text, phase = "deletes the chord", "sent"
            after = after._replace(returned=None)
        sender = execution._replace(phase=phase)
        return (
            f"{execution} {text}",
            False,
            after._replace(executions=_add(after.executions, sender)),
        )

    def _call_again(
        self, state: State, rest: State, execution: Execution
    ) -> Iterator[tuple[str, bool, State]]:
        back = rest._replace(broker=_add(rest.broker, execution.message))
        replaces = int("replace" in self.options and execution.task == self.tasks[-1])
        replaces = replaces or 2 * ("older" in self.options)
        begin = Begin(execution.number, execution.task, execution.generation, replaces)
        case, record, after = self._begin(back, begin)
        own = dict(state.keys).get(self._unit(execution.task))
        if (
            case in ("held", "wait")
            and isinstance(own, Record)
            and own.letter in "BA"
            and own.at > _NOW
            and own.owner[:8] == b"%08d" % execution.number
        ):
            raise Violation(f"the begin of {execution} that is sent again waits for itself")
        answered = self._answered(back, after, case, record, execution)
        yield f"{execution} begins again: {case}", False, answered
        if self._may(state, "kill"):
            killed = self._killed(self._pay(back, "kill"), self._unit(execution.task), 1, 0)
            yield f"{execution} and its host are killed in the begin", True, killed

    def _live_on(self, rest: State, execution: Execution) -> Iterator[tuple[str, bool, State]]:
        keys = Keys(dict(rest.keys))
        body = execution.task.encode()
        settle = Settle(execution.task, execution.token, "V", body, b"")
        case, _ = self._settle(keys, rest, settle)
        if case == "ok":
            raise Violation(f"{execution} completes after its caller got TimeLimitExceeded")
        yield f"{execution}, to be killed, completes: {case}", False, self._with(rest, keys)
        yield f"{execution} is dead", False, rest

    def _kill(self, rest: State, execution: Execution) -> Iterator[tuple[str, bool, State]]:
        died = self._pay(rest, "kill")
        died = died._replace(broker=_add(died.broker, execution.message))
        runs = execution.phase in ("confirm", "run", "release")
        if runs:
            is_certain = execution.phase != "confirm" and not execution.is_frozen
            unit = self._unit(execution.task)
            died = self._killed(died, unit, not execution.is_frozen, is_certain)
        else:
            died = died._replace(dead_senders=died.dead_senders + 1)
        text = f"{execution} and its host are killed"
        yield text, True, died
        if self._may(died, "late") and execution.phase in ("confirm", "run"):
            late = self._pay(died, "late")
            extend = Extend(execution.token, execution.task)
            late = late._replace(network=_add(late.network, extend))
            yield f"{text}; an extend is on its way", True, late
        abandoned = died._replace(
            network=_add(died.network, Abandon(execution.number, execution.task))
        )
        yield f"child {execution} is killed", True, abandoned

    def _heartbeat(
        self, state: State, rest: State, execution: Execution
    ) -> Iterator[tuple[str, bool, State]]:
        keys = Keys(dict(state.keys))
        case, record = self._extend(keys, state, Extend(execution.token, execution.task))
        back = rest._replace(broker=_add(rest.broker, execution.message))
        if case == "ok":
            # A process that was frozen trusts its lease again.
            if execution.phase == "confirm" or execution.is_frozen or keys != dict(state.keys):
                resumed = execution._replace(phase="run", is_frozen=False)
                after = self._with(rest, keys)
                after = after._replace(executions=_add(after.executions, resumed))
                if execution.is_frozen:
                    after = self._killed(after, self._unit(execution.task), -1, -1)
                yield f"{execution} extends", False, after
        elif record is not None and record.letter == "X" and execution.phase == "run":
            yield (
                f"{execution} learns that it is replaced",
                False,
                self._with_answer(rest, execution.task),
            )
        else:
            yield f"{execution} extends: lost", False, self._with(back, keys)

    def _end_body(
        self, state: State, rest: State, execution: Execution
    ) -> Iterator[tuple[str, bool, State]]:
        if self._may(state, "hard"):
            keys = Keys(dict(state.keys))
            names, task = self._names(execution.task), execution.task
            case, _ = model.abandon(
                keys, self._now_us(state), names, task.encode(), b"%d" % execution.number, 100
            )
            after = self._pay(self._with(rest, keys), "hard")
            if case == "ok":
                after = self._with_answer(after, task)
                after = after._replace(promised=_put(after.promised, task, None))
                after = self._killed(after, self._unit(task), 1, 1)
            zombie = execution._replace(phase="zombie", is_frozen=True)
            after = after._replace(executions=_add(after.executions, zombie))
            yield f"{execution} exceeds its hard time limit", True, after
        continues = self.continues and execution.task != _BODY
        yield from self._end(rest, execution, "T" if continues else "V", "")
        for fault, letter in (("error", ""), ("failed", "E"), ("replaced", "D")):
            if self._may(state, fault):
                yield from self._end(rest, execution, letter, fault)
        if self._may(state, "retry"):
            after = self._pay(rest, "retry")
            retry = Message(execution.task, execution.generation + 1)
            after = after._replace(
                broker=_add(after.broker, retry),
                executions=_add(after.executions, execution._replace(phase="release")),
            )
            yield f"{execution} publishes its retry", True, after

    def _end(
        self, rest: State, execution: Execution, letter: str, fault: str
    ) -> Iterator[tuple[str, bool, State]]:
        task, unit = execution.task, self._unit(execution.task)
        body = {"W": b"", "": b"", "D": _OTHER_TASK}.get(letter, task.encode())
        level = execution.generation - execution.generation % _LEVEL + _LEVEL
        owner = {"W": b"%d" % (execution.generation + 1), "D": b"%d" % level}.get(letter, b"")
        settle = Settle(task, execution.token, letter, body, owner)
        keys = Keys(dict(rest.keys))
        case, record = self._settle(keys, rest, settle)
        if fault:
            rest = self._pay(rest, fault)
        text = f"{execution} settles {letter!r}"
        if case == "lost":
            after = rest
            if record is not None and record.letter == "X":
                after = self._with_answer(rest, task)
            elif letter != "W":
                after = rest._replace(broker=_add(rest.broker, execution.message))
            yield f"{text}: lost", bool(fault), self._with(after, keys)
            return
        after = self._with(rest, keys)
        if letter in ("V", "T", "E", "D"):
            if _get(after.completed_by, unit, None):
                raise Violation(f"{unit} is completed twice")
            for other in after.executions:
                is_other = self._unit(other.task) == unit or (
                    self._runs_again and _BODY not in (task, other.task)
                )
                if (
                    is_other
                    and other.token > execution.token
                    and other.phase in ("confirm", "run", "release")
                ):
                    raise Violation(f"{execution} completes with a stale token")
            after = after._replace(completed_by=_put(after.completed_by, unit, body.decode()))
        if letter == "T" or (letter == "E" and self.continues):
            sender = execution._replace(phase="send" if letter == "T" else "sent")
            if letter == "E":  # its errback is published before the message is acknowledged
                number = _get(after.sent, task) + 1
                after = after._replace(sent=_put(after.sent, task, number))
            after = after._replace(
                executions=_add(after.executions, sender),
                dead_senders=after.dead_senders + execution.is_frozen,
            )
        elif letter != "W":
            after = self._with_answer(after, task)
        if letter in ("V", "E", "D", ""):
            if execution.arguments < _get(after.promised, task):
                raise Violation(f"{task} ends without arguments that were published")
            after = after._replace(promised=_put(after.promised, task, None))
        waiting = sum(
            isinstance(command, Begin) and self._unit(command.task) == unit
            for command in after.network
        )
        after = after._replace(deaths=_put(after.deaths, unit, (waiting, 0) if waiting else None))
        yield text, bool(fault), after
        if self._may(after, "late"):
            late = self._pay(after, "late")
            late = late._replace(network=_add(late.network, settle))
            yield f"{text}; a copy is on its way", True, late

    # Invariants

    def _check(self, state: State) -> None:
        trusting = [
            each
            for each in state.executions
            if each.phase in ("confirm", "run", "release") and not each.is_frozen
        ]
        if self._runs_again or self.is_chord:
            units = [self._unit(each.task) for each in trusting]
            if len(units) > len(set(units)):
                raise Violation("two executions of one message trust their leases")
        trusting = [each for each in trusting if each.task != _BODY]
        if self.scenario.mode == "task":
            trusting = [each for each in trusting if each.task == self.tasks[0]]
        if len(trusting) > 1 and not (
            # Replaced ones learn it at their next extend.
            "replace" in self.options and any(each.task == self.tasks[-1] for each in trusting)
        ):
            raise Violation("two executions trust their leases")
        if (
            self.scenario.mode == "expired"
            and _get(state.completed_by, _KEY, None)
            and any(each.phase == "run" for each in trusting)
            and "replace" not in self.options
        ):
            raise Violation("an execution trusts its lease after the outcome")
        for task, number in state.sent:
            is_own = _get(state.completed_by, self._unit(task), "") == task
            is_error = self._has_happened(state, "failed")
            if is_own and not is_error and number > 1 + state.dead_senders:
                raise Violation(f"the continuation of {task} is sent {number} times")
        # Copies of a duplicate may repeat its continuation: then only the body's own key makes it
        # run once.
        if self.scenario.mode != "expired" and state.bodies > 1 + state.dead_senders:
            raise Violation(f"the body of the chord is published {state.bodies} times")
        self._check_waiting(state)
        if self.is_goal(state):
            self._check_end(state)

    def _check_waiting(self, state: State) -> None:
        """With `started`, one message waits at most."""
        if (
            self.scenario.mode != "started"
            or "large" in self.options
            or self._has_happened(state, "late", "slow", "old worker")
        ):
            return
        keys = Keys(dict(state.keys))
        waiting = set()
        for task, _ in state.broker:
            record = keys.record(task)
            if task not in state.answered and (
                record is None or (record.letter == "W" and record.owner == b"0")
            ):
                waiting.add(task)
        if len(waiting) > 1:
            raise Violation("two messages wait")

    def _check_end(self, state: State) -> None:
        for task in (*self.tasks, *(_BODY if self.is_chord else "")):
            if task not in state.answered:
                raise Violation(f"{task} has vanished without an answer")
        completed_by = _get(state.completed_by, _KEY, "")
        if self.continues and completed_by and not _get(state.sent, completed_by):
            raise Violation("the continuation is never sent")
        unkept = [task for task, newest in state.promised if newest < _NEVER]
        if unkept and not self._has_happened(state, "publisher"):
            raise Violation(f"{unkept[0]} does not run for the publishes that it has answered")

    # States

    def _canonical(self, state: State) -> State:
        """Returns the state with small numbers: only the order of tokens matters."""
        tokens = {_FIRST, state.top, *(each.token for each in state.executions)}
        for keys in (state.keys, state.before or ()):
            tokens |= {value.token for name, value in keys if name != _SLOT}
        tokens |= {each.token for each in state.network if isinstance(each, Extend | Settle)}
        ranks = {token: _FIRST + 10 * n for n, token in enumerate(sorted(tokens - {0}))}
        ranks[0] = 0
        for token in sorted(tokens):  # that of an abandoned or replaced execution is one higher
            if token - 1 in ranks and token > _FIRST:
                ranks[token] = ranks[token - 1] + 1
        network = tuple(
            each._replace(token=ranks[each.token]) if isinstance(each, Extend | Settle) else each
            for each in state.network
        )
        executions = tuple(each._replace(token=ranks[each.token]) for each in state.executions)
        before = None if state.before is None else _canonical_keys(state.before, ranks)
        return state._replace(
            keys=_canonical_keys(state.keys, ranks), executions=_add(executions),
            network=_add(network), top=ranks[state.top], before=before,
        )  # fmt: skip


def _canonical_keys(keys: Any, ranks: dict[int, int]) -> Any:
    canonical: list[tuple[str, Record | Turn]] = []
    for name, value in keys:
        if isinstance(value, Turn):
            canonical.append((name, value._replace(token=ranks[value.token])))
        elif name == _SLOT:
            canonical.append((name, value._replace(at=_FUTURE if value.at > _NOW else _PAST)))
        else:
            is_past = value.at <= _NOW or value.letter in ENDED + "D"
            owner = value.owner
            if value.letter in RUNNING and len(owner) > 8:
                owner = owner[:8] + b"t"
            value = value._replace(
                token=ranks[value.token], at=_PAST if is_past else _FUTURE, owner=owner
            )
            canonical.append((name, value))
    return tuple(canonical)
