"""Reading the bytes of a record, and its properties."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from datetime import datetime, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_idempotent.core.record import Payload, Record, State, Tail, layout
from celery_idempotent.errors import CorruptRecordError, IdempotencyError
from tests.store.record_harness import raw_record


def read(raw: bytes) -> Record:
    return layout.read(raw, "shop.charge:digest", "shop.charge")


def test_a_label_that_does_not_fit_is_cut() -> None:
    tail = Tail("json", "t" * 55, "東" * 200).to_bytes()

    assert 250 < len(tail) <= 255
    assert read(raw_record(b"V", tail=tail)).label == "東" * 64
    assert len(Tail("j" * 300).to_bytes()) == 255


def test_a_line_of_a_later_version_is_ignored() -> None:
    record = read(raw_record(b"V", tail=b"json\n\norder 42\nits host\n"))

    assert (record.format, record.traceparent, record.label) == ("json", "", "order 42")


BEGUN = datetime(2025, 11, 21, 12, 0, 0, 123457, tzinfo=timezone.utc)
AT = datetime(2025, 11, 21, 12, 1, 0, 123000, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("letters", "state", "sending", "times", "result"),  # started, deadline, finished
    [
        (b"W", State.RESERVED, False, (None, AT, None), None),
        (b"BAba", State.STARTED, False, (BEGUN, AT, None), None),
        (b"VD", State.COMPLETED, False, (BEGUN, None, AT), b"body!"),
        (b"Tt", State.COMPLETED, True, (BEGUN, None, None), b"body!"),
        (b"EX", State.FAILED, False, (BEGUN, None, AT), b"body!"),
    ],
)
def test_the_letter_determines_the_state_its_times_and_whether_there_is_a_result(
    letters: bytes, state: State, sending: bool, times: Any, result: bytes | None
) -> None:
    for letter in letters:
        raw = raw_record(bytes([letter]), owner=b"12", body=b"body")
        record = layout.read(raw, "k", "t", decode=lambda record: record.body + b"!")

        assert (record.state, record.sending) == (state, sending)
        assert record.sending_until_ms == (record.at_ms if sending else 0)
        assert record.awaited == (12 if letter in b"WDX" else 0)
        assert (record.started_at, record.deadline, record.finished_at) == times
        assert record.result == result
        assert read(raw).result is None, "without a decoder"


def test_every_other_letter_belongs_to_another_version() -> None:
    """Those of the layout before are among them."""
    for letter in set(range(256)) - set(b"WBAbaVTtDEX"):
        with pytest.raises(CorruptRecordError, match="shop.charge:digest .*another version"):
            read(raw_record(bytes([letter])))


def test_a_turn_names_a_record_and_is_none() -> None:
    turn = (1_763_726_400_123_457).to_bytes(7, "big") + b"idem:{idem:t:k}:message"

    assert layout.turn_holder(turn) == "idem:{idem:t:k}:message"
    assert layout.turn_holder(raw_record()) is layout.turn_holder(b"") is None
    with pytest.raises(CorruptRecordError):
        read(turn)


def test_a_record_cut_short_anywhere_is_corrupt() -> None:
    raw = raw_record(tail=b"json")

    for length in range(len(raw)):
        with pytest.raises(CorruptRecordError, match="damaged"):
            read(raw[:length])


@pytest.mark.parametrize(
    "damaged",
    [
        raw_record(task_id=b"\xff\xfe"),
        raw_record(task_id=b"\0too short"),
        raw_record(worker=b"\xff"),
        raw_record(b"W", owner=b"soon"),
    ],
    ids=["task-id", "uuid", "worker", "owner"],
)
def test_a_field_that_is_not_text_is_corrupt(damaged: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        read(damaged)


# Random bytes are hardly ever a record, so draw random fields, and change a byte of a record, too.
records = st.builds(
    raw_record,
    st.sampled_from([b"W", b"A", b"V", b"D", b"E", b"G"]),
    attempt=st.integers(0, 255),
    token=st.integers(0, 2**56 - 1),
    at_ms=st.integers(0, 2**48 - 1),
    fingerprint=st.binary(max_size=255),
    task_id=st.binary(max_size=40),
    worker=st.binary(max_size=255),
    owner=st.binary(max_size=255) | st.integers(0, 2**60).map(lambda number: b"%d" % number),
    tail=st.binary(max_size=10),
    body=st.binary(max_size=40),
)


@st.composite
def damaged_records(draw: st.DrawFn) -> bytes:
    raw = bytearray(draw(records))
    raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


@given(st.binary(max_size=60) | records | damaged_records())
@example(raw_record(at_ms=2**48 - 1))
@example(raw_record(b"V", at_ms=2**48 - 1))
@example(raw_record(token=2**56 - 1))
def test_any_bytes_are_a_record_or_corrupt(raw: bytes) -> None:
    try:
        record = read(raw)
    except CorruptRecordError:
        return
    # Listing records uses all of these.
    assert isinstance(record.state, State)
    assert record.deadline is None or record.deadline.year >= 1970
    assert record.finished_at is None or record.finished_at.year >= 1970
    assert record.started_at is None or record.started_at.year >= 1970
    assert repr(record)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
    | st.uuids().map(str)
    | st.uuids().map(lambda uuid: uuid.hex)
    | st.uuids().map(lambda uuid: str(uuid).upper())
    | st.uuids().map(lambda uuid: uuid.urn)
)
@example("")
@example("\0")
@example("\0sixteen letters!")
def test_a_task_id_of_any_form_is_read_back_unchanged(task_id: str) -> None:
    assert layout.read_task_id(layout.write_task_id(task_id)) == task_id


def test_the_ids_that_celery_generates_take_17_bytes() -> None:
    task_id = str(uuid4())

    assert layout.write_task_id(task_id) == b"\0" + UUID(task_id).bytes
    assert layout.write_task_id("nightly-report") == b"nightly-report"


def test_a_task_id_that_a_record_cannot_hold_is_rejected() -> None:
    assert len(layout.write_task_id("\0" + "x" * 999)) == 1_001

    with pytest.raises(IdempotencyError, match="has 1001 bytes, but a record can hold 1000"):
        layout.write_task_id("x" * 1_001)


@pytest.mark.parametrize(
    ("owner", "orphaned_seconds"), [(b"8 bytes.", None), (b"8 bytes.0", 0), (b"8 bytes.250", 0.25)]
)
def test_an_execution_reads_what_it_needs(owner: bytes, orphaned_seconds: float | None) -> None:
    raw = raw_record(b"B", token=2**50, attempt=2, owner=owner, body=b"steps")

    assert layout.begun(raw) == (2**50, 2, b"steps", orphaned_seconds)


@pytest.mark.parametrize(
    ("letter", "owner", "end"),
    [
        (b"a", b"process_lost", "process_lost"),
        (b"a", b"8 bytes.", None),
        (b"a", b"8 bytes.250", None),
        (b"A", b"terminated", None),
    ],
)
def test_only_an_abandoned_one_has_an_end(letter: bytes, owner: bytes, end: str | None) -> None:
    assert read(raw_record(letter, owner=owner)).ended_by == end


def test_a_payload_is_read_back_from_its_bytes() -> None:
    payload = Payload("json+gzip", b"two\nlines")

    assert payload.to_bytes() == b"json+gzip\ntwo\nlines"
    assert Payload.from_bytes(payload.to_bytes()) == payload


def test_a_state_prints_as_its_name() -> None:
    assert f"{State.COMPLETED}" == str(State.COMPLETED) == "COMPLETED" == State.COMPLETED
    assert [state for state in State if state.finished] == [State.COMPLETED, State.FAILED]


def test_a_record_is_immutable_and_its_repr_omits_the_body() -> None:
    secret = layout.read(raw_record(b"V", body=b"4111-1111"), "k", "t")

    with pytest.raises((FrozenInstanceError, TypeError)):
        secret.attempt = 2  # type: ignore[misc]
    assert "4111" not in repr(secret)
