"""The encoded form of a result, an error or the value of a step."""

from __future__ import annotations

from typing import NamedTuple

#: Begins the format of a value that is stored outside Redis, or is encrypted.
OFFLOADED, ENCRYPTED = "@", "!"


class Payload(NamedTuple):
    """An encoded value, as a record stores it."""

    #: Serializer and compression, as in payload/codec.py; empty if no value is stored.
    format: str
    #: The value, the name of an offloaded object, or the reason why no value is stored.
    body: bytes

    def to_bytes(self) -> bytes:
        """Returns format and body in one value."""
        return self.format.encode() + b"\n" + self.body

    @classmethod
    def from_bytes(cls, data: bytes) -> Payload:
        """Returns the payload that :meth:`to_bytes` wrote."""
        form, _, body = data.partition(b"\n")
        return cls(form.decode(errors="replace"), body)
