"""What can go wrong, one class each.

Every error carries one finished sentence as its only argument, so that it survives any result
backend: Celery rebuilds an exception from its type and its arguments.
"""

from __future__ import annotations


class IdempotencyError(Exception):
    """Base of everything this library raises on purpose."""


class SettingsError(IdempotencyError, ValueError):
    """An option has a wrong name, type or range, or none of the settings names a Redis."""


class KeyRuleError(IdempotencyError):
    """No key can be derived from these arguments by this rule."""


class ConflictError(IdempotencyError):
    """The key is held by another execution (``on_conflict="raise"``)."""


class KeyReusedError(IdempotencyError):
    """The key belongs to a call with other arguments; the first outcome is untouched."""


class LeaseLostError(IdempotencyError):
    """This execution no longer holds its key: its outcome will be refused."""

    def __init__(self, message: str = "the lease is lost: another execution may run") -> None:
        super().__init__(message)


class PoisonedTaskError(IdempotencyError):
    """Every execution of this key died without an outcome, ``max_attempts`` times in a row."""


class StoreUnavailableError(IdempotencyError):
    """Redis, or the backend that a result was offloaded to, cannot be reached in time."""


class CorruptRecordError(IdempotencyError):
    """The record cannot be read: damaged, of another kind, or written by a newer version."""


class DecryptionError(CorruptRecordError):
    """What is stored was encrypted under a key that is not at hand, or was tampered with."""


class NotReadyError(IdempotencyError):
    """The outcome is that of a task which has taken this one's place, and has not ended."""


class ResultNotStoredError(IdempotencyError):
    """The key has completed, and its value was not kept; running it again is not the answer."""
