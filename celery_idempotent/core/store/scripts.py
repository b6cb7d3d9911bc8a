"""Loads the Lua scripts and the signatures in their heads.

A script's head lists its KEYS, ARGV and REPLIES, each with its meaning. These lists are the
signature: arguments are passed in the order of ARGV, and a reply that is not in REPLIES is an
error. Unit tests compare heads, bodies and commands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from celery_idempotent.errors import IdempotencyError

#: The scripts are inside the package in a wheel, and beside it in a checkout.
_FOLDERS = (files("celery_idempotent") / "lua", Path(__file__).parents[3] / "lua")


class Reply(NamedTuple):
    """The reply of a script."""

    #: One of the script's REPLIES.
    case: str
    #: The stored record; empty if there is none, or if the script does not return it.
    raw: bytes
    #: The server's time in milliseconds; 0 if the script did not read it.
    now_ms: int


@dataclass(frozen=True)
class Script:
    """One script and its signature."""

    name: str
    source: str
    argv: tuple[str, ...]
    replies: frozenset[str]
    sha: str

    def reply(self, raw_reply: bytes) -> Reply:
        """Parses a reply.

        Raises:
            IdempotencyError: if the head does not list it.
        """
        case, seconds, microseconds, raw = raw_reply.split(b" ", 3)
        name = case.decode()
        if name not in self.replies:
            raise IdempotencyError(f"the script {self.name} returned an unknown reply: {name!r}")
        return Reply(name, raw, int(seconds) * 1000 + int(microseconds) // 1000)


#: The sources of the scripts that were loaded, by their digests.
sources: dict[str, str] = {}


@cache
def load(name: str) -> Script:
    """Returns the script lua/`name`.lua."""
    source = _read_source(name)
    head = read_head(source)
    sha = sha1(source.encode(), usedforsecurity=False).hexdigest()
    sources[sha] = source
    return Script(name, source, head["ARGV"], frozenset(head["REPLIES"]), sha)


def _read_source(name: str) -> str:
    for folder in _FOLDERS:
        path = folder / f"{name}.lua"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise IdempotencyError(f"lua/{name}.lua is missing: reinstall celery-idempotent")


def read_head(text: str) -> dict[str, tuple[str, ...]]:
    """Returns the names that a script's head lists under KEYS, ARGV and REPLIES."""
    sections: dict[str, list[str]] = {"KEYS": [], "ARGV": [], "REPLIES": []}
    section = ""
    for line in takewhile(lambda line: line.startswith("--"), text.splitlines()):
        if (title := line[2:].strip()) in sections:
            section = title
        elif section and (entry := re.match(r"-- {3}([a-z_]+) ", line)):
            sections[section].append(entry[1])
    return {name: tuple(entries) for name, entries in sections.items()}
