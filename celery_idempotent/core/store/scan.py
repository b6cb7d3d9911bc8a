"""Reads the names of records: patterns for SCAN, and the keys that names represent.

`StoreConfig.name` writes these names. Other programs' names in the same Redis are ignored.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from celery_idempotent.core.key import Key

#: ``task:digest``. The limit keeps forged names out of pages; no task has so long a name.
_KEY = re.compile(r"[^:]{1,1000}:~?[A-Za-z0-9_-]{22}")


def key_of(text: str, prefix: str) -> Key | None:
    """Returns the key of a record's name, or of a `Record.key`; None if it is neither."""
    # A name first: if a task is named like the prefix, its name also begins like a key.
    return key_of_name(text, prefix) or _key(text)


def key_of_name(name: str, prefix: str) -> Key | None:
    """Returns the key of a record's name; None if it is another name."""
    text = name.removeprefix(f"{prefix}:")
    return None if text == name else _key(text)


def key_of_slot(name: str, prefix: str) -> Key | None:
    """Returns the key of a slot's name; None if it is another name."""
    of_key, end, rest = name.removeprefix(f"{prefix}:{{").rpartition("}:")
    return key_of_name(of_key, prefix) if end and not rest else None


def _key(text: str) -> Key | None:
    if not _KEY.fullmatch(text):
        return None
    task, _, digest = text.rpartition(":")
    return Key(unquote(task), digest)


def pattern(prefix: str, task: str | None) -> str:
    """Returns the pattern for the names of all records and slots, or of those of one task.

    It may also match names of other programs: check each with `key_of_name` or `key_of_slot`.
    """
    # A quoted task has none of the special characters of patterns.
    tasks = "" if task is None else f"{quote(task, safe='', errors='backslashreplace')}:*"
    return f"{_escaped(prefix)}:*{tasks}"


def message_pattern(prefix: str, task_id: str) -> str:
    """Returns the pattern for the name of a message's record under any key."""
    return f"{_escaped(prefix)}:{{*}}:{Key('', '').of_message(task_id).message}"


def key_of_message(name: str, prefix: str) -> Key | None:
    """Returns the key that a message's record belongs to; None if it is another name."""
    of_key = name.removeprefix(f"{prefix}:{{").rpartition("}:")[0]
    return key_of_name(of_key, prefix)


def _escaped(text: str) -> str:
    return re.sub(r"([\\*?\[\]^-])", r"\\\1", text)
