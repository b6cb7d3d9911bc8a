"""Serializes and restores values, without what options add to a payload.

With JSON, a tuple becomes a list, and ``{1: 2}`` becomes ``{"1": 2}``. The first caller of a
function also gets the restored value, so that all callers get an equal one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from json.encoder import encode_basestring_ascii
from typing import Any

from celery import Celery
from celery.result import ResultBase
from kombu import serialization
from kombu.compression import compress
from kombu.exceptions import ContentDisallowed

from celery_idempotent.core.record import Payload
from celery_idempotent.settings import Settings

#: Writes plain values exactly as kombu's JSON serializer does, in a tenth of the time.
_PLAIN_JSON: dict[type, Callable[[Any], str]] = {
    str: encode_basestring_ascii,
    int: int.__repr__,
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
}

#: Minimum bytes of data to compress.
COMPRESSION_THRESHOLD = 1024
#: Maximum bytes of data to compress, and to accept from decompression: a short body that someone
#: has written to Redis may decompress to a thousand times its length.
MAX_DECODED = 8 * 1024 * 1024

#: Content types that every process can read: a decoder of JSON executes no code.
JSON = frozenset({"application/json"})
#: Content types whose decoders execute no code, and need no more memory than a multiple of the data
#: (a short text in YAML can describe a value of any size).
DATA_ONLY = JSON | {"application/x-msgpack"}

#: Serializers that are known to restore values of these types as they were.
_EXACT_SERIALIZERS = frozenset({"json", "msgpack", "pickle"})
_EXACT_TYPES = frozenset({int, float, bool, type(None)})


def is_unchanged(value: Any, serializer: str | None) -> bool:
    """Returns whether :func:`load` is known to restore `value` as it is."""
    kind = type(value)
    # Text that is not ASCII may have two surrogates, which JSON joins into one character.
    is_exact = kind in _EXACT_TYPES or (kind is str and value.isascii())
    return is_exact and serializer in _EXACT_SERIALIZERS


def dump(value: Any, serializer: str, settings: Settings | None = None) -> Payload:
    """Returns the serialized `value`; errors of the serializer are raised unchanged.

    Data that is short, very long, or would not shrink is not compressed.

    Args:
        settings: choose the compression; without them, there is none.
    """
    compression = settings and settings.compression
    if serializer == "json" and (write := _PLAIN_JSON.get(type(value))):
        body = write(value).encode()
    else:
        _, _, data = serialization.dumps(value, serializer)
        body = data.encode("utf-8") if isinstance(data, str) else bytes(data)
    if compression and COMPRESSION_THRESHOLD <= len(body) <= MAX_DECODED:
        compressed = compress(body, compression)[0]
        if len(compressed) < len(body):
            return Payload(f"{serializer}+{compression}", compressed)
    return Payload(serializer, body)


def load(payload: Payload, accept: Collection[str]) -> Any:
    """Returns the value that :func:`dump` wrote; errors of the serializer are raised unchanged.

    Raises:
        ContentDisallowed: if `accept` does not contain its content type.
        ValueError: if it is empty, or decompression does not end after `MAX_DECODED` bytes.
    """
    serializer, _, compression = payload.format.partition("+")
    content_type = serialization.registry.name_to_type[serializer]
    if content_type not in accept:
        raise ContentDisallowed(content_type)
    body = payload.body
    if compression:
        from celery_idempotent.core.payload.compression import decompress

        body = decompress(body, compression, MAX_DECODED)
    if not body and serializer in _EXACT_SERIALIZERS:
        raise ValueError("it is empty")  # kombu would return the empty bytes
    return serialization.loads(body, content_type, "binary", accept=accept)


class ValueCodec:
    """Converts between values and payloads that are neither transformed nor offloaded.

    Args:
        app: as for :class:`ResultCodec`: with an app, a result object becomes its tuple.
        accept: content types that may be decoded.
    """

    def __init__(self, app: Celery | None, accept: Collection[str]) -> None:
        self._app = app
        self._accept = accept

    def serialize(self, value: Any, settings: Settings) -> Payload:
        """Returns the payload; one without a value if the serializer refuses the value.

        Raises:
            Exception: if a signal handler has raised it meanwhile.
        """
        serializer = settings.serializer
        assert serializer is not None
        try:
            if isinstance(value, ResultBase) and self._app and serializer != "pickle":
                value = value.as_tuple()
            return dump(value, serializer, settings)
        except Exception as error:
            return self._refusal(value, settings, "serialize", error)

    def restore(self, payload: Payload) -> Any:
        """Returns the value of a payload; errors of the serializer are raised unchanged."""
        return load(payload, self._accept)

    def round_trip(self, value: Any, settings: Settings) -> tuple[Payload, Any]:
        """Returns the payload of `value`, and what :meth:`restore` makes of it.

        A value that cannot be serialized and restored gets a payload without a value, whose body is
        the reason.

        Raises:
            Exception: if a signal handler has raised it meanwhile.
        """
        payload = self.serialize(value, settings)
        if not payload.format or is_unchanged(value, settings.serializer):
            return payload, value
        try:
            return payload, self.restore(payload)
        except Exception as error:
            return self._refusal(value, settings, "restore", error), value

    def _refusal(self, value: Any, settings: Settings, verb: str, error: Exception) -> Payload:
        from celery_idempotent.core.payload.refusal import refusal

        serializer = settings.serializer or ""
        does = f"idempotency_serializer {serializer!r} cannot {verb}"
        return refusal(
            value, lambda part: self.restore(dump(part, serializer, settings)), does, error
        )
