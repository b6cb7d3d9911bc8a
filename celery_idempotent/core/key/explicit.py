"""Explicit keys: keys that callers supply, such as a request id."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from celery_idempotent.core.key.key import Key
from celery_idempotent.errors import KeyRuleError

#: Maximum characters in the key of a message, over all parts of a tuple.
MAX_LENGTH = 255


def message_form(task: str, value: Any) -> str | list[str]:
    """Returns an explicit key in the form that a message carries: text, or a list of texts.

    Every encoding of headers returns this form unchanged, so publisher and worker derive the same
    key from it.

    Raises:
        KeyRuleError: if `value` cannot be a key. The message never shows it.
    """
    if isinstance(value, Key):
        # The call would run even if a call with that key has run before.
        raise KeyRuleError(
            f"{task}: idempotency_key is a Key, and would be hashed to another key; leave it out "
            "to derive the key from the arguments, or pass its str()"
        )
    parts = [_part(part) for part in (value if isinstance(value, (list, tuple)) else [value])]
    if not parts or not all(parts):
        raise KeyRuleError(
            f"{task}: idempotency_key must be non-empty text, an integer, a UUID, a tuple or list "
            "of these, or False"
        )
    length = sum(map(len, parts))
    if length > MAX_LENGTH:
        raise KeyRuleError(
            f"{task}: idempotency_key has {length} characters, and {MAX_LENGTH} are allowed: pass "
            "a digest of it"
        )
    return parts if isinstance(value, (list, tuple)) else parts[0]


def as_text(value: Any) -> Any:
    """Returns an integer or a UUID as text, anything else unchanged."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)  # the text of an IntEnum differs between Python versions
    return str(value) if isinstance(value, UUID) else value


def _part(value: Any) -> str:
    """Returns one part of a key as text; empty if it cannot be one."""
    text = as_text(value)
    return str.__str__(text) if isinstance(text, str) else ""
