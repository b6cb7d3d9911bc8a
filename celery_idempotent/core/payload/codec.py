"""Encodes results, errors and values of steps into payloads, and decodes them.

The format of a payload describes how to read its body, from the outermost layer inwards:

=============================  ================================================================
``json``                       serialized by kombu's serializer of that name
``json+gzip``                  … and compressed by kombu's compression of that name
``!json+gzip``                 … and encrypted
``@json``, ``@!json+gzip``     … and offloaded: the body is the name of the object
                               (:mod:`celery_idempotent.core.payload.offload`)
``=task``                      another task returns the result; the body is its id
``=ignored``                   … and that task ignores its result
empty                          the value is not stored; the body is the reason
=============================  ================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

from kombu.exceptions import ContentDisallowed
from kombu.serialization import registry

from celery_idempotent.core.payload.result_codec import ResultCodec, is_storable
from celery_idempotent.core.payload.value_codec import (
    DATA_ONLY,
    JSON,
    MAX_DECODED,
    ValueCodec,
    dump,
    load,
)
from celery_idempotent.core.record import (
    ARGUMENTS,
    ERROR,
    MESSAGE,
    OFFLOADED,
    OUTBOX,
    RESULT,
    Payload,
    Record,
    State,
    layout,
    step_field,
    subject,
)
from celery_idempotent.core.record.layout import DELEGATED
from celery_idempotent.errors import (
    CorruptRecordError,
    NotReadyError,
    PoisonedTaskError,
    ResultDiscardedError,
    ResultNotStoredError,
    StoreUnavailableError,
)
from celery_idempotent.settings import MARKS, PREFIX, Settings

#: Fields that are always written as JSON, so that every process accepts them.
_JSON_FIELDS = (ERROR, OUTBOX, MESSAGE)

#: The reason in the body of a payload without a value, if the task is set not to store results.
NOT_STORED = b"idempotency_store_result is off"
#: The format of a result that another task returns and does not store (``ignore_result``).
RESULT_IGNORED = "=ignored"
#: Prefixes of the formats whose decoding may block, on the offload storage or the result backend.
_BLOCKING = (OFFLOADED, "=")

T = TypeVar("T")


class PayloadCodec:
    """Encodes results, errors and steps, and decodes them to what the first caller got.

    The coroutines never suspend, so `run_sync` can run them: they block while they use the offload
    storage or the result backend. With :meth:`for_asyncio`, a thread does that.

    Args:
        result_codec: prepares values and errors as the app's result backend does.
        accept: content types that may be decoded.
    """

    def __init__(self, result_codec: ResultCodec, accept: Collection[str]) -> None:
        self.values = ValueCodec(result_codec.app, accept)
        #: An `extensions.encryption.Cipher`, which that option sets; None without keys.
        self.cipher: Any = None
        #: An `extensions.offload.OffloadStorage`, which that option sets, for payloads that are too
        #: large for Redis; None without a backend.
        self.offload_storage: Any = None
        self._result_codec = result_codec
        self._accept = accept
        #: Whether blocking work runs in a thread, for event loops.
        self.is_async = False

    def for_asyncio(self) -> PayloadCodec:
        """Returns this codec for code on an event loop: blocking work runs in a thread."""
        codec = copy.copy(self)
        codec.is_async = True
        return codec

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work) if self.is_async else work()

    async def encode_result(
        self, value: Any, settings: Settings, *, key: str, token: int, field: str = RESULT
    ) -> Payload:
        """Encodes a result, or the value of a step. Never raises.

        Args:
            key: of the record that will hold the payload.
            token: of the execution; makes the name of an offloaded object unique.
            field: that holds the payload.

        Returns:
            The payload, or the reason why there is none.
        """
        if field == RESULT and not settings.store_result:
            return Payload("", NOT_STORED)
        payload = self.values.serialize(value, settings)
        return await self.protect(payload, settings, key=key, token=token, field=field)

    async def protect(
        self, payload: Payload, settings: Settings, *, key: str, token: int, field: str = RESULT
    ) -> Payload:
        """Encrypts a payload of :class:`ValueCodec`, and offloads it if it is too large.

        The arguments and errors are those of :meth:`encode_result`. A payload without a format is
        only the reason why a value is not stored, and stays as it is.
        """
        if not payload.format:
            return payload
        payload = self._encrypt(payload, key, field)
        if settings.fits(payload.body):
            return payload
        if self.offload_storage is None:
            return Payload("", b"it is larger than idempotency_max_result_size")
        from celery_idempotent.core.payload import offload

        kind = field.partition(" ")[0]
        ms = settings.error_ms if kind in (ERROR, MESSAGE) else settings.result_ms
        put = partial(offload.put, self.offload_storage, payload, key, token, field, ms / 1000)
        return await self._run(put)

    def _encrypt(self, payload: Payload, key: str, field: str) -> Payload:
        return payload if self.cipher is None else self.cipher.encrypt(payload, key, field)

    def encode_newest(self, value: Any, serializer: str, settings: Settings, key: str) -> Payload:
        """Encodes the newest arguments of a call, of any size.

        Raises:
            Exception: if they cannot be serialized.
        """
        return self._encrypt(dump(value, serializer, settings), key, ARGUMENTS)

    async def encode_error(
        self, error: BaseException, settings: Settings, *, key: str, token: int
    ) -> Payload:
        """Encodes the type, module and arguments of `error`; as :meth:`encode_result`."""
        if not is_storable(type(error)):
            return Payload("", b"it ends a worker, or controls Celery")
        try:
            prepared = self._result_codec.prepare_error(error)
            payload = dump(prepared, "json", settings)
            prepared = load(payload, JSON)
        except Exception:
            return Payload("", b"it cannot be serialized as JSON")
        if self._restored_error(prepared) is None:
            return Payload("", b"it cannot be restored from its arguments")
        return await self.protect(payload, settings, key=key, token=token, field=ERROR)

    async def decode_outcome(self, record: Record) -> tuple[Any, bool]:
        """Returns the value or the exception of a finished record, and whether it failed.

        An error of a task that replaced this one is also returned.

        Raises:
            As :meth:`decode`.
        """
        try:
            if self.is_async and record.format.startswith(_BLOCKING):
                outcome = await asyncio.to_thread(self.decode, record)
            else:
                outcome = self.decode(record)
            return outcome, record.state is State.FAILED
        except (ResultNotStoredError, NotReadyError, CorruptRecordError, StoreUnavailableError):
            raise
        except Exception as error:
            # The task that replaced this one raised it. It is returned, because it may be a
            # StopIteration, which a coroutine cannot raise.
            return error, True

    async def decode_field(
        self, payload: Payload, key: str, field: str, accept: Collection[str] = ()
    ) -> Any:
        """Returns the value of a step, an outbox, a kept message or newest arguments.

        Args:
            accept: content types that may be decoded, if not those of results.

        Raises:
            As :meth:`decode`.
        """
        if self.is_async and payload.format.startswith(OFFLOADED):
            return await asyncio.to_thread(self._decode, payload, key, field, accept)
        return self._decode(payload, key, field, accept)

    async def delete_object(self, payload: Payload, key: str, field: str) -> None:
        """Deletes the offloaded object of a payload that no record holds. Never raises."""
        if payload.format.startswith(OFFLOADED) and self.offload_storage is not None:
            from celery_idempotent.core.payload import offload

            await self._run(partial(offload.delete, self.offload_storage, payload, key, field))

    async def delete_step_objects(self, body: bytes, key: str) -> None:
        """Deletes the offloaded objects of the steps in `body`. Never raises."""
        if not body:
            return
        from celery_idempotent.core.record import steps

        with contextlib.suppress(CorruptRecordError):
            for name, stored in steps.read(body, key).items():
                await self.delete_object(Payload(*stored), key, step_field(name))

    async def delete_record_objects(self, record: Record) -> None:
        """Deletes the offloaded objects of a record that was deleted. Never raises."""
        if record.state.finished:
            field = ERROR if record.state is State.FAILED else RESULT
            await self.delete_object(Payload(record.format, record.body), record.key, field)
        else:
            await self.delete_step_objects(record.body, record.key)

    def decode(self, record: Record) -> Any:
        """Returns the value of a COMPLETED record, or the exception of a FAILED one. May block.

        Raises:
            ResultNotStoredError: if the value was not stored, or no longer exists.
            NotReadyError: if the task's replacement has not finished. If it failed: its error.
            CorruptRecordError: if it cannot be decoded, or the app does not accept its type.
            StoreUnavailableError: if the offload storage cannot be read.
        """
        if record.state is State.FAILED:
            return self._decode_error(record)
        if record.format == RESULT_IGNORED:
            raise ResultDiscardedError(
                f"{subject(record.key, RESULT)} was not stored: the task that replaced it ignores "
                "its result (ignore_result)"
            )
        if record.format == DELEGATED:
            from celery_idempotent.core.payload import delegated

            return delegated.result_of(self._result_codec.app, record)
        return self._decode(Payload(record.format, record.body), record.key, RESULT)

    def view(self, record: Record) -> Any:
        """As :meth:`decode`, for tools that show a value to a person.

        Only JSON and msgpack are decoded: a page must not execute code that someone has written to
        Redis, as decoding pickle would.

        Raises:
            As :meth:`decode`. ResultNotStoredError also if the value is too large, or neither JSON
            nor msgpack.
        """
        serializer = record.format.lstrip("".join(MARKS.values())).partition("+")[0]
        content_type = registry.name_to_type.get(serializer)
        if record.format == DELEGATED and (app := self._result_codec.app):
            content_type = app.backend.content_type
        if serializer and record.format != RESULT_IGNORED and content_type not in DATA_ONLY:
            reason = f"tools decode only JSON and msgpack, not {content_type or serializer}"
        elif record.format.startswith(OFFLOADED):
            from celery_idempotent.core.payload import offload

            return self.view(offload.read(self.offload_storage, record))
        elif len(record.body) > MAX_DECODED:
            reason = f"it has {len(record.body):,} bytes"
        else:
            return self.decode(record)
        raise ResultNotStoredError(f"the value of {record.key} is not shown: {reason}")

    def _decode_error(self, record: Record) -> BaseException:
        payload = Payload(record.format, record.body)
        if payload.format:
            error = self._restored_error(self._decode(payload, record.key, ERROR))
            if error is None:
                raise CorruptRecordError(
                    f"the error of {record.key} cannot be read; forget the key to start afresh"
                )
            return error
        if layout.is_replaced(record):
            from celery_idempotent.core.record.newer import replaced

            return replaced(record.key, record.body)
        if layout.is_poisoned(record):
            return PoisonedTaskError(
                f"{record.key} has begun {record.attempt - 1} times, and each time its worker died "
                "without an outcome; correct the cause, then rerun the task: celery idempotency "
                "rerun (of a function: forget the key)"
            )
        return not_stored(payload, record.key, ERROR)

    def _restored_error(self, prepared: Any) -> BaseException | None:
        """Returns a stored error; None if it cannot be restored, or is not storable."""
        try:
            error = self._result_codec.restore_error(prepared)
        except Exception:
            return None
        return error if is_storable(type(error)) else None

    def _decode(self, payload: Payload, key: str, field: str, accept: Collection[str] = ()) -> Any:
        if not payload.format:
            raise not_stored(payload, key, field)
        if payload.format.startswith(OFFLOADED):
            from celery_idempotent.core.payload import offload

            payload = offload.get(self.offload_storage, payload, key, field)
        if self.cipher is not None:
            payload = self.cipher.decrypt(payload, key, field)
        try:
            of_field = JSON if field.partition(" ")[0] in _JSON_FIELDS else self._accept
            return load(payload, accept or of_field)
        except ContentDisallowed:
            reason = "result_accept_content (or accept_content) does not accept it"
        except Exception as error:
            reason = type(error).__name__
            for option, mark in MARKS.items():
                if payload.format.startswith(mark):
                    reason = f"this process has no {PREFIX}{option}"
        raise CorruptRecordError(
            f"the {field} of {key} cannot be read as {payload.format}: {reason}"
        )


def not_stored(payload: Payload, key: str, field: str) -> ResultNotStoredError:
    """Returns the error for a payload that holds the reason why no value is stored."""
    reason = payload.body.decode(errors="replace")
    kind = ResultDiscardedError if payload.body == NOT_STORED else ResultNotStoredError
    return kind(f"{subject(key, field)} was not stored" + (reason and f": {reason}"))
