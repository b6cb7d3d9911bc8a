"""The error of a task that has replaced another one: it frees the key of the replaced task."""

from __future__ import annotations

from celery_idempotent.core.key.key import Key
from celery_idempotent.core.record.layout import DELEGATED
from celery_idempotent.core.record.record import Record
from celery_idempotent.core.store import commands
from celery_idempotent.core.store.commands import Command
from celery_idempotent.errors import (
    CorruptRecordError,
    NotReadyError,
    ResultNotStoredError,
    StoreUnavailableError,
)
from celery_idempotent.settings import Settings


def error_of(record: Record, settings: Settings) -> Exception | None:
    """Returns the error of a replacement that frees the key of `record`; reads the result backend.

    None if no other task has replaced this one, if the replacement has not ended or has a result,
    or if the error is one of ``replay_errors``.
    """
    if record.format != DELEGATED:
        return None
    try:
        record.outcome()
    except (NotReadyError, ResultNotStoredError, CorruptRecordError, StoreUnavailableError):
        return None
    except Exception as error:
        return None if isinstance(error, settings.replay_errors) else error
    return None


def release(key: Key, record: Record) -> Command:
    """Returns the command that frees `key` of a task whose replacement has raised an error."""
    return commands.release(key, record.token, retention_ms=0)
