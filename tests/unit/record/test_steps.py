"""Finished steps in the body of a record, and reservations."""

from __future__ import annotations

import contextlib
import struct
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.record import layout, reservation, steps
from celery_idempotent.record.record import Record, State
from celery_idempotent.record.reservation import Reservation
from labs.verification.model import Waiting
from labs.verification.wire import entry
from tests.store.record_harness import UUID_ID, raw_record

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
forms = st.text("abcdefgj+@", max_size=8)


@given(st.lists(st.tuples(names, forms, st.binary(max_size=30)), max_size=5))
def test_steps_are_read_back_and_the_last_of_a_name_counts(
    written: list[tuple[str, str, bytes]],
) -> None:
    body = b"".join(steps.write(*step) for step in written)

    assert steps.read(body, "k") == {name: (form, value) for name, form, value in written}


@given(st.binary(max_size=40))
def test_any_bytes_are_steps_or_corrupt(body: bytes) -> None:
    with contextlib.suppress(CorruptRecordError):
        assert isinstance(steps.read(body, "k"), dict)


def test_steps_cut_short_anywhere_are_corrupt() -> None:
    first, second = steps.write("one", "json", b"1"), steps.write("two", "", b"")

    for length in set(range(len(first + second))) - {0, len(first)}:
        with pytest.raises(CorruptRecordError, match="the steps of k"):
            steps.read((first + second)[:length], "k")


def test_a_format_longer_than_its_step_is_corrupt() -> None:
    # Lengths: of the rest, of the name, of the format.
    body = bytes([0, 0, 0, 4, 0, 1]) + b"a" + bytes([9]) + b"and the bytes after it"

    with pytest.raises(CorruptRecordError):
        steps.read(body, "k")


@pytest.mark.parametrize("name", ["", "x" * 1001, "é" * 501], ids=["empty", "long", "bytes"])
def test_a_name_of_invalid_length_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 1000 bytes"):
        steps.write(name, "json", b"")


def test_a_name_may_have_a_thousand_bytes() -> None:
    assert steps.read(steps.write("x" * 1000, "json", b"1"), "k") == {"x" * 1000: ("json", b"1")}


class TestMessageThatWaits:
    """The body of a turn."""

    BODY = entry(Waiting(b"\0" + b"an id, 16 bytes!", 1_700_000_000_000, b"8 bytes!"))

    def record(self, body: bytes) -> Record:
        return Record(State.STARTED, "key", "shop.charge", "", "", token=1, attempt=1, body=body)

    def test_is_read_and_is_no_step(self) -> None:
        task_id, until_ms = reservation.waiting(self.record(self.BODY)) or ("", 0)

        assert (task_id, until_ms) == (str(UUID(bytes=b"an id, 16 bytes!")), 1_700_000_000_000)
        assert steps.read(self.BODY, "key") == {}

    def test_cut_short_is_corrupt(self) -> None:
        for length in range(7, len(self.BODY)):
            with pytest.raises(CorruptRecordError, match="the turn of key"):
                reservation.waiting(self.record(self.BODY[:length]))


ROOT = b"8 bytes."


def read(raw: bytes) -> Reservation | None:
    return reservation.read(layout.read(raw, "task:key", "task"), raw)


def waiting(task_id: bytes) -> bytes:
    entry = struct.pack(">H1s7s6sH", 0, b"W", bytes(7), bytes(6), len(task_id)) + task_id + b"\0"
    return struct.pack(">I", len(entry)) + entry


@pytest.mark.parametrize(
    ("owner", "expected"),
    [(b"", Reservation(UUID_ID)), (ROOT + b"3", Reservation(UUID_ID, 3)), (layout.NOBODY, None)],
    ids=["a publish", "a retry", "nobody"],
)
def test_a_reservation_names_its_message(owner: bytes, expected: Reservation | None) -> None:
    assert read(raw_record(b"R", execution_id=owner)) == expected


@pytest.mark.parametrize("owner", [ROOT + b"\x11", ROOT, b"an execution id!"])
def test_a_damaged_owner_is_refused(owner: bytes) -> None:
    with pytest.raises(CorruptRecordError, match="task:key cannot be read"):
        read(raw_record(b"R", execution_id=owner))


def test_a_turn_reserves_the_next_one() -> None:
    assert read(raw_record(body=waiting(b"next"))) == Reservation("next")


@pytest.mark.parametrize("task_id", [b"\xff", b"\0short"], ids=["not UTF-8", "a short UUID"])
def test_a_damaged_id_of_the_next_turn_is_refused(task_id: bytes) -> None:
    with pytest.raises(CorruptRecordError, match="task:key"):
        read(raw_record(body=waiting(task_id)))
