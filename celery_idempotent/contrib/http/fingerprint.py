"""A digest of a request, so that no key is used for two different ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b

#: A content type whose boundary every parser finds in the same place.
_MULTIPART = re.compile(
    r'multipart/[\w-]+; *boundary=("?)([\w.=+-]{1,70})\1(?:; *charset=[\w-]+)?', re.ASCII | re.I
)


def fingerprint(
    target: Iterable[str], content_type: str, content_encoding: str, body: bytes
) -> list[str | bytes]:
    """Returns the values that must be the same in all requests with one key.

    Args:
        target: the method, the app's mount path (so that two apps never share a request), the path
            in the app, and the query.
    """
    digest = blake2b(body, digest_size=32)
    multipart = None if content_encoding else _MULTIPART.fullmatch(content_type)
    if multipart is not None:
        parts = _parts(body, multipart[2].encode("ascii"))
        if parts is not None:
            content_type = content_type[: multipart.start(2)] + content_type[multipart.end(2) :]
            digest = blake2b(digest_size=32, person=b"parts")
            for part in parts:
                digest.update(blake2b(part, digest_size=32).digest())
    return [*target, content_type, content_encoding, digest.digest()]


def _parts(body: bytes, boundary: bytes) -> list[bytes] | None:
    """Returns the parts of a multipart body, which do not depend on the boundary.

    Clients generate a boundary for each attempt. Returns None if it occurs outside the lines
    between the parts, or if these lines violate RFC 2046, as parsers then read different parts.
    """
    preamble, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if preamble or len(parts) < 2 or body.count(boundary) != len(parts):
        return None
    if parts[-1] not in (b"--", b"--\r\n"):
        return None
    return parts if all(part.startswith(b"\r\n") for part in parts[:-1]) else None
