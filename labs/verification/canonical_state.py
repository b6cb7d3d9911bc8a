"""The canonical form of a state: states that differ in names alone become equal."""

from __future__ import annotations

from functools import cache
from typing import Any

from labs.verification.model import Record
from labs.verification.state import (
    LEASE,
    LETTERS,
    RETENTION,
    TICK_US,
    Delivery,
    History,
    State,
    remaining,
    tokens,
)


def canonical_state(state: State, clock_steps_back: bool) -> tuple[State, bytes]:
    """Returns the canonical form, and the execution ids that are A, B, C … in it."""
    floor = -LEASE * remaining(state, "clock back") if clock_steps_back else 0
    copy, history = state.late_copy, state.history

    def timeless(record: Record | None) -> Record | None:
        if record is None:
            return None
        at = 0 if record.finished else max(record.at, floor - RETENTION)
        return record._replace(at=at, until=max(record.until, floor - RETENTION), format=b"")

    record, entries = timeless(state.record), tuple(map(timeless, state.entries))
    deliveries = [delivery for delivery in state.deliveries if delivery is not None]
    deliveries.sort(key=_sort_key)
    # Execution ids and delivery tags in the order in which they occur.
    letters = "".join(map(_letters, (record, *entries, history, *deliveries))).encode()
    letters += b"".join(message.unanswered_ids for message in state.messages)
    letters += b"".join(worker for _, worker in state.notices)
    if copy is not None:
        letters += _letters(copy.sender).encode()
    renamed = bytes(dict.fromkeys(letter for letter in letters if letter in LETTERS))
    names = _translation(renamed)
    numbers = {each.message: number for number, each in reversed([*enumerate(deliveries)])}
    old = _old_tokens(state, floor * TICK_US)

    def rename(delivery: Delivery) -> Delivery:
        return delivery._replace(
            message=numbers.get(delivery.message, -1),
            token=old.get(delivery.token, delivery.token),
            execution_id=delivery.execution_id.translate(names),
            unanswered_ids=delivery.unanswered_ids.translate(names),
            result=delivery.result.translate(names),
        )

    def renamed_record(record: Record) -> Record:
        return record._replace(
            owner=record.owner.translate(names), worker=record.worker.translate(names),
            body=record.body.translate(names),
        )  # fmt: skip

    canonical = State(
        record=record and renamed_record(
            record._replace(token=old.get(record.token, record.token))
        ),
        entries=tuple(entry and renamed_record(entry) for entry in entries),
        ever_sent=state.ever_sent,
        messages=tuple(sorted(
            message._replace(
                number=numbers.get(message.number, -1),
                unanswered_ids=message.unanswered_ids.translate(names),
            )
            for message in state.messages
        )),
        deliveries=(
            *map(rename, deliveries), *(None,) * (len(state.deliveries) - len(deliveries)),
        ),
        notices=tuple((task, worker.translate(names)) for task, worker in state.notices),
        late_copy=copy and copy._replace(sender=rename(copy.sender)),
        remaining=state.remaining, answers=state.answers, publishers=state.publishers,
        history=history._replace(
            token=old.get(history.token, history.token),
            outcome=history.outcome.translate(names), holder=history.holder.translate(names),
            last=history.last.translate(names),
            ended=tuple(
                (task, retries, error.translate(names)) for task, retries, error in history.ended
            ),
        ),
        displayed=state.displayed and (
            old.get(state.displayed[0], state.displayed[0]), state.displayed[1]
        ),
        results=tuple(result.translate(names) for result in state.results),
    )  # fmt: skip
    return canonical, renamed


def _sort_key(delivery: Delivery) -> tuple[Any, ...]:
    """Orders deliveries by what does not depend on names, as far as possible."""
    return (
        delivery.task, delivery.phase, delivery.script, delivery.lease_left, delivery.frozen,
        delivery.dying, delivery.reply or (), delivery,
    )  # fmt: skip


def _letters(part: Record | History | Delivery | None) -> str:
    """Returns the execution ids that occur in a part of the state."""
    if part is None:
        return ""
    if isinstance(part, Record):
        return (part.owner + part.worker + part.body).decode()
    if isinstance(part, History):
        errors = b"".join(error for _, _, error in part.ended)
        return (part.outcome + part.holder + part.last + errors).decode()
    return (part.execution_id + part.unanswered_ids).decode()


@cache
def _translation(renamed: bytes) -> bytes:
    return bytes.maketrans(renamed, LETTERS[: len(renamed)])


def _old_tokens(state: State, floor_us: int) -> dict[int, int]:
    """Returns new values for tokens older than any future time: only their order matters.

    They are ten apart, so that a token that abandon increments by one equals none of them.
    """
    old = sorted(token for token in tokens(state) if token < floor_us)
    return {token: floor_us - 10 * (len(old) - rank) for rank, token in enumerate(old)}
