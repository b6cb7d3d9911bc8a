"""Which requests are the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.contrib.http.fingerprint import fingerprint

REQUEST: dict[str, Any] = {
    "method": "POST",
    "prefix": "/api",
    "path": "/pay",
    "query": "a=1",
    "content_type": "application/json",
    "content_encoding": "",
    "body": b"{}",
}


@pytest.mark.parametrize("part", REQUEST)
def test_every_part_counts(part: str) -> None:
    changed = REQUEST | {part: REQUEST[part] + (b"x" if part == "body" else "x")}
    assert fingerprint(**changed) != fingerprint(**REQUEST) == fingerprint(**REQUEST)


def test_parts_do_not_run_into_each_other() -> None:
    moved = REQUEST | {"prefix": "/api/pay", "path": ""}
    assert fingerprint(**moved) != fingerprint(**REQUEST)


def multipart(form: str, body: str, boundary: str) -> list[str | bytes]:
    content_type = f"multipart/form-data; {form.format(boundary)}"
    data = body.format(boundary).encode()
    return fingerprint(**REQUEST | {"content_type": content_type, "body": data})


BODY = "--{0}\r\nContent-Disposition: form-data; name=f\r\n\r\nvalue\r\n--{0}--\r\n"


@pytest.mark.parametrize("form", ["boundary={}", 'boundary="{}"', "Boundary={}; charset=utf-8"])
def test_the_boundary_of_a_multipart_body_does_not_count(form: str) -> None:
    assert multipart(form, BODY, "one") == multipart(form, BODY, "another-one")
    assert multipart(form, BODY, "one") != multipart(form, BODY.replace("value", "other"), "one")


def test_a_boundary_of_another_type_counts() -> None:
    one = REQUEST | {"content_type": "text/plain; boundary=a", "body": b"a"}
    other = REQUEST | {"content_type": "text/plain; boundary=b", "body": b"b"}
    assert fingerprint(**one) != fingerprint(**other)


@given(st.text(st.characters(max_codepoint=255), max_size=80), st.binary(max_size=80))
def test_no_field_is_an_error(text: str, body: bytes) -> None:
    for content_type in (text, f"multipart/x; boundary={text}", f'multipart/x; boundary="{text}"'):
        assert fingerprint(**REQUEST | {"content_type": content_type, "body": body})
