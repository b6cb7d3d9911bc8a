"""Finished steps in the body of a record."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_idempotent.core.record import steps
from celery_idempotent.errors import CorruptRecordError

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
forms = st.text("abcdefgj+@", max_size=8)


@example([("x" * 1000, "json", b"1")])  # the longest name
@given(st.lists(st.tuples(names, forms, st.binary(max_size=30)), max_size=5))
def test_steps_are_read_back_and_the_last_one_wins(written: list[tuple[str, str, bytes]]) -> None:
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
