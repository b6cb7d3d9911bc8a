"""Serializes and restores values: all callers get the restored value.

With JSON, a tuple becomes a list, and ``{1: 2}`` becomes ``{"1": 2}``. The first caller of a
function also gets the restored value, so it equals that of every duplicate.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Collection, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any

import kombu.compression
from celery import Celery
from celery.result import ResultBase
from kombu import serialization
from kombu.compression import compress, get_encoder
from kombu.exceptions import ContentDisallowed

from celery_idempotent.core.record.payload import Payload
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
#: else has written to Redis may contain a thousand times as many.
MAX_DECODED = 8 * 1024 * 1024

#: Bytes of memory for the decompressor of LZMA; its default preset needs 9 MiB.
_LZMA_MEMORY = 64 * 1024 * 1024
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
    # Other text may change: JSON joins two surrogates into one character.
    is_exact = kind in _EXACT_TYPES or (kind is str and value.isascii())
    return is_exact and serializer in _EXACT_SERIALIZERS


def dump(value: Any, serializer: str, compression: str | None = None) -> Payload:
    """Returns the serialized `value`; errors of the serializer are raised unchanged.

    Data that is short, very long, or would not shrink is not compressed.
    """
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
    body = _decompress(payload.body, compression) if compression else payload.body
    if not body and serializer in _EXACT_SERIALIZERS:
        raise ValueError("it is empty")  # kombu would return the empty bytes
    return serialization.loads(body, content_type, "binary", accept=accept)


def decompressor(compression: str) -> Any:
    """Returns a new decompressor whose output can be limited, for one of kombu's compressions.

    Raises:
        KeyError: if there is none.
    """
    content_type = get_encoder(compression)[1]
    if content_type == "application/x-gzip":
        return zlib.decompressobj()
    if content_type == "application/x-bz2":
        return bz2.BZ2Decompressor()
    if content_type == "application/x-lzma":
        return lzma.LZMADecompressor(memlimit=_LZMA_MEMORY)
    if content_type == "application/zstd":
        return vars(kombu.compression)["zstd"].ZstdDecompressor()
    raise KeyError(compression)


def _decompress(body: bytes, compression: str) -> bytes:
    try:
        stream = decompressor(compression)
        data: bytes = stream.decompress(body, MAX_DECODED)
    except Exception as error:
        raise ValueError(f"{compression}: {type(error).__name__}") from error
    if not stream.eof:
        raise ValueError(f"it is truncated, or larger than {MAX_DECODED} bytes")
    return data


#: How deep a value is searched for the part that cannot be serialized.
_MAX_DEPTH = 20


class ValueCodec:
    """Converts between values and payloads that are neither encrypted nor offloaded.

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
            return dump(value, serializer, settings.compression)
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
        def fails(part: Any) -> bool:
            try:
                self.restore(dump(part, settings.serializer or "", settings.compression))
            except Exception:
                return True
            return False

        if not fails(value):
            raise error  # of a signal handler
        try:
            found = _describe(value, fails)
        except Exception:  # raised by a type of the application
            found = _type_name(value)
        reason = f"idempotency_serializer {settings.serializer!r} cannot {verb} the type {found}"
        return Payload("", reason.encode("utf-8", "backslashreplace"))


def _describe(value: Any, fails: Callable[[Any], bool]) -> str:
    """Describes the innermost part of `value` that `fails`, only by type."""
    part = value
    for _ in range(_MAX_DEPTH):
        parts = _parts_of(part)
        if not parts or not fails([each for _, each in parts]):
            break
        while len(parts) > 1:
            half = parts[: len(parts) // 2]
            parts = half if fails([each for _, each in half]) else parts[len(half) :]
        ((key, part),) = parts
        if key is not None:
            return f"{_type_name(key[0])} as a key, inside a value of type {_type_name(value)}"
    if part is value:
        return _type_name(value)
    return f"{_type_name(part)}, inside a value of type {_type_name(value)}"


def _parts_of(value: Any) -> list[tuple[tuple[Any] | None, Any]]:
    """Returns the members of `value`, and each key of a mapping in a mapping of its own."""
    if isinstance(value, Mapping):
        members = [(None, member) for member in value.values()]
        return [*members, *(((key,), {key: None}) for key in value)]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(None, member) for member in value]
    return []


def _type_name(value: Any) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return prefix + kind.__qualname__
