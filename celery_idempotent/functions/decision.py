"""Decisions about keys, for code that begins a key before it runs."""

from __future__ import annotations

from enum import Enum


class Decision(str, Enum):
    """What the caller should do about one key."""

    #: The caller holds the lease: run, then complete.
    RUN = "RUN"
    #: The key has an outcome: use it.
    REPLAY = "REPLAY"
    #: Another execution holds the key.
    CONFLICT = "CONFLICT"
    #: The same key appears earlier in the batch.
    DUPLICATE = "DUPLICATE"
    #: The key is invalid, was used with other arguments or is poisoned, or its record cannot be
    #: read or reached; see the error.
    REJECTED = "REJECTED"

    def __str__(self) -> str:
        return self.value


class NotCompletedError(Exception):
    """A block or a batch ended without completing the key; only signals carry this error."""
