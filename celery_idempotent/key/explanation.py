"""How a key came about, for people who wonder why two calls are one, or are not."""

from __future__ import annotations

from typing import NamedTuple

from celery_idempotent.key.key import Key


class Argument(NamedTuple):
    """One argument of a call."""

    name: str
    #: Its canonical bytes; None for a type that has none.
    form: bytes | None
    #: At its default, given or not: it takes no part.
    at_default: bool
    #: Whether the rule speaks of it; None where only the rule's own code could tell.
    in_key: bool | None


class Explanation(NamedTuple):
    """A key, and what it was made of."""

    #: The rule in words.
    rule: str
    arguments: tuple[Argument, ...]
    #: What was hashed, behind the task's name.
    form: bytes
    key: Key
