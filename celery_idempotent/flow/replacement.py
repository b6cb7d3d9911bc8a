"""The error of a task that has replaced another one: it frees the key of the replaced task."""

from __future__ import annotations

from celery_idempotent.errors import (
    CorruptRecordError,
    NotReadyError,
    ResultNotStoredError,
    StoreUnavailableError,
)
from celery_idempotent.key.key import Key
from celery_idempotent.payload.codec import DELEGATED, PayloadCodec
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from celery_idempotent.settings import Settings
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command


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


async def release(
    key: Key,
    record: Record,
    raw: bytes,
    settings: Settings,
    codec: PayloadCodec,
    error: Exception,
) -> Command:
    """Returns the command that releases `key` of a task whose replacement has raised `error`.

    Copies of the task's message get the error.

    Args:
        raw: the bytes of `record`.
    """
    payload = await codec.encode_error(error, settings, key=str(key), token=record.token)
    return commands.release(
        key,
        record.token,
        hold_ms=0,
        retention_ms=settings.result_ms,
        root=layout.owner(raw)[: layout.ID_BYTES],
        generation=layout.read_awaited(record.body) - 1,
        error=payload,
        error_ms=settings.error_ms,
    )
