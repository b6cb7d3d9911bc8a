"""The loader of the scripts, and their heads: names, order and replies match the body."""

from __future__ import annotations

import re
from hashlib import sha1
from pathlib import Path

import pytest

from celery_idempotent.core.store import scripts
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.errors import IdempotencyError

FOLDER = Path(__file__).parents[3] / "lua"
NAMES = sorted(path.stem for path in FOLDER.glob("*.lua"))


def head_and_body(name: str) -> tuple[dict[str, tuple[str, ...]], str]:
    text = scripts.load(name).source
    return scripts.read_head(text), re.sub(r"--.*", "", text)


def taken_from(array: str, body: str) -> list[str]:
    """Return the names that the body gives to KEYS or ARGV, in order."""
    (names,) = re.findall(rf"local ([\w, ]+) = (?:unpack\({array}\)|{array}\[1\])$", body, re.M)
    assert body.count(f"{array}[") == (f"unpack({array})" not in body), "there are no others"
    return str(names).split(", ")


@pytest.mark.parametrize("name", NAMES)
class TestEachScript:
    def test_takes_the_arguments_of_its_head_in_that_order(self, name: str) -> None:
        head, body = head_and_body(name)

        assert list(head["ARGV"]) == taken_from("ARGV", body)

    def test_touches_the_keys_of_its_head_only(self, name: str) -> None:
        head, body = head_and_body(name)

        assert list(head["KEYS"]) == taken_from("KEYS", body)
        targets = set(re.findall(r"redis\.p?call\('(?!TIME)\w+', ([^,)]+)", body))
        # What the turn or the slot names is in the same slot of a cluster.
        named = {"name", "holder", "string.sub(pointer", "unpack(KEYS"}
        assert targets <= {*head["KEYS"], *named}

    def test_gives_the_replies_of_its_head(self, name: str) -> None:
        """That it gives no others is asserted wherever a script is called."""
        head, body = head_and_body(name)

        assert set(head["REPLIES"]) <= set(re.findall(r"'(\w+)'", body))
        assert len(set(head["REPLIES"])) == len(head["REPLIES"])

    def test_declares_every_variable(self, name: str) -> None:
        # A missing `local` is an error in Redis, but only when the line is executed.
        _, body = head_and_body(name)
        declared = {
            word
            for names in re.findall(r"local ([\w\s,]+?)\s*(?:=|$)", body, re.MULTILINE)
            for word in re.findall(r"\w+", names)
        }
        assigned = re.findall(r"^\s*([\w, ]+?)\s*=[^=]", body, re.MULTILINE)
        for names in assigned:
            if not names.startswith("local "):
                assert {n.strip() for n in names.split(",")} <= declared


HEAD = """\
-- sample: shows what a head looks like.
--
-- Words before the lists are no entries:
--   none of these
--
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
    head = {"KEYS": ("record",), "ARGV": ("token", "hold_ms"), "REPLIES": ("ok",)}

    assert scripts.read_head(HEAD) == head


def test_a_script_has_the_digest_of_its_file() -> None:
    script = scripts.load("settle")

    assert script.source == (FOLDER / "settle.lua").read_text("utf-8")
    assert script.sha == sha1(script.source.encode()).hexdigest()
    assert scripts.load("settle") is script


def test_a_reply_is_a_value() -> None:
    assert scripts.load("settle").reply(b"ok 5 6789 a raw one") == Reply("ok", b"a raw one", 5006)
    assert scripts.load("settle").reply(b"lost 5 678 ") == Reply("lost", b"", 5000)


def test_a_reply_that_the_head_does_not_list_is_an_error() -> None:
    with pytest.raises(IdempotencyError, match="settle returned an unknown reply: 'begun'"):
        scripts.load("settle").reply(b"begun 5 6 ")


def test_a_missing_script_is_an_error() -> None:
    with pytest.raises(IdempotencyError, match=r"lua/nonesuch\.lua is missing"):
        scripts.load("nonesuch")
