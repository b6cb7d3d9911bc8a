"""Which requests are the same, and which values of the header Idempotency-Key are keys."""

from __future__ import annotations

import string
from io import BytesIO
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from werkzeug import Request

from celery_idempotent.contrib.http.request import MAX_KEY_LENGTH, fingerprint, parse_key
from tests.http.drivers.asgi import scope

REQUEST: dict[str, Any] = {
    "method": "POST",
    "prefix": "/api",
    "path": "/pay",
    "query": "a=1",
    "content_type": "application/json",
    "content_encoding": "",
    "body": b"{}",
}

WSGI_NAMES = {
    "method": "REQUEST_METHOD",
    "prefix": "SCRIPT_NAME",
    "path": "PATH_INFO",
    "query": "QUERY_STRING",
    "content_type": "CONTENT_TYPE",
    "content_encoding": "HTTP_CONTENT_ENCODING",
}


def fingerprint_of(*, body: bytes, **parts: str) -> list[str | bytes]:
    """Returns the fingerprint of a request, which is the same in WSGI and ASGI."""
    by_wsgi = fingerprint({WSGI_NAMES[name]: part for name, part in parts.items()}, body)
    content = ("content_type", "content_encoding")
    headers = [(name.replace("_", "-"), parts[name]) for name in content]
    target = {"method": parts["method"], "root_path": parts["prefix"], "path": parts["path"]}
    by_asgi = scope(None, headers, query_string=parts["query"].encode(), **target)
    assert by_wsgi == fingerprint(by_asgi, body)
    return by_wsgi


@pytest.mark.parametrize("part", REQUEST)
def test_every_part_counts(part: str) -> None:
    changed = REQUEST | {part: REQUEST[part] + (b"x" if part == "body" else "x")}
    assert fingerprint_of(**changed) != fingerprint_of(**REQUEST) == fingerprint_of(**REQUEST)


def test_parts_do_not_run_into_each_other() -> None:
    moved = REQUEST | {"prefix": "/api/pay", "path": ""}
    assert fingerprint_of(**moved) != fingerprint_of(**REQUEST)


def multipart(form: str, body: str, boundary: str, **parts: str) -> list[str | bytes]:
    content_type = f"multipart/form-data; {form.format(boundary)}"
    data = body.format(boundary).encode()
    return fingerprint_of(**REQUEST | parts | {"content_type": content_type, "body": data})


BODY = "--{0}\r\nContent-Disposition: form-data; name=f\r\n\r\nvalue\r\n--{0}--\r\n"


@pytest.mark.parametrize("form", ["boundary={}", 'boundary="{}"', "Boundary={}; charset=utf-8"])
def test_the_boundary_of_a_multipart_body_does_not_count(form: str) -> None:
    for body in (BODY, "\r\n" + BODY):
        assert multipart(form, body, "one") == multipart(form, body, "another-one")
    assert multipart(form, BODY, "one") != multipart(form, BODY.replace("value", "other"), "one")


def test_a_boundary_that_is_in_the_form_counts() -> None:
    """A form with boundary 1 and amount 1 is not the one with boundary 2 and amount 2."""
    one, two = (multipart("boundary={}", BODY.replace("value", b), b) for b in ("1", "2"))
    assert one != two


@pytest.mark.parametrize(
    "body",
    [
        "preamble\r\n" + BODY,
        BODY + "epilogue",
        BODY.replace("\r\n", "\n"),
        BODY.replace("{0}--", "{0}"),
        BODY.replace("{0}\r", "{0} \r"),
        BODY.replace("value", "\n--{0}\nContent-Disposition: form-data; name=g\n\nvalue"),
        *("", "--{0}--", "--{0}", "{0}"),
    ],
)
def test_the_boundary_of_a_body_that_parsers_may_read_in_other_ways_counts(body: str) -> None:
    assert multipart("boundary={}", body, "one") == multipart("boundary={}", body, "one")
    assert multipart("boundary={}", body, "one") != multipart("boundary={}", body, "two")


@pytest.mark.parametrize(
    "form",
    [
        *("boundary={}; boundary=one", "boundary=one; boundary={}", 'a="; boundary={}"'),
        *("boundary={}, text/plain", "boundary*=utf-8''{}", 'boundary="{}', "boundary={};"),
    ],
)
def test_a_boundary_that_parsers_may_find_elsewhere_counts(form: str) -> None:
    assert multipart(form, BODY, "one") != multipart(form, BODY, "two")


def test_a_boundary_in_an_encoded_body_counts() -> None:
    one, two = (multipart("boundary={}", BODY, b, content_encoding="x") for b in ("one", "two"))
    assert one != two


BOUNDARIES = st.sampled_from(["1", "2", "11", "-", "-1", "1-2", "one"])
HEAD = "\r\nContent-Disposition: form-data; name=amount\r\n\r\n"
PIECES = [HEAD, "--", "{0}", "1", "2", "\r\n", "\n", "\r", " ", "\r\n--{0}", "\n--{0}", "--{0}--"]
FORMS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def amounts(body: str, boundary: str) -> list[str]:
    """Returns what a framework reads of a form."""
    content_type = f"multipart/form-data; boundary={boundary}"
    data = body.format(boundary).encode()
    stream = {"wsgi.input": BytesIO(data), "CONTENT_LENGTH": str(len(data))}
    form = Request({"REQUEST_METHOD": "POST", "CONTENT_TYPE": content_type, **stream}).form
    return form.getlist("amount")


@example("1", "2", "{0}")
@given(BOUNDARIES, BOUNDARIES, FORMS)
def test_two_forms_that_are_equal_are_read_as_equal(one: str, other: str, form: str) -> None:
    for body in (form, "--{0}" + form + "\r\n--{0}--\r\n", f"--{{0}}{HEAD}{form}\r\n--{{0}}--\r\n"):
        if multipart("boundary={}", body, one) == multipart("boundary={}", body, other):
            assert amounts(body, one) == amounts(body, other)


def test_a_boundary_of_another_type_counts() -> None:
    one = REQUEST | {"content_type": "text/plain; boundary=a", "body": b"a"}
    other = REQUEST | {"content_type": "text/plain; boundary=b", "body": b"b"}
    assert fingerprint_of(**one) != fingerprint_of(**other)


@given(st.text(st.characters(max_codepoint=255), max_size=80), st.binary(max_size=80))
def test_no_field_is_an_error(text: str, body: bytes) -> None:
    for content_type in (text, f"multipart/x; boundary={text}", f'multipart/x; boundary="{text}"'):
        assert fingerprint_of(**REQUEST | {"content_type": content_type, "body": body})


QUOTED = string.digits + string.ascii_letters + string.punctuation + " "
BARE = "".join(sorted(set(QUOTED) - set('",;\\ ')))


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
def test_no_key_field_is_an_error(field: str) -> None:
    key = parse_key([field])
    assert key is None or (0 < len(key) <= MAX_KEY_LENGTH and key.isascii() and key.isprintable())
