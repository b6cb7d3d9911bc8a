"""How a key was derived, to find out why two calls have the same key or different ones."""

from __future__ import annotations

from typing import NamedTuple

from celery_idempotent.key.key import Key


class Argument(NamedTuple):
    """One argument of a call."""

    name: str
    #: Its canonical bytes; None if its type has none.
    canonical_bytes: bytes | None
    #: Whether it equals its default: it is then left out of key and fingerprint, given or not.
    at_default: bool
    #: Whether the rule uses it; None where only the rule's own code could answer.
    in_key: bool | None


class Explanation(NamedTuple):
    """A key, and what it was derived from."""

    #: A description of the rule.
    rule: str
    arguments: tuple[Argument, ...]
    #: What was hashed, after the task's name.
    canonical_bytes: bytes
    key: Key
