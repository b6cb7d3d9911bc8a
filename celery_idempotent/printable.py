"""Text from outside that is shown to people: in tables, logs, events and JSON."""

from __future__ import annotations

#: Bytes that the text may have in UTF-8. A record has room for 247.
MAX_BYTES = 200

#: Harmless in a terminal and a log, but not in a page that forgets to escape them.
_MARKUP = "<>"


def printable(text: str) -> str:
    r"""Returns `text` on one line, cut to `MAX_BYTES`, without control characters and tags.

    Characters that are not printable, and ``<`` and ``>``, become escapes such as ``\x1b``: a value
    can neither end its line in a log, nor move the cursor of a terminal, nor change the direction
    of text. Text that this function has returned is returned as it is.
    """
    text = text[: MAX_BYTES + 1]
    if not text.isprintable() or any(mark in text for mark in _MARKUP):
        text = "".join(map(_escaped, text))
    data = text.encode()
    if len(data) <= MAX_BYTES:
        return text
    return data[: MAX_BYTES - 3].decode(errors="ignore") + "…"


def _escaped(character: str) -> str:
    if character.isprintable() and character not in _MARKUP:
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
