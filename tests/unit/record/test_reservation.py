"""Damaged reservations are refused as damaged records."""

from __future__ import annotations

import struct

import pytest

from celery_idempotent import CorruptRecordError
from celery_idempotent.record import layout, reservation
from celery_idempotent.record.reservation import Reservation
from tests.unit.record.raw import UUID_ID, raw_record

ROOT = b"8 bytes."


def read(raw: bytes) -> Reservation | None:
    return reservation.read(layout.read(raw, "task:key", "task"), raw)


def waiting(task_id: bytes) -> bytes:
    entry = struct.pack(">H1s7s6sH", 0, b"W", bytes(7), bytes(6), len(task_id)) + task_id + b"\0"
    return struct.pack(">I", len(entry)) + entry


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        (b"", Reservation(UUID_ID)),
        (ROOT + b"3", Reservation(UUID_ID, 3)),
        (layout.NOBODY, None),
    ],
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
