"""Shows how a key was derived, and so why two calls share a key or do not."""

from __future__ import annotations

from typing import NamedTuple

from celery_idempotent.key.key import Key


class Argument(NamedTuple):
    """One argument of a call."""

    name: str
    #: Its canonical bytes; None if its type has none.
    canonical_bytes: bytes | None
    #: Whether it equals its default, which leaves it out of fingerprint and all-arguments keys.
    at_default: bool
    #: Whether the rule uses it; None if only the rule's own code knows.
    in_key: bool | None


class Explanation(NamedTuple):
    """A key and what it was derived from."""

    #: A description of the rule.
    rule: str
    arguments: tuple[Argument, ...]
    #: What was hashed, after the task's name.
    canonical_bytes: bytes
    key: Key
