"""The Lua scripts: found, read by their heads, and called by name.

A script's head lists its KEYS, ARGV and REPLIES, each a name and what it means. That list *is* the
signature: calls pass arguments by those names, and an answer that the head does not list is an
error. The unit tests hold heads and bodies together. Under INCLUDE it names the
file in which the script goes on, if it shares its end with others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import NamedTuple

from celery_idempotent.errors import IdempotencyError

#: Shared by all scripts, put before each of them.
PRELUDE = "prelude"

#: In a wheel the scripts lie inside the package, in a checkout beside it.
_FOLDERS = (Path(__file__).parents[1] / "lua", Path(__file__).parents[2] / "lua")


class Reply(NamedTuple):
    """What every script answers."""

    #: One of the script's REPLIES.
    case: str
    #: The record that is there now, empty if none or if the script has no need to tell.
    raw: bytes
    #: The server's time in milliseconds; 0 where the answer goes by none.
    now_ms: int


@dataclass(frozen=True)
class Script:
    """One script, whatever calls it."""

    name: str
    source: str
    argv: tuple[str, ...]
    replies: frozenset[str]
    sha: str

    def reply(self, answer: bytes) -> Reply:
        """The answer of a call as a value."""
        case, seconds, microseconds, raw = answer.split(b" ", 3)
        name = case.decode()
        if name not in self.replies:
            raise IdempotencyError(f"the script {self.name} gave an unknown answer: {name!r}")
        return Reply(name, raw, int(seconds) * 1000 + int(microseconds) // 1000)


@cache
def load(name: str) -> Script:
    """The script of this name, with the prelude before it, and its end behind it."""
    text = read_source(name)
    head = read_head(text)
    source = "\n".join([read_source(PRELUDE), text, *map(read_source, head["INCLUDE"])])
    return Script(
        name=name,
        source=source,
        argv=head["ARGV"],
        replies=frozenset(head["REPLIES"]),
        sha=sha1(source.encode(), usedforsecurity=False).hexdigest(),
    )


def read_source(name: str) -> str:
    """The text of lua/`name`.lua."""
    for folder in _FOLDERS:
        path = folder / f"{name}.lua"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise IdempotencyError(f"lua/{name}.lua is missing: the installation is not whole")


def read_head(text: str) -> dict[str, tuple[str, ...]]:
    """The names that a script's head lists under INCLUDE, KEYS, ARGV and REPLIES."""
    sections: dict[str, list[str]] = {"INCLUDE": [], "KEYS": [], "ARGV": [], "REPLIES": []}
    section = ""
    for transport in _head_lines(text):
        if transport.strip() in sections:
            section = transport.strip()
        elif section and (entry := re.match(r" {2}([a-z_]+) ", transport)):
            sections[section].append(entry[1])
    return {name: tuple(entries) for name, entries in sections.items()}


def _head_lines(text: str) -> Iterator[str]:
    for transport in text.splitlines():
        if not transport.startswith("--"):
            return
        yield transport[2:].removeprefix(" ")
