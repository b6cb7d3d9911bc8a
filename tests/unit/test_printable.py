"""Text from outside is shown on one line, without control characters and tags."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.core.printable import MAX_BYTES, did_you_mean, one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("order 42", "order 42"),
        ("Straße 5, 東京", "Straße 5, 東京"),
        ("a & b \\n", "a & b \\n"),
        ("42\n2026-11-22 ERROR forged", "42\\x0a2026-11-22 ERROR forged"),
        ("\x1b[2J\x9b", "\\x1b[2J\\x9b"),
        ("abc\u202edef\u2028", "abc\\u202edef\\u2028"),
        ("\udc80 \U000e0001", "\\udc80 \\U000e0001"),
        ("<script>alert(1)</script>", "\\x3cscript\\x3ealert(1)\\x3c/script\\x3e"),
        ("", ""),
    ],
)
def test_what_could_harm_a_reader_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_long_text_is_cut_and_says_so() -> None:
    assert printable("x" * MAX_BYTES) == "x" * MAX_BYTES
    assert printable("x" * 10_000) == "x" * (MAX_BYTES - 3) + "…"
    assert printable("東" * 100) == "東" * ((MAX_BYTES - 3) // 3) + "…"


@given(st.text(st.characters(), max_size=300))
def test_any_text_fits_on_one_line_and_is_stable(text: str) -> None:
    shown = printable(text)

    assert len(shown.encode()) <= MAX_BYTES
    assert shown.isprintable()
    assert not set("<>") & set(shown)
    assert printable(shown) == shown


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("charge", "shop.tasks.charge"),
        ("chrage", "shop.tasks.charge"),
        ("shop.tasks.chrage", "shop.tasks.charge"),
        ("send", "mail.send or sms.send"),
        ("refund", ""),
    ],
)
def test_a_similar_name_is_suggested(name: str, suggested: str) -> None:
    known = ["shop.tasks.charge", "mail.send", "sms.send"]

    assert did_you_mean(name, iter(known)) == (suggested and f"; did you mean {suggested}?")


@given(st.text(st.characters(), max_size=300))
def test_one_line_keeps_all_that_is_printable(text: str) -> None:
    shown = one_line(text)

    assert shown.isprintable()
    assert one_line(shown) == shown
    assert shown == text or not text.isprintable()


@pytest.mark.parametrize(
    "mark",
    "\x00\n\r\x1b\x7f\x85\x9b\u061c\u200b\u200d\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff",
)
def test_controls_and_marks_of_direction_become_escapes(mark: str) -> None:
    assert one_line(f"a{mark}b") in (f"a\\x{ord(mark):02x}b", f"a\\u{ord(mark):04x}b")
