"""The loader of the scripts."""

from __future__ import annotations

from hashlib import sha1
from typing import Any

import pytest

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.key.key import Key
from celery_idempotent.store import commands, scripts
from celery_idempotent.store.scripts import Reply

KEY = Key("shop.charge", "digest")

HEAD = """\
-- sample: shows what a head looks like.
--
-- Words before the lists are no entries:
--   none of these
--
-- INCLUDE
--   part               that others have too
-- KEYS
--   record             the key's record
-- ARGV
--   token              of the execution
--   hold_ms            how long; a line may go on
--                      like this
-- REPLIES
--   ok                 done

-- KEYS
--   not_in_the_head    because code came before
local record = KEYS[1]
"""


def test_a_head_is_read_up_to_the_first_line_of_code() -> None:
    assert scripts.read_head(HEAD) == {
        "INCLUDE": ("part",),
        "KEYS": ("record",),
        "ARGV": ("token", "hold_ms"),
        "REPLIES": ("ok",),
    }


def test_a_script_comes_with_the_prelude_and_its_end_and_the_digest_of_all() -> None:
    script = scripts.load("complete")

    parts = [scripts.read_source(name) for name in ("prelude", "complete", "epilogue")]
    assert script.source == "\n".join(parts)
    assert script.sha == sha1(script.source.encode()).hexdigest()
    assert scripts.load("complete") is script


def test_arguments_go_by_name_in_the_order_of_the_head() -> None:
    command = commands._command("complete", KEY, retention_ms=4, body=3, format=2, token=1)

    assert command.arguments == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "values",
    [
        {"token": 1, "format": 2, "body": 3},
        {"token": 1, "format": 2, "body": 3, "retention_ms": 4, "more": 5},
        {"token": 1, "format": 2, "body": 3, "retention": 4},
    ],
    ids=["missing", "more", "other"],
)
def test_other_names_than_those_of_the_head_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(KeyError):
        commands._command("complete", KEY, **values)


def test_a_reply_is_a_value() -> None:
    assert scripts.load("complete").reply(b"ok 5 6789 a raw one") == Reply("ok", b"a raw one", 5006)
    assert scripts.load("complete").reply(b"lost 5 678 ") == Reply("lost", b"", 5000)


def test_a_reply_that_the_head_does_not_list_is_an_error() -> None:
    with pytest.raises(IdempotencyError, match="complete gave an unknown answer: 'begun'"):
        scripts.load("complete").reply(b"begun 5 6 ")


def test_a_script_that_is_not_there_says_that_the_installation_is_not_whole() -> None:
    with pytest.raises(IdempotencyError, match=r"lua/nonesuch\.lua is missing"):
        scripts.load("nonesuch")
