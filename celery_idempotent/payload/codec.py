"""Outcomes, and values of steps, on their way into a record and out of it.

A record says in its `format` how its body is to be read, from the outside to the inside:

=============================  ================================================================
``json``                       written by kombu's serializer of that name
``json+gzip``                  … and then compressed by kombu's compression of that name
``!json+gzip``                 … and then encrypted (:mod:`celery_idempotent.payload.cipher`)
``@json``, ``@!json+gzip``     … and then put into the depot: the body is its name there
``=task``                      another task gives the result: the body names it, see
                               :func:`celery_idempotent.record.layout.write_replacement`
``=untold``                    … and nobody is told what that is
empty                          no value is kept: the body says why
=============================  ================================================================
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from base64 import urlsafe_b64encode
from collections.abc import Collection
from typing import Any, Protocol

from kombu import serialization
from kombu.exceptions import ContentDisallowed

from celery_idempotent.errors import (
    CorruptRecordError,
    DecryptionError,
    PoisonedTaskError,
    ResultNotStoredError,
    StoreUnavailableError,
)
from celery_idempotent.key.canonical import digest
from celery_idempotent.payload import serializer
from celery_idempotent.payload.cipher import Cipher
from celery_idempotent.record import layout, steps
from celery_idempotent.record.payload import ELSEWHERE, Payload
from celery_idempotent.record.record import Record, State
from celery_idempotent.settings import Settings

logger = logging.getLogger(__name__)

#: Errors are always written so: readable by anyone, and never executable.
_ERROR_SERIALIZER = "json"

NOT_STORED = b"idempotency_store_result is off"
TOO_LARGE = b"it is larger than idempotency_max_result_size"
NOT_SERIALISABLE = b"idempotency_serializer cannot write it"
NOT_OFFLOADED = b"idempotency_offload_backend did not take it"
#: Format of a result that another task will give.
DELEGATED = "=task"
#: … and no backend will have.
RESULT_IGNORED = "=untold"
_ENCRYPTED = "!"
_POISONED = b"poisoned"

#: What a payload is of its record; a step is a third.
RESULT, ERROR = "result", "error"


def step_field(name: str) -> str:
    """What the value of a step is of its record."""
    return f"step {name!r}"


class ResultCodec(Protocol):
    """How the app's result backend hands results and errors over."""

    def prepare_value(self, value: Any, serializer: str) -> Any:
        """What the backend would make of `value` before it writes it by `serializer`."""

    def prepare_error(self, error: BaseException) -> dict[str, Any]:
        """`error` as type, module and arguments."""

    def result_of(self, task_id: str, seconds: float) -> Any:
        """The result of another task, which has taken a place `seconds` ago.

        Raises:
            NotReadyError: while there is none.
            ResultNotStoredError: if there may have been one, and it is gone.
            BaseException: what that task raised.
        """

    def restore_error(self, prepared: dict[str, Any]) -> BaseException:
        """The exception that ``AsyncResult.get()`` would raise."""


class OffloadStorage(Protocol):
    """A place outside Redis for large payloads. Its errors may be of any kind."""

    def put(self, name: str, data: bytes, seconds: float) -> None:
        """Keep `data` under `name`, for so many seconds where it can forget by itself."""

    def get(self, name: str) -> bytes | None:
        """The data under `name`, or None if there is none any more."""

    def delete(self, name: str) -> None:
        """Forget `name`."""


