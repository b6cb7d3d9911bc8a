"""A state of the model with a turn: the records, messages, and what has really happened."""

from __future__ import annotations

from typing import Any, NamedTuple

from labs.verification.model import Record
from labs.verification.state import LEASE, LETTERS, TICK_US

#: Ticks that a retry is held, and a reservation; the latter does not age unless it is to expire.
HOLD, RESERVATION = 2, 4
EVENTS = (
    "crash", "seen crash", "freeze", "redelivery", "error", "retry", "late reservation",
)  # fmt: skip
OUTCOME, IGNORED = "outcome", "ignored"


class Message(NamedTuple):
    """A message at the broker; its copies have the same number, as they have the same tag."""

    task: int
    retries: int
    #: Of the delivery that has it, -1 while it is queued.
    number: int


class Delivery(NamedTuple):
    """A running execution; all others are at an end in the step in which they begin."""

    message: Message
    execution_id: bytes
    token: int
    lease_left: int = LEASE
    frozen: bool = False
    #: Its retry is published, and the turn not yet released.
    retried: bool = False


class TurnState(NamedTuple):
    turn: Record | None
    #: By task: the record of its messages, and their entry.
    records: tuple[Record | None, ...]
    entries: tuple[Record | None, ...]
    messages: tuple[Message, ...]
    deliveries: tuple[Delivery | None, ...]
    #: By task: "reserving", "reserved", "sent", or the number of the task whose result it gets.
    publishers: tuple[str, ...]
    #: By task: whether the task whose result it gets has begun since.
    fresh: tuple[bool, ...]
    #: By task: "outcome" or "ignored" once its message has ended.
    answers: tuple[str, ...]
    #: By task: whether an execution has begun.
    begun: tuple[bool, ...]
    #: By task: retries and execution id of its end.
    ended: tuple[tuple[int, bytes] | None, ...]
    #: The execution that has begun last, and the highest token.
    holder: bytes
    token: int
    remaining: tuple[int, ...]

    @property
    def record(self) -> Record | None:
        """What a trace describes."""
        return self.turn

    @property
    def results(self) -> tuple[bytes, ...]:
        """The search of a turn has no result backend."""
        return ()


def canonical_state(state: TurnState) -> tuple[TurnState, bytes]:
    """Returns the state with its execution ids as A, B, C … and its tokens by their order."""
    letters = state.holder
    for delivery in state.deliveries:
        letters += delivery.execution_id if delivery else b""
    for record in (state.turn, *state.records, *state.entries):
        if record is not None:
            letters += record.owner + record.worker + record.body
    for end in state.ended:
        letters += end[1] if end else b""
    renamed = bytes(dict.fromkeys(letter for letter in letters if letter in LETTERS))
    names = bytes.maketrans(renamed, LETTERS[: len(renamed)])
    order = {token: 10 * rank - 10**6 for rank, token in enumerate(sorted(tokens(state)))}
    tags = {number: rank for rank, number in enumerate(sorted(numbers(state)))}

    def record_of(record: Record | None) -> Record | None:
        return record and record._replace(
            token=order[record.token], owner=record.owner.translate(names), format=b"",
            worker=record.worker.translate(names), body=record.body.translate(names),
            attempt=min(record.attempt, 1),
        )  # fmt: skip

    def message_of(message: Message) -> Message:
        return message._replace(number=tags.get(message.number, -1))

    canonical = state._replace(
        turn=record_of(state.turn), records=tuple(map(record_of, state.records)),
        entries=tuple(
            entry and entry._replace(
                at=0, token=entry.token if entry.token < 10 else 10,
                owner=entry.owner.translate(names), worker=entry.worker.translate(names),
                body=entry.body.translate(names),
            )
            for entry in state.entries
        ),
        messages=tuple(sorted(map(message_of, state.messages))),
        deliveries=tuple(
            each and each._replace(
                execution_id=each.execution_id.translate(names), token=order[each.token],
                message=message_of(each.message),
            )
            for each in state.deliveries
        ),
        ended=tuple(end and (end[0], end[1].translate(names)) for end in state.ended),
        holder=state.holder.translate(names), token=order[state.token],
    )  # fmt: skip
    return canonical, renamed


def name_of(task: int) -> bytes:
    return b"T%d" % task


def task_of(name: bytes) -> int:
    return int(name[1:])


def put(state: TurnState, slot: int, delivery: Delivery | None) -> TurnState:
    return replace(state, "deliveries", slot, delivery)


def replace(state: TurnState, field: str, index: int, value: Any) -> TurnState:
    """Returns the state with one element of a field changed."""
    values = list(getattr(state, field))
    values[index] = value
    return state._replace(**{field: tuple(values)})


def numbers(state: TurnState) -> set[int]:
    """Returns the numbers of the messages that are with a worker."""
    found = {each.number for each in state.messages}
    found.update(each.message.number for each in state.deliveries if each)
    return found - {-1}


def new_execution_id(state: TurnState) -> bytes:
    """Returns the first letter that is not in use."""
    used = set(state.holder)
    for delivery in state.deliveries:
        used.update(delivery.execution_id if delivery else b"")
    for record in (state.turn, *state.records, *state.entries):
        if record is not None:
            used.update(record.owner + record.worker + record.body)
    for end in state.ended:
        used.update(end[1] if end else b"")
    return next(bytes([letter]) for letter in LETTERS if letter not in used)


def tokens(state: TurnState) -> set[int]:
    """Returns all tokens in the state."""
    found = {state.token}
    found.update(each.token for each in state.deliveries if each)
    found.update(each.token for each in (state.turn, *state.records) if each)
    return found


def microsecond(state: TurnState) -> int:
    """Returns the server's time: later than every token that was drawn in this tick."""
    return max((token for token in tokens(state) if 0 <= token < TICK_US), default=0) + 1
