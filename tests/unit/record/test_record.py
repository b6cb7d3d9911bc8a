"""The properties of a record."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from datetime import datetime, timezone

import pytest

from celery_idempotent import State
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from tests.unit.record.raw import raw_record

BEGUN = datetime(2025, 11, 21, 12, 0, 0, 123457, tzinfo=timezone.utc)
AT = datetime(2025, 11, 21, 12, 1, 0, 123000, tzinfo=timezone.utc)


def record(letter: bytes) -> Record:
    raw = raw_record(letter, execution_id=b"x" * 22)
    return layout.read(raw, "k", "t", decode=lambda record: record.body + b"!")


@pytest.mark.parametrize(
    ("letter", "started", "deadline", "finished"),
    [
        (b"R", None, AT, None),
        (b"S", BEGUN, AT, None),
        (b"C", BEGUN, None, AT),
        (b"P", BEGUN, None, AT),
        (b"F", BEGUN, None, AT),
        (b"Q", BEGUN, None, AT),
    ],
)
def test_each_state_has_its_times(
    letter: bytes,
    started: datetime | None,
    deadline: datetime | None,
    finished: datetime | None,
) -> None:
    actual = record(letter)

    assert (actual.started_at, actual.deadline, actual.finished_at) == (started, deadline, finished)


def test_only_a_finished_record_has_a_result() -> None:
    assert record(b"C").result == b"!"
    assert record(b"F").result == b"!"
    assert record(b"S").result is None
    assert record(b"R").result is None


def test_a_record_without_a_decoder_has_no_result() -> None:
    assert layout.read(raw_record(b"C"), "k", "t").result is None


def test_a_state_prints_as_its_name() -> None:
    assert f"{State.COMPLETED}" == str(State.COMPLETED) == "COMPLETED" == State.COMPLETED
    assert [state for state in State if state.finished] == [State.COMPLETED, State.FAILED]


def test_a_record_is_immutable_and_its_repr_omits_the_body() -> None:
    secret = layout.read(raw_record(b"C", body=b"4111-1111"), "k", "t")

    with pytest.raises((FrozenInstanceError, TypeError)):
        secret.attempt = 2  # type: ignore[misc]
    assert "4111" not in repr(secret)
