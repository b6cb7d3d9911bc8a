"""The errors of this library.

Each has one complete sentence as its only argument, so that it survives any result backend: Celery
rebuilds an exception from its type and its arguments.
"""

from __future__ import annotations


class IdempotencyError(Exception):
    """Base of all errors that this library raises on purpose."""


class SettingsError(IdempotencyError, ValueError):
    """An option has a wrong name, type or range, or no setting names a Redis server."""


class KeyRuleError(IdempotencyError):
    """The key rule cannot derive a key from these arguments."""


class ConflictError(IdempotencyError):
    """The key is held by another execution (``on_conflict="raise"``)."""


class KeyReusedError(IdempotencyError):
    """The key belongs to a call with other arguments; the first outcome is untouched."""


class LeaseLostError(IdempotencyError):
    """This execution no longer holds its key, so its outcome will be refused."""

    def __init__(self, message: str = "the lease is lost: another execution may run") -> None:
        super().__init__(message)


class PoisonedTaskError(IdempotencyError):
    """The executions of this key died without an outcome, ``max_attempts`` times in a row."""


class StoreUnavailableError(IdempotencyError):
    """Redis, the database of a transaction or the storage of a large result is unavailable."""


class TransactionError(IdempotencyError):
    """There is no transaction of ``idempotency_transaction``, or the body has ended it."""


class CorruptRecordError(IdempotencyError):
    """The record is damaged, of another kind, or written by a newer version."""


class DecryptionError(CorruptRecordError):
    """The payload was encrypted with a key that is not configured, or was tampered with."""


class NotReadyError(IdempotencyError):
    """The task was replaced by another one, which has not finished."""


class ResultNotStoredError(IdempotencyError):
    """The key has completed, but its result was not stored; the task does not run again."""


class ResultDiscardedError(ResultNotStoredError):
    """… as configured: by ``idempotency_store_result`` or ``ignore_result``. Nothing was lost."""
