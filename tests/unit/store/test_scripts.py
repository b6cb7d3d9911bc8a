"""The loader of the scripts."""

from __future__ import annotations

from hashlib import sha1

import pytest

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.store import scripts
from celery_idempotent.store.scripts import Reply

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


def test_a_script_has_the_prelude_its_include_and_the_digest_of_all() -> None:
    script = scripts.load("complete")

    parts = [scripts.read_source(name) for name in ("layout", "prelude", "complete", "epilogue")]
    assert script.source == "\n".join(parts)
    assert script.sha == sha1(script.source.encode()).hexdigest()
    assert scripts.load("complete") is script


def test_a_part_of_a_script_may_precede_the_prelude() -> None:
    source = scripts.load("begin").source
    before, after = scripts.read_source("begin").split("-- PRELUDE\n")

    parts = [scripts.read_source("layout"), before, scripts.read_source("prelude"), after]
    assert source == "\n".join(parts)
    assert source.index("redis.call('GET', record)") < source.index("local function")


def test_a_reply_is_a_value() -> None:
    assert scripts.load("complete").reply(b"ok 5 6789 a raw one") == Reply("ok", b"a raw one", 5006)
    assert scripts.load("complete").reply(b"lost 5 678 ") == Reply("lost", b"", 5000)


def test_a_reply_that_the_head_does_not_list_is_an_error() -> None:
    with pytest.raises(IdempotencyError, match="complete returned an unknown reply: 'begun'"):
        scripts.load("complete").reply(b"begun 5 6 ")


def test_a_missing_script_is_an_error() -> None:
    with pytest.raises(IdempotencyError, match=r"lua/nonesuch\.lua is missing"):
        scripts.load("nonesuch")
