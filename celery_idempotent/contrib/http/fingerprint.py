"""A digest of a request: a key is not used for two different ones."""

from __future__ import annotations

import re
from hashlib import blake2b

#: Stands for the boundary of a multipart body, which clients draw anew for each attempt. A single
#: byte, so that no body grows.
_BOUNDARY = b"\0"
_BOUNDARY_PARAMETER = re.compile(r'; *boundary=(?:"([^"\\]{1,70})"|([^\s";,]{1,70}))', re.I)


def fingerprint(
    method: str,
    prefix: str,
    path: str,
    query: str,
    content_type: str,
    content_encoding: str,
    body: bytes,
) -> list[str | bytes]:
    """Returns what must be the same in all requests with one key.

    Args:
        prefix: the path at which the app is mounted, so that two apps never share a request.
    """
    boundary = _BOUNDARY_PARAMETER.search(content_type)
    if boundary is not None and content_type.lower().startswith("multipart/"):
        content_type = content_type[: boundary.start()] + content_type[boundary.end() :]
        body = body.replace((boundary[1] or boundary[2]).encode("latin-1"), _BOUNDARY)
    digest = blake2b(body, digest_size=32).digest()
    return [method, prefix, path, query, content_type, content_encoding, digest]