class PayloadCodec:
    """Writes outcomes, and reads them back as the first caller got them.

    Args:
        dialect: the app's result backend's.
        accept: content types that reading trusts.
        depot: where goes what is too large for Redis, if anywhere.
        cipher: encrypts all that is written, if given. What was written without it is still read.
    """

    def __init__(
        self,
        result_codec: ResultCodec,
        accept: Collection[str],
        offload_storage: OffloadStorage | None = None,
        cipher: Cipher | None = None,
    ) -> None:
        self._dialect = result_codec
        self._accept = accept
        self._depot = offload_storage
        self._cipher = cipher

    def of_result(
        self, value: Any, settings: Settings, *, key: str, token: int, field: str = RESULT
    ) -> Payload:
        """`value` as bytes, or the reason why it cannot be kept. Never raises.

        Args:
            key: of the record that it is for.
            token: of the execution; no two put anything under one name.
            part: what it is of the record.
        """
        assert settings.serializer is not None
        try:
            form, body = serializer.dump(
                self._dialect.prepare_value(value, settings.serializer),
                settings.serializer,
                settings.compression,
                settings.compression_threshold,
            )
        except Exception:
            return Payload("", NOT_SERIALISABLE)
        return self._stored(form, body, settings, key, token, field, settings.result_ttl)

    def of_error(
        self, error: BaseException, settings: Settings, *, key: str, token: int
    ) -> Payload:
        """`error` as type, module and arguments, or the reason why not. Never raises."""
        try:
            form, body = serializer.dump(
                self._dialect.prepare_error(error),
                _ERROR_SERIALIZER,
                settings.compression,
                settings.compression_threshold,
            )
        except Exception:
            return Payload("", NOT_SERIALISABLE)
        return self._stored(form, body, settings, key, token, ERROR, settings.error_ttl)

    def _stored(
        self,
        form: str,
        body: bytes,
        settings: Settings,
        key: str,
        token: int,
        field: str,
        seconds: float,
    ) -> Payload:
        """Encrypted and offloaded, as need be."""
        if self._cipher is not None:
            body = self._cipher.encrypt(body, key, field, form)
            form = _ENCRYPTED + form
        if len(body) <= settings.max_result_size:
            return Payload(form, body)
        if self._depot is None:
            return Payload("", TOO_LARGE)
        name = _offload_name(key, token, field)
        try:
            self._depot.put(name, body, seconds)
        except Exception:
            logger.exception("idempotency_offload_backend did not take the %s %s", field, name)
            return Payload("", NOT_OFFLOADED)
        return Payload(ELSEWHERE + form, name.encode())

    def decode(self, record: Record) -> Any:
        """The value of a COMPLETED record, the exception of a FAILED one.

        Raises:
            ResultNotStoredError: if the value was not kept, or the depot has it no more.
            CorruptRecordError: if it cannot be read, or is of a type that the app does not accept.
            DecryptionError: if no key decrypts it.
            StoreUnavailableError: if the depot cannot be asked.
        """
        if record.state is State.FAILED:
            return self._decode_error(record)
        if record.format == RESULT_IGNORED:
            raise ResultNotStoredError(
                f"{_done(record.key, RESULT)} was not kept: the task that took its place has "
                "ignore_result"
            )
        if record.format == DELEGATED:
            task_id = layout.read_replacement(record.body, record.key)
            return self._dialect.result_of(task_id, time.time() - record.at_ms / 1000)
        return self.load(Payload(record.format, record.body), record.key)

    def load(self, payload: Payload, key: str, field: str = RESULT) -> Any:
        """The value in `payload`, which stands in the record of `key` as its `part`.

        Raises:
            As :meth:`decode`.
        """
        if not payload.kept:
            reason = payload.body.decode(errors="replace")
            raise ResultNotStoredError(f"{_done(key, field)} was not kept: {reason}")
        return self._load(payload, key, field, self._accept)

    @property
    def offloads(self) -> bool:
        """Whether anything may be outside the records."""
        return self._depot is not None

    def discard(self, record: Record) -> None:
        """Delete from the depot what a `record` has there that is gone. Never raises."""
        if record.state.finished:
            field = ERROR if record.state is State.FAILED else RESULT
            self.discard_payload(Payload(record.format, record.body), record.key, field)
        else:
            self.discard_steps(record.body, record.key)

    def discard_steps(self, body: bytes, key: str) -> None:
        """As :meth:`discard`, for steps that are not needed any more, and errors beside them."""
        with contextlib.suppress(CorruptRecordError):
            for error in steps.errors(body, key):
                self.discard_payload(Payload(*error), key, ERROR)
            for name, kept in steps.read(body, key).items():
                self.discard_payload(Payload(*kept), key, step_field(name))

    def discard_payload(self, payload: Payload, key: str, field: str = RESULT) -> None:
        """As :meth:`discard`, for one payload that no record points to."""
        if not payload.elsewhere or self._depot is None:
            return
        try:
            self._depot.delete(_verified_name(payload.body, key, field))
        except Exception as error:
            logger.warning(
                "%s: its %s stays in idempotency_offload_backend: %s",
                key,
                field,
                type(error).__name__,
            )

    def _load(self, payload: Payload, key: str, field: str, accept: Collection[str]) -> Any:
        form, body = payload
        if payload.elsewhere:
            form, body = form.removeprefix(ELSEWHERE), self._fetched(body, key, field)
        if form.startswith(_ENCRYPTED):
            form = form.removeprefix(_ENCRYPTED)
            body = self._decrypted(body, key, field, form)
        try:
            return serializer.load(form, body, accept)
        except ContentDisallowed:
            why = "result_accept_content (or accept_content) does not accept it"
        except Exception as error:
            why = type(error).__name__
        raise CorruptRecordError(f"the {field} of {key} cannot be read as {form}: {why}")

    def _fetched(self, body: bytes, key: str, field: str) -> bytes:
        name = _verified_name(body, key, field)
        if self._depot is None:
            raise ResultNotStoredError(
                f"{_done(key, field)} was offloaded, and no idempotency_offload_backend is set "
                f"here: {name}"
            )
        try:
            data = self._depot.get(name)
        except Exception as error:
            raise StoreUnavailableError(
                f"idempotency_offload_backend cannot be asked for the {field} of {key}: "
                f"{type(error).__name__}"
            ) from error
        if data is None:
            raise ResultNotStoredError(
                f"{_done(key, field)} is not in idempotency_offload_backend (any more): {name}"
            )
        return data

    def _decrypted(self, body: bytes, key: str, field: str, form: str) -> bytes:
        if self._cipher is None:
            raise DecryptionError(
                f"the {field} of {key} is encrypted, and idempotency_encryption_keys is not "
                "set here"
            )
        plain = self._cipher.decrypt(body, key, field, form)
        if plain is None:
            raise DecryptionError(
                f"the {field} of {key} cannot be decrypted: the key that it was written under is "
                "not in idempotency_encryption_keys (any more), or it was tampered with; put the "
                "key back there, or forget the record to start afresh"
            )
        return plain

    def _decode_error(self, record: Record) -> BaseException:
        if record.format:
            accept = {serialization.registry.name_to_type[_ERROR_SERIALIZER]}
            payload = Payload(record.format, record.body)
            prepared = self._load(payload, record.key, ERROR, accept)
            try:
                error = self._dialect.restore_error(prepared)
            except Exception:
                error = None
            if not isinstance(error, BaseException):
                raise CorruptRecordError(f"the error of {record.key} cannot be read")
            return error
        if record.body == _POISONED:
            return PoisonedTaskError(
                f"{record.key} has begun {record.attempt} times, and each time its worker died "
                "without an outcome; forget the key to let it run again"
            )
        reason = record.body.decode(errors="replace")
        return ResultNotStoredError(
            f"{_done(record.key, ERROR)} was not kept" + (reason and f": {reason}")
        )


def _done(key: str, field: str) -> str:
    """The beginning of a sentence on what is missing."""
    if field == RESULT:
        return f"{key} has completed, but its result"
    if field == ERROR:
        return f"{key} has failed, but its error"
    return f"{field} of {key} has completed, but its value"


def _offload_name(key: str, token: int, field: str) -> str:
    """A step's name may hold anything; what a depot makes of that is not ours to find out."""
    name = f"{key}:{token}"
    return name if field == RESULT else f"{name}:{_code(field)}"


def _verified_name(body: bytes, key: str, field: str) -> str:
    """The name in the depot that a record gives.

    Raises:
        CorruptRecordError: if it can be no name of this part's: nobody who writes to Redis shall
            choose what is read from the depot, or deleted.
    """
    name = body.decode(errors="replace")
    end = "" if field == RESULT else f":{_code(field)}"
    if not re.fullmatch(rf"{re.escape(key)}:\d{{1,20}}{re.escape(end)}", name, re.ASCII):
        raise CorruptRecordError(f"the {field} of {key} is said to be where it cannot be")
    return name


def _code(field: str) -> str:
    return urlsafe_b64encode(digest(field.encode("utf-8", "surrogatepass"), 9)).decode()
