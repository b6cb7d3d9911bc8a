"""What the gate decides for code that asks before it runs."""

from __future__ import annotations

from enum import Enum


class Decision(str, Enum):
    """What becomes of one key."""

    #: Nobody else runs it: run, then complete.
    RUN = "RUN"
    #: It has an outcome already.
    REPLAY = "REPLAY"
    #: Someone else is at it.
    CONFLICT = "CONFLICT"
    #: It stands in the same batch before.
    DUPLICATE = "DUPLICATE"
    #: An error says why: other arguments came with it before, or its record cannot be read.
    REJECTED = "REJECTED"

    def __str__(self) -> str:
        return self.value


class NotCompletedError(Exception):
    """The block, or the batch, ended without completing the key; seen by signals alone."""
