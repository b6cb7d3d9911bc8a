"""A state of the model: the record, messages, deliveries, and what has really happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from labs.verification.model import Record

# Ticks of the clock.
LEASE, HOLD, GRACE, RETENTION = 2, 2, 1, 3
#: Microseconds of a tick in the model: more than the tokens that are drawn in one tick.
TICK_US = 1000

POISONED = b"poisoned"
#: The error of an execution that was killed at a time limit.
KILLED = b"killed"

# What the result backend has for a task id: nothing, another state than SUCCESS, a SUCCESS with an
# outcome whose record is gone or never was; else a SUCCESS with the outcome of that execution id.
NO_RESULT, NO_SUCCESS, UNRECORDED = b"", b"!", b"?"

# The kinds of answers that a caller can get.
OUTCOME, ERROR, NOT_STORED, IGNORED, NOT_SENT = (
    "outcome", "error", "not stored", "ignored", "not sent",
)  # fmt: skip


class Violation(Exception):
    """An invariant that does not hold."""


class Message(NamedTuple):
    """A message at the broker, until it is acknowledged."""

    #: The tag of its delivery; -1 while it has none.
    number: int
    task: bytes
    #: Execution ids of deliveries that got no reply.
    unanswered_ids: bytes
    #: False: a worker has it.
    queued: bool
    #: Retries of its task id before it.
    retries: int = 0


class Reply(NamedTuple):
    """The reply of a script, as far as the library uses it."""

    case: str
    #: Of the record in the reply, if there is one.
    state: str = ""
    #: The task id.
    task: bytes = b""


class Delivery(NamedTuple):
    """One delivery of a message to a worker."""

    message: int
    task: bytes
    unanswered_ids: bytes
    execution_id: bytes
    retries: int = 0
    #: "run"; "send" a script; "await" a reply; "publish" again; Celery is to "read" the result, or
    #: to "write" it; "ack" the message.
    phase: str = "send"
    script: str = "begin"
    reply: Reply | None = None
    token: int = 0
    #: Ticks, by its own clock, until it regards its lease as expired.
    lease_left: int = LEASE
    #: While it runs: the heartbeat extends its lease.
    has_heartbeat: bool = False
    frozen: bool = False
    #: Its parent has ended the lease, and will kill it within the grace period.
    dying: bool = False
    #: The answer of its caller once it acknowledges.
    answer: str = ""
    #: What the result backend must have for its task, until it has had that.
    result: bytes = NO_RESULT

    @property
    def trusts_lease(self) -> bool:
        """Whether it runs and relies on its lease."""
        return self.phase == "run" and self.lease_left > 0


class LateCopy(NamedTuple):
    """A request that reaches the server once more, late; nothing reads the reply."""

    script: str
    sender: Delivery


class History(NamedTuple):
    """What really happened; the scripts do not see it."""

    #: The first accepted outcome, until its retention ends or an operator forgets it.
    outcome: bytes = b""
    #: Execution id of the last begin that still has the right to complete.
    holder: bytes = b""
    #: Execution id of the last begin that has not ended; its lease may have been abandoned.
    last: bytes = b""
    #: The last begin got no reply, and its message was put back with its execution id.
    given_up: bool = False
    #: Executions in a row that began and never ended, without the last one ...
    died: int = 0
    #: ... and with those that never ran, because the reply to their begin was lost.
    begun: int = 0
    #: The highest token that a begin returned.
    token: int = 0
    #: Finished steps.
    steps: bytes = b""
    #: Publishes that ended in an error, each with the retries before and the error.
    ended: tuple[tuple[bytes, int, bytes], ...] = ()
    #: The publishes whose continuation was sent since the record was created, once for each time.
    sent: tuple[bytes, ...] = ()
    #: The retry for which the key is held: its task id and its number.
    awaited: tuple[bytes, int] | None = None

    def with_ended(self, task: bytes, retries: int, error: bytes) -> History:
        """Returns the history after `task` ended in `error`."""
        others = (ended for ended in self.ended if ended[0] != task)
        return self._replace(ended=tuple(sorted((*others, (task, retries, error)))))


class State(NamedTuple):
    record: Record | None
    messages: tuple[Message, ...]
    #: A slot for each worker.
    deliveries: tuple[Delivery | None, ...]
    #: Deaths that a parent has seen, but not reported yet: task and worker.
    notices: tuple[tuple[bytes, bytes], ...]
    late_copy: LateCopy | None
    #: How often each of EVENTS may still happen.
    remaining: tuple[int, ...]
    #: By task: the answer of its caller, "" before there is one.
    answers: tuple[str, ...]
    #: By task: the stage of its publisher.
    publishers: tuple[str, ...]
    history: History
    #: Token and state of the record that was displayed to an operator.
    displayed: tuple[int, str] | None = None
    #: By task: what the result backend has. Only with fused completion.
    results: tuple[bytes, ...] = ()
    #: By task, as the root of its messages: the entries beside the record.
    entries: tuple[Record | None, ...] = ()
    #: By task: whether its continuation was ever sent.
    ever_sent: tuple[bool, ...] = ()


#: What an action does to a state.
Effect = Callable[[State], State]
#: Description, whether it is a fault, effect. A → in the description stands for the reply's case.
Action = tuple[str, bool, Effect]


class Transition(NamedTuple):
    """An action that was taken."""

    text: str
    fault: bool
    state: State
    #: The execution ids of the state before that are A, B, C … in this one.
    renamed: bytes


#: What an environment may allow, each a number of times.
EVENTS = (
    "crash", "freeze", "lost reply", "late copy", "redelivery", "clock back", "clock forward",
    "forget", "forget displayed", "time limit", "final time limit", "retry", "error",
    "stored error", "exit", "step", "publish fails", "publisher dies", "result expires",
    "result overwritten",
)  # fmt: skip
#: Lower than any token.
NO_TOKEN = -(10**9)
#: Execution ids.
LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def worker_of(execution_id: bytes) -> bytes:
    """Each delivery has a process of its own; a reused one holds one delivery at a time."""
    return b"w" + execution_id


def remaining(state: State, event: str) -> int:
    """Returns how often the event may still happen."""
    return state.remaining[EVENTS.index(event)]


def update(slot: int, **fields: Any) -> Effect:
    """Returns the effect that changes these fields of the delivery in a slot."""

    def effect(state: State) -> State:
        delivery = state.deliveries[slot]
        assert delivery is not None
        return put(state, slot, delivery._replace(**fields))

    return effect


def put(state: State, slot: int, delivery: Delivery | None) -> State:
    """Puts the delivery into the slot."""
    deliveries = (*state.deliveries[:slot], delivery, *state.deliveries[slot + 1 :])
    return state._replace(deliveries=deliveries)


def replace_message(state: State, old: Message, new: Message) -> State:
    messages = list(state.messages)
    messages[messages.index(old)] = new
    return state._replace(messages=tuple(messages))


def publish(state: State, task: bytes, unanswered_ids: bytes, retries: int = 0) -> State:
    """Adds a message at the broker."""
    message = Message(-1, task, unanswered_ids, True, retries)
    return state._replace(messages=(*state.messages, message))


def acknowledge(state: State, number: int) -> State:
    """Removes all copies of a delivery: they have the same tag."""
    messages = (each for each in state.messages if each.queued or each.number != number)
    return state._replace(messages=tuple(messages))


def answer_caller(state: State, task: bytes, answer: str) -> State:
    """Records the answer of the task's caller; the first one counts."""
    answers = list(state.answers)
    number = int(task[1:]) - 1
    answers[number] = answers[number] or answer
    return state._replace(answers=tuple(answers))


