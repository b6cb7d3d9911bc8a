"""Which values of the header Idempotency-Key are keys."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.contrib.http.request import MAX_KEY_LENGTH, parse_key

BARE = "".join(
    sorted(set(string.digits + string.ascii_letters + string.punctuation) - set('",;\\'))
)
QUOTED = string.digits + string.ascii_letters + string.punctuation + " "


def quote(key: str) -> str:
    """Returns the key as a String of RFC 8941."""
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ('"8e03978e-40d5-43e8-bc93-6894a57f9324"', "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        ("8e03978e-40d5-43e8-bc93-6894a57f9324", "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        (r'"a\"b\\c"', r"a\"b\c".replace(r"\"", '"')),
        ('"a b, c; d"', "a b, c; d"),
        (' \t"a"\t ', "a"),
        ('"a";version=1', "a"),
        ('"a"; v="x\\"y"; flag; *t=tok/en; n=-1.5; b=:YQ==:; q=?1', "a"),
        (BARE, BARE),
        ("x" * MAX_KEY_LENGTH, "x" * MAX_KEY_LENGTH),
        ('"' + '\\"' * MAX_KEY_LENGTH + '"', '"' * MAX_KEY_LENGTH),
    ],
)
def test_a_key_is_a_structured_string_or_bare(field: str, key: str) -> None:
    assert parse_key([field]) == key


@pytest.mark.parametrize(
    "field",
    [
        *("", " ", '""', '"', '"a', 'a"', '"a"b', '"a" b', '"a", "b"', "a b", "a,b", "a;b"),
        *(r"a\b", r'"a\b"', '"\\"', '"é"', "é", "a\x00", "a\x7f", "a\tb", '"a\tb"', "ключ"),
        *('"a";', '"a";=1', '"a";A=1', '"a";x=', '"a";x=é'),
        *("x" * (MAX_KEY_LENGTH + 1), quote("x" * (MAX_KEY_LENGTH + 1)), '"a"' + "; b" * 1000),
    ],
)
def test_anything_else_is_refused(field: str) -> None:
    assert parse_key([field]) is None


@pytest.mark.parametrize("fields", [[], ["a", "a"], ["a", "b"], ['"a"', ""]])
def test_a_key_is_sent_once(fields: list[str]) -> None:
    assert parse_key(fields) is None


@given(st.text(QUOTED, min_size=1, max_size=MAX_KEY_LENGTH))
def test_every_text_can_be_quoted(key: str) -> None:
    assert parse_key([quote(key)]) == key


@given(st.text(BARE, min_size=1, max_size=MAX_KEY_LENGTH))
def test_a_quoted_key_equals_a_bare_one(key: str) -> None:
    assert parse_key([key]) == parse_key([quote(key)]) == key


@given(st.text(max_size=40))
def test_no_field_is_an_error(field: str) -> None:
    key = parse_key([field])
    assert key is None or (0 < len(key) <= MAX_KEY_LENGTH and key.isascii() and key.isprintable())
