"""How a record holds an outcome, or the result of a step."""

from __future__ import annotations

from typing import NamedTuple

#: Begins the format of a value that is kept outside Redis.
OFFLOADED = "@"


class Payload(NamedTuple):
    """An outcome on its way into a record."""

    #: As in the table above.
    format: str
    body: bytes

    @property
    def has_value(self) -> bool:
        """Whether there is a value in it."""
        return bool(self.format)

    @property
    def is_offloaded(self) -> bool:
        """Whether the value is in the depot."""
        return self.format.startswith(OFFLOADED)