def is_success(result: bytes) -> bool:
    """Whether what the result backend has is a SUCCESS."""
    return result not in (NO_RESULT, NO_SUCCESS)


def result_of(state: State, task: bytes) -> bytes:
    """Returns what the result backend has for the task."""
    return state.results[int(task[1:]) - 1]


def put_entry(state: State, task: bytes, entry: Record | None) -> State:
    """Returns the state with another entry of the task's messages."""
    entries = list(state.entries)
    entries[int(task[1:]) - 1] = entry
    return state._replace(entries=tuple(entries))


def put_result(state: State, task: bytes, result: bytes) -> State:
    results = list(state.results)
    results[int(task[1:]) - 1] = result
    return state._replace(results=tuple(results))


def set_publisher(state: State, number: int, stage: str) -> State:
    publishers = list(state.publishers)
    publishers[number] = stage
    return state._replace(publishers=tuple(publishers))


def new_execution_id(state: State) -> bytes:
    """Returns the first letter that is not in use."""
    used = set(state.history.outcome + state.history.holder + state.history.last)
    for delivery in (*state.deliveries, state.late_copy and state.late_copy.sender):
        if delivery:
            used.update(delivery.execution_id + delivery.unanswered_ids)
    for message in state.messages:
        used.update(message.unanswered_ids)
    for _, worker in state.notices:
        used.update(worker)
    for _, _, error in state.history.ended:
        used.update(error)
    for record in (state.record, *state.entries):
        if record:
            used.update(record.owner + record.worker + record.body)
    return next(bytes([letter]) for letter in LETTERS if letter not in used)


def tokens(state: State) -> set[int]:
    """Returns all tokens in the state."""
    tokens = {each.token for each in state.deliveries if each} | {state.history.token}
    if state.record:
        tokens.add(state.record.token)
    if state.late_copy:
        tokens.add(state.late_copy.sender.token)
    if state.displayed:
        tokens.add(state.displayed[0])
    return tokens


def microsecond(state: State) -> int:
    """Returns the server's time: later than every token that was drawn in this tick."""
    return max((token for token in tokens(state) if 0 <= token < TICK_US), default=0) + 1
