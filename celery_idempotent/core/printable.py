"""Makes text of unknown origin safe to show in tables, logs, events and pages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Maximum bytes of the text in UTF-8. A record has room for 247.
MAX_BYTES = 200

#: Harmless in a terminal and a log, but not in a page that forgets to escape them.
_MARKUP = "<>"


def one_line(text: str) -> str:
    r"""Returns `text` on one line, without control characters.

    Characters that are not printable become escapes such as ``\x1b``: a value can neither end its
    line in a log, nor move the cursor of a terminal, nor change the direction of text. Text that
    this function has returned is returned as it is.
    """
    return text if text.isprintable() else "".join(map(_escaped, text))


def printable(text: str) -> str:
    """Returns `text` on one line, cut to `MAX_BYTES`, without tags."""
    text = one_line(text[: MAX_BYTES + 1])
    for mark in _MARKUP:
        text = text.replace(mark, f"\\x{ord(mark):02x}")
    data = text.encode()
    if len(data) <= MAX_BYTES:
        return text
    return data[: MAX_BYTES - 3].decode(errors="ignore") + "…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error about `name`: the most similar `known` names; empty if none.

    The last part of a dotted name may stand for it.
    """
    known = list(known)
    by_last_part = {each.rpartition(".")[2]: each for each in known}
    close = (
        [each for each in known if each.endswith(f".{name}")]
        or difflib.get_close_matches(name, known, 1)
        or [by_last_part[each] for each in difflib.get_close_matches(name, by_last_part, 1, 0.75)]
    )
    return f"; did you mean {' or '.join(close[:3])}?" if close else ""


def plural(number: int, noun: str) -> str:
    """Returns ``1 record`` or ``2,000 records``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
