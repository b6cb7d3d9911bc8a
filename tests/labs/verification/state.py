"""Where everything stands: the record, messages, passes, and what really happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.labs.verification.model import Record

# Ticks of the clock.
LEASE, HOLD, GRACE, RETENTION = 2, 2, 1, 3
#: Microseconds in a tick, so to speak: more than the tokens that can be drawn in one.
TICK_US = 1000

POISONED = b"poisoned"
#: The error of an execution that was killed at a time limit.
KILLED = b"killed"

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
    unanswered_ids: bytes
    #: Else a worker has it.
    queued: bool
    #: Retries of its task id before it.
    retries: int = 0


class Heard(NamedTuple):
    """What an answer told."""

    case: str
    #: Of the record in the answer, if one was.
    state: str = ""
    task: bytes = b""
    continuation_sent: bool = False


class Pass(NamedTuple):
    """One message on its way through the gate."""

    message: int
    task: bytes
    unanswered_ids: bytes
    execution_id: bytes
    retries: int = 0
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
    #: Task ids that ended in an error: with the retries before, and the error.
    ended: tuple[tuple[bytes, int, bytes], ...] = ()
    #: Whose retry the key is held for: its task id, and its number.
    awaited: tuple[bytes, int] | None = None

    def ending(self, task: bytes, retries: int, error: bytes) -> Truth:
        """With that error as the last word for `task`."""
        others = (one for one in self.ended if one[0] != task)
        return self._replace(ended=tuple(sorted((*others, (task, retries, error)))))


class State(NamedTuple):
    record: Record | None
    messages: tuple[Message, ...]
    deliveries: tuple[Pass | None, ...]
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
    #: Token and state that an operator has been shown.
    shown: tuple[int, str] | None = None


#: A step, told and taken: its text, whether it is a fault, where it leads. A text that ends in →
#: goes on with the case of the answer.
StepTaken = Callable[[State], State]
Step = tuple[str, bool, StepTaken]


class Move(NamedTuple):
    text: str
    fault: bool
    state: State
    #: The letters of the state before whose executions are A, B, C … now.
    met: bytes


#: What a world may allow, each a number of times.
ALLOWANCES = (
    "crash", "freeze", "lost reply", "echo", "handed out again", "clock back", "clock forward",
    "forget", "forget shown", "time limit", "fatal time limit", "retry", "error", "stored error",
    "exit", "step", "publish fails", "publisher dies",
)  # fmt: skip
#: Lower than any token.
NONE = -(10**9)
#: Names of executions.
LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def worker_of(execution_id: bytes) -> bytes:
    """Each pass has a process of its own; one that is reused bears its name for one at a time."""
    return b"w" + execution_id


def left(state: State, what: str) -> int:
    """How often that may still happen."""
    return state.left[ALLOWANCES.index(what)]


def changes(slot: int, **fields: Any) -> StepTaken:
    """The pass in that slot changes so."""

    def step(state: State) -> State:
        one = state.deliveries[slot]
        assert one is not None
        return put(state, slot, one._replace(**fields))

    return step


def put(state: State, slot: int, one: Pass | None) -> State:
    """With that pass in that slot, or none."""
    deliveries = state.deliveries
    return state._replace(deliveries=(*deliveries[:slot], one, *deliveries[slot + 1 :]))


def replace_message(state: State, old: Message, new: Message) -> State:
    """With `new` in the place of `old`."""
    messages = list(state.messages)
    messages[messages.index(old)] = new
    return state._replace(messages=tuple(messages))


def publish(state: State, task: bytes, unanswered_ids: bytes, retries: int = 0) -> State:
    """With one more message at the broker."""
    message = Message(-1, task, unanswered_ids, True, retries)
    return state._replace(messages=(*state.messages, message))


def acknowledge(state: State, number: int) -> State:
    """Copies of one delivery bear one tag: the broker forgets it for all of them."""
    messages = (one for one in state.messages if one.queued or one.number != number)
    return state._replace(messages=tuple(messages))


def answer(state: State, task: bytes, kind: str) -> State:
    """The caller of `task` has its answer; the first one counts."""
    answers = list(state.answers)
    number = int(task[1:]) - 1
    answers[number] = answers[number] or kind
    return state._replace(answers=tuple(answers))


def publisher_at(state: State, number: int, stage: str) -> State:
    """The publisher gets as far as that."""
    stages = list(state.publishers)
    stages[number] = stage
    return state._replace(publishers=tuple(stages))


def fresh(state: State) -> bytes:
    """The first letter that nobody bears."""
    used = set(state.truth.outcome + state.truth.holder + state.truth.last)
    for one in (*state.deliveries, state.echo and state.echo.who):
        if one:
            used.update(one.execution_id + one.unanswered_ids)
    for message in state.messages:
        used.update(message.unanswered_ids)
    for _, worker in state.notices:
        used.update(worker)
    for _, _, error in state.truth.ended:
        used.update(error)
    if state.record:
        used.update(state.record.execution_id + state.record.worker + state.record.body)
        for one_error in state.record.errors:
            used.update(one_error.body)
    return next(bytes([letter]) for letter in LETTERS if letter not in used)


def tokens(state: State) -> set[int]:
    """All that anybody has."""
    tokens = {one.token for one in state.deliveries if one} | {state.truth.token}
    if state.record:
        tokens.add(state.record.token)
    if state.echo:
        tokens.add(state.echo.who.token)
    if state.shown:
        tokens.add(state.shown[0])
    return tokens


def microsecond(state: State) -> int:
    """The server's clock, later than whatever was drawn in this tick."""
    return max((token for token in tokens(state) if 0 <= token < TICK_US), default=0) + 1
