"""Values as bytes, and back: kombu's serializers and compressions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from json.encoder import encode_basestring_ascii
from typing import Any

from kombu import serialization
from kombu.compression import compress, decompress

#: As kombu's JSON writes plain values, in a tenth of the time.
_JSON: dict[type, Callable[[Any], str]] = {
    str: encode_basestring_ascii,
    int: int.__repr__,
    bool: lambda value: "true" if value else "false",
    type(None): lambda value: "null",
}


def dump(
    value: Any, serializer: str, compression: str | None = None, threshold: int = 0
) -> tuple[str, bytes]:
    """The format and the bytes of `value`; whatever a serializer raises comes out.

    Args:
        threshold: bytes; fewer are not compressed, and none that compression makes more.
    """
    body = _serialised(value, serializer)
    if compression and len(body) >= threshold:
        compressed = compress(body, compression)[0]
        if len(compressed) < len(body):
            return f"{serializer}+{compression}", compressed
    return serializer, body


def load(form: str, body: bytes, accept: Collection[str]) -> Any:
    """The value that :func:`dump` wrote; whatever goes wrong in reading comes out.

    Raises:
        ContentDisallowed: if `accept` has not its content type.
    """
    serializer, _, compression = form.partition("+")
    content_type = serialization.registry.name_to_type[serializer]
    if compression:
        body = decompress(body, compression)
    return serialization.loads(body, content_type, "binary", accept=accept)


def _serialised(value: Any, serializer: str) -> bytes:
    if serializer == "json" and (write := _JSON.get(type(value))):
        return write(value).encode()
    _, _, data = serialization.dumps(value, serializer)
    return data.encode("utf-8") if isinstance(data, str) else bytes(data)
