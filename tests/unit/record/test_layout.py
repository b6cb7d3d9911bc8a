"""Reading the bytes of a record, and its properties."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from datetime import datetime, timezone
from uuid import UUID, uuid4

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_idempotent.errors import CorruptRecordError, IdempotencyError
from celery_idempotent.record import layout
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record, State
from tests.store.record_harness import UUID_ID, raw_record


def read(raw: bytes) -> Record:
    return layout.read(raw, "shop.charge:digest", "shop.charge")


def test_every_field_is_read_from_its_position() -> None:
    raw = raw_record(b"S", attempt=3, body=b"steps")

    record = read(raw)

    assert record == Record(
        state=State.STARTED,
        key="shop.charge:digest",
        task="shop.charge",
        task_id=UUID_ID,
        worker="celery@host/4711",
        token=1_763_726_400_123_457,
        attempt=3,
        at_ms=1_763_726_460_123,
        fingerprint=b"8 bytes!",
        body=b"steps",
    )


@pytest.mark.parametrize("fingerprint", [b"8 bytes!", b""])
@pytest.mark.parametrize("label", ["", "order 42", "Straße 東京"])
def test_a_label_follows_the_fingerprint(fingerprint: bytes, label: str) -> None:
    field = layout.write_fingerprint(fingerprint, label)

    record = read(raw_record(fingerprint=field))

    assert (record.fingerprint, record.label) == (fingerprint, label)
    assert label or field == fingerprint


def test_an_outcome_is_read_with_its_format() -> None:
    record = read(raw_record(b"C", execution_id=b"", form=b"json+gzip", body=b"\0binary\xff"))

    assert (record.format, record.body) == ("json+gzip", b"\0binary\xff")


@pytest.mark.parametrize(
    ("letter", "state", "sending"),
    [
        (b"R", State.RESERVED, False),
        (b"S", State.STARTED, False),
        (b"C", State.COMPLETED, False),
        (b"P", State.COMPLETED, True),
        (b"F", State.FAILED, False),
        (b"Q", State.FAILED, True),
    ],
)
def test_the_letter_determines_the_state(letter: bytes, state: State, sending: bool) -> None:
    record = read(raw_record(letter, execution_id=b"x" * 16 + b"\0\0\0\0\1\2"))

    assert record.state is state
    assert record.sending is sending
    assert record.sending_until_ms == (258 if sending else 0)


@pytest.mark.parametrize("letter", [b"P", b"Q"])
def test_a_continuation_without_its_deadline_is_corrupt(letter: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        read(raw_record(letter, execution_id=b"x" * 21))


def test_every_other_letter_belongs_to_a_newer_version() -> None:
    for letter in set(range(256)) - set(b"RSCFPQ"):
        with pytest.raises(CorruptRecordError, match="shop.charge:digest .*newer version"):
            read(raw_record(bytes([letter])))


def test_a_record_cut_short_anywhere_is_corrupt() -> None:
    raw = raw_record(form=b"json")

    for length in range(len(raw)):
        with pytest.raises(CorruptRecordError, match="damaged"):
            read(raw[:length])


@pytest.mark.parametrize(
    "damaged",
    [
        raw_record(task_id=b"\xff\xfe"),
        raw_record(task_id=b"\0too short"),
        raw_record(worker=b"\xff"),
        raw_record(form=b"\xff"),
    ],
    ids=["task-id", "uuid", "worker", "format"],
)
def test_a_field_that_is_not_text_is_corrupt(damaged: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        read(damaged)


# Random bytes are hardly ever a record, so draw random fields, and change a byte of a record, too.
records = st.builds(
    raw_record,
    st.sampled_from([b"R", b"S", b"C", b"D", b"F", b"G"]),
    attempt=st.integers(0, 255),
    token=st.integers(0, 2**56 - 1),
    at_ms=st.integers(0, 2**48 - 1),
    fingerprint=st.binary(max_size=255),
    task_id=st.binary(max_size=40),
    worker=st.binary(max_size=255),
    execution_id=st.binary(max_size=255),
    form=st.binary(max_size=10),
    body=st.binary(max_size=40),
)


@st.composite
def damaged_records(draw: st.DrawFn) -> bytes:
    raw = bytearray(draw(records))
    raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


@given(st.binary(max_size=60) | records | damaged_records())
@example(raw_record(at_ms=2**48 - 1))
@example(raw_record(b"C", at_ms=2**48 - 1))
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
    assert len(layout.write_task_id("\0" + "x" * 65_533)) == 65_535

    with pytest.raises(IdempotencyError, match="has 65535 bytes, but a record can hold 65534"):
        layout.write_task_id("x" * 65_535)


@pytest.mark.parametrize("task_id", [UUID_ID, "a", "x" * 300], ids=["uuid", "short", "long"])
@pytest.mark.parametrize("steps", [b"", b"steps"])
def test_a_replacement_is_read_back_and_corrupt_if_cut_short(task_id: str, steps: bytes) -> None:
    generation = 2**56 - 2
    body = layout.write_replacement(generation, task_id, steps)

    assert layout.read_awaited(body) == generation
    assert layout.read_replacement(body, "key") == task_id
    for length in range(len(body) - len(steps)):
        with pytest.raises(CorruptRecordError, match="key"):
            layout.read_replacement(body[:length], "key")


def test_a_replacement_without_a_task_id_is_corrupt() -> None:
    with pytest.raises(CorruptRecordError, match="key"):
        layout.read_replacement(layout.write_replacement(1, "", b"steps"), "key")


@pytest.mark.parametrize(
    ("form", "orphaned_seconds"), [(b"", 0), (b"250", 0.25), (b"250,1763", 0.25), (b",1763", 0)]
)
def test_an_execution_reads_what_it_needs(form: bytes, orphaned_seconds: float) -> None:
    raw = raw_record(token=2**50, attempt=2, form=form, body=b"steps")

    assert layout.begun(raw) == (2**50, 2, b"steps", orphaned_seconds)


@pytest.mark.parametrize(
    ("form", "ended_by"),
    [
        *((form, None) for form in (b"", b"250", b"250,1763", b",1763")),
        (b"process_lost", "process_lost"),
        (b"process_lost,1763", "process_lost"),
    ],
)
def test_only_an_abandoned_execution_has_an_end(form: bytes, ended_by: str | None) -> None:
    assert read(raw_record(b"S", form=form)).ended_by == ended_by
    assert read(raw_record(b"C", form=b"json")).ended_by is None


def test_a_payload_is_read_back_from_its_bytes() -> None:
    payload = Payload("json+gzip", b"two\nlines")

    assert payload.to_bytes() == b"json+gzip\ntwo\nlines"
    assert Payload.from_bytes(payload.to_bytes()) == payload


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
    letter: bytes, started: datetime | None, deadline: datetime | None, finished: datetime | None
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
