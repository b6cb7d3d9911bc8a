"""A digest of a request: a key is not used for two different ones."""

from __future__ import annotations

from email.message import Message
from hashlib import blake2b

#: Stands for the boundary of a multipart body, which clients draw anew for each attempt.
_BOUNDARY = b"celery-idempotent-multipart-boundary"


def fingerprint(
    method: str,
    prefix: str,
    path: str,
    query: str,
    content_type: str,
    content_encoding: str,
    body: bytes,
) -> list[str | bytes]:
    """Returns what must be the same in each request with one key.

    Args:
        prefix: the path at which the app is mounted, so that two apps never share a request.
        content_type: the whole field.
        content_encoding: the whole field.
    """
    boundary = _boundary(content_type)
    if boundary:
        content_type = content_type.replace(boundary, "")
        body = body.replace(boundary.encode("latin-1"), _BOUNDARY)
    digest = blake2b(body, digest_size=32).digest()
    return [method, prefix, path, query, content_type, content_encoding, digest]


def _boundary(content_type: str) -> str:
    if not content_type.lower().startswith("multipart/"):
        return ""
    message = Message()
    message["Content-Type"] = content_type
    return message.get_boundary("")
