"""Renders commands that differ in a few places from the bytes of one sample."""

from __future__ import annotations


class Template:
    """A packed command with slots; ``render(values)`` returns the command.

    Args:
        packed: the command, with a sample in each slot.
        samples: one for each slot, in order. A sample that is a whole argument takes two
            values, its length and its bytes; one that is part of an argument takes a value of the
            same length.

    Raises:
        ValueError: if a sample is missing.
    """

    def __init__(self, packed: bytes, *samples: bytes) -> None:
        pattern = b""
        for sample in samples:
            whole = b"$%d\r\n%b\r\n" % (len(sample), sample)
            searched, slot = (whole, b"$%d\r\n%b\r\n") if whole in packed else (sample, b"%b")
            part, found, packed = packed.partition(searched)
            if not found:
                raise ValueError("a slot of the command is missing")
            pattern += part.replace(b"%", b"%%") + slot
        self.render = (pattern + packed.replace(b"%", b"%%")).__mod__
