"""Outcomes as bytes: kombu's serializers and compression, and Celery's encoding of errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

from kombu import serialization
from kombu.compression import compress, decompress

from celery_idempotent.errors import CorruptRecordError, PoisonedTaskError, ResultNotStoredError
from celery_idempotent.record.record import Record, State

logger = logging.getLogger(__name__)

#: Errors are always written so: readable by anyone, and never executable.
_ERROR_SERIALIZER = "json"

NOT_WANTED = b"idempotency_store_result is off"
TOO_LARGE = b"it is larger than idempotency_max_result_size"
NOT_SERIALISABLE = b"idempotency_serializer cannot write it"
NOT_OFFLOADED = b"idempotency_offload_backend did not take it"
#: Format of a result that another task will give: the body is the id to ask the backend for.
DELEGATED = "=task"
#: Before the format of a value that is in the depot: the body is its name there.
_ELSEWHERE = "@"
_POISONED = b"poisoned"


_SCALARS = frozenset({str, int, bool, type(None)})


class Payload(NamedTuple):
    """An outcome on its way into a record."""

    #: Serializer and, behind a plus sign, compression; empty: `body` says why no value is kept.
    format: str
    body: bytes

    @property
    def kept(self) -> bool:
        """Whether there is a value in it."""
        return bool(self.format)


class Dialect(Protocol):
    """How the app's result backend hands results and errors over."""

    def prepare_value(self, value: Any) -> Any:
        """What the backend would make of `value` before it writes it."""

    def prepare_error(self, error: BaseException) -> dict[str, Any]:
        """`error` as type, module and arguments."""

    def result_of(self, task_id: str) -> Any:
        """The result of another task.

        Raises:
            NotReadyError: while there is none.
            BaseException: what that task raised.
        """

    def restore_error(self, prepared: dict[str, Any]) -> BaseException:
        """The exception that ``AsyncResult.get()`` would raise."""


class Depot(Protocol):
    """A place outside Redis for large results."""

    def put(self, name: str, data: bytes) -> None:
        """Keep `data` under `name`."""

    def get(self, name: str) -> bytes | None:
        """The data under `name`, or None if there is none any more."""


class Payloads:
    """Writes outcomes, and reads them back as the first caller got them.

    Args:
        dialect: the app's result backend's.
        accept: content types that reading trusts.
        depot: where a result goes that is too large for Redis, if anywhere.
    """

    def __init__(
        self, dialect: Dialect, accept: Collection[str], depot: Depot | None = None
    ) -> None:
        self._dialect = dialect
        self._accept = accept
        self._depot = depot
        #: Whether anything may be outside the records.
        self.offloads = depot is not None

    def of_result(
        self, value: Any, *, serializer: str, compression: str | None, max_size: int, name: str
    ) -> Payload:
        """`value` as bytes, or the reason why it cannot be kept. Never raises.

        Args:
            name: for the depot; no two executions share one.
        """
        try:
            payload = _dump(self._dialect.prepare_value(value), serializer, compression)
        except Exception:
            return Payload("", NOT_SERIALISABLE)
        if len(payload.body) <= max_size:
            return payload
        return self._offloaded(payload, name) if self._depot else Payload("", TOO_LARGE)

    def _offloaded(self, payload: Payload, name: str) -> Payload:
        assert self._depot is not None
        try:
            self._depot.put(name, payload.body)
        except Exception:
            logger.exception("idempotency_offload_backend did not take the result %s", name)
            return Payload("", NOT_OFFLOADED)
        return Payload(_ELSEWHERE + payload.format, name.encode())

    def of_error(self, error: BaseException) -> Payload:
        """`error` as type, module and arguments."""
        return _dump(self._dialect.prepare_error(error), _ERROR_SERIALIZER, None)

    def decode(self, record: Record) -> Any:
        """The value of a COMPLETED record, the exception of a FAILED one.

        Raises:
            ResultNotStoredError: if the value was not kept.
            CorruptRecordError: if it cannot be read, or is of a type that the app does not accept.
        """
        if record.state is State.FAILED:
            return self._decode_error(record)
        return self.load(Payload(record.format, record.body), record.key)

    def load(self, payload: Payload, whose: str) -> Any:
        """The value in `payload`.

        Raises:
            ResultNotStoredError: if the value was not kept.
            CorruptRecordError: if it cannot be read, or is of a type that the app does not accept.
        """
        if not payload.kept:
            reason = payload.body.decode(errors="replace")
            raise ResultNotStoredError(
                f"{whose} has completed, but its result was not kept: {reason}"
            )
        if payload.format == DELEGATED:
            return self._dialect.result_of(payload.body.decode())
        if payload.format.startswith(_ELSEWHERE):
            payload = self._fetched(payload, whose)
        return _load(payload, whose, self._accept)

    def _fetched(self, payload: Payload, whose: str) -> Payload:
        name = payload.body.decode(errors="replace")
        body = self._depot.get(name) if self._depot else None
        if body is None:
            raise ResultNotStoredError(
                f"{whose} has completed, but its result is not in "
                f"idempotency_offload_backend (any more): {name}"
            )
        return Payload(payload.format.removeprefix(_ELSEWHERE), body)

    def _decode_error(self, record: Record) -> BaseException:
        if record.format:
            accept = {serialization.registry.name_to_type[_ERROR_SERIALIZER]}
            prepared = _load(Payload(record.format, record.body), record.key, accept)
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
        return ResultNotStoredError(f"{record.key} has failed, but its error was not kept")


def _dump(value: Any, serializer: str, compression: str | None) -> Payload:
    if serializer == "json" and not compression and type(value) in _SCALARS:
        return Payload("json", json.dumps(value).encode())  # as kombu would, in a tenth of the time
    _, _, data = serialization.dumps(value, serializer)
    body = data.encode("utf-8") if isinstance(data, str) else bytes(data)
    if not compression:
        return Payload(serializer, body)
    return Payload(f"{serializer}+{compression}", compress(body, compression)[0])


def _load(payload: Payload, whose: str, accept: Collection[str]) -> Any:
    serializer, _, compression = payload.format.partition("+")
    try:
        content_type = serialization.registry.name_to_type[serializer]
        body = decompress(payload.body, compression) if compression else payload.body
        return serialization.loads(body, content_type, "binary", accept=accept)
    except Exception as error:
        raise CorruptRecordError(
            f"the result of {whose} cannot be read as {payload.format}: {type(error).__name__}"
        ) from error
