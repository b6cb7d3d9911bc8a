"""A state written in one way: what nobody can tell apart is made equal, so there are few."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.labs.verification.model import Record
from tests.labs.verification.state import (
    LEASE,
    LETTERS,
    RETENTION,
    TICK_US,
    Pass,
    State,
    Truth,
    left,
    tokens,
)


def canonical_state(state: State, steps_back: bool) -> tuple[State, bytes]:
    """The same state, written in one way, and the letters that are A, B, C … now."""
    floor = -LEASE * left(state, "clock back") if steps_back else 0
    record, echo, truth = state.record, state.echo, state.truth
    if record is not None:
        at = 0 if record.finished else max(record.at, floor - RETENTION)
        errors = tuple(one._replace(at=0) for one in record.errors)
        record = record._replace(at=at, format=b"", errors=errors)
    deliveries = [one for one in state.deliveries if one is not None]
    deliveries.sort(key=_nameless)
    # Letters and numbers in the order in which they are met.
    letters = "".join(map(_letters, (record, truth, *deliveries))).encode()
    letters += b"".join(one.unanswered_ids for one in state.messages)
    letters += b"".join(worker for _, worker in state.notices)
    if echo is not None:
        letters += _letters(echo.who).encode()
    met = _met(letters)
    rename = _renaming(met)
    numbers = {one.message: number for number, one in reversed([*enumerate(deliveries)])}
    old = _old_tokens(state, floor * TICK_US)

    def named(one: Pass) -> Pass:
        return one._replace(
            message=numbers.get(one.message, -1), token=old.get(one.token, one.token),
            execution_id=one.execution_id.translate(rename),
            unanswered_ids=one.unanswered_ids.translate(rename),
        )  # fmt: skip

    renamed = State(
        record=record and record._replace(
            token=old.get(record.token, record.token),
            execution_id=record.execution_id.translate(rename),
            worker=record.worker.translate(rename), body=record.body.translate(rename),
            errors=tuple(
                one._replace(body=one.body.translate(rename)) for one in record.errors
            ),
        ),
        messages=tuple(sorted(
            one._replace(
                number=numbers.get(one.number, -1),
                unanswered_ids=one.unanswered_ids.translate(rename)
            )
            for one in state.messages
        )),
        deliveries=(*map(named, deliveries), *(None,) * (len(state.deliveries) - len(deliveries))),
        notices=tuple((task, worker.translate(rename)) for task, worker in state.notices),
        echo=echo and echo._replace(who=named(echo.who)),
        left=state.left, answers=state.answers, publishers=state.publishers,
        truth=truth._replace(
            token=old.get(truth.token, truth.token), outcome=truth.outcome.translate(rename),
            holder=truth.holder.translate(rename), last=truth.last.translate(rename),
            ended=tuple(
                (task, retries, error.translate(rename)) for task, retries, error in truth.ended
            ),
        ),
        shown=state.shown and (old.get(state.shown[0], state.shown[0]), state.shown[1]),
    )  # fmt: skip
    return renamed, met


def _nameless(one: Pass) -> tuple[Any, ...]:
    return one.task, one.phase, one.script, one.trust, one.frozen, one.doomed, one.heard or (), one


def _letters(one: Record | Truth | Pass | None) -> str:
    if one is None:
        return ""
    if isinstance(one, Record):
        errors = b"".join(error.body for error in one.errors)
        return (one.execution_id + one.worker + one.body + errors).decode()
    if isinstance(one, Truth):
        errors = b"".join(error for _, _, error in one.ended)
        return (one.outcome + one.holder + one.last + errors).decode()
    return (one.execution_id + one.unanswered_ids).decode()


def _met(letters: bytes) -> bytes:
    return bytes(dict.fromkeys(letter for letter in letters if letter in LETTERS))


@cache
def _renaming(met: bytes) -> bytes:
    return bytes.maketrans(met, LETTERS[: len(met)])


def _old_tokens(state: State, floor_us: int) -> dict[int, int]:
    """Tokens older than any clock to come: their order is all that matters.

    Ten apart, so that the one more of an abandon meets none of the others.
    """
    old = sorted(token for token in tokens(state) if token < floor_us)
    return {token: floor_us - 10 * (len(old) - rank) for rank, token in enumerate(old)}
