"""The parts of a request that all middleware read: its header fields, key and fingerprint.

A request is an ASGI scope, a WSGI environ, or the object that a framework makes of one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

KEY_HEADER = "idempotency-key"
#: A longer key is refused. In characters; Stripe has the same limit.
MAX_KEY_LENGTH = 255
#: In characters of the whole field, which may be a key of escaped quotes with parameters.
_MAX_FIELD_LENGTH = 1024

#: The IETF draft defines the field as an RFC 8941 String, such as ``"8e03978e"`` with its quotes.
#: Most clients send the bare key, so that form is also accepted if it is unambiguous.
_STRING = r'"((?:[ !#-\[\]-~]|\\["\\])*)"'
_BARE_ITEM = (
    r'(?:"(?:[ !#-\[\]-~]|\\["\\])*"|-?[0-9]{1,15}(?:\.[0-9]{1,3})?'
    r"|[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*|:[A-Za-z0-9+/=]*:|\?[01])"
)
#: Any item may have parameters; this field defines none, so they are ignored.
_QUOTED_KEY = re.compile(_STRING + rf"(?:; *[a-z*][a-z0-9_\-.*]*(?:={_BARE_ITEM})?)*")
#: Visible ASCII without quotes, backslashes, commas (which join repeated fields) and semicolons.
_BARE_KEY = re.compile(r"[!#-+\--:<-\[\]-~]+")

#: A content type whose boundary every parser finds in the same place.
_MULTIPART = re.compile(
    r'multipart/[\w-]+; *boundary=("?)([\w.=+-]{1,70})\1(?:; *charset=[\w-]+)?', re.ASCII | re.I
)


#: The method, the app's mount path (so that two apps never share a request), and the path.
_ASGI_TARGET = ("method", "root_path", "path")
_WSGI_TARGET = ("REQUEST_METHOD", "SCRIPT_NAME", "PATH_INFO")


def _environ_of(request: Any) -> Any:
    return getattr(request, "META", getattr(request, "environ", request))


def fields_of(request: Any, name: str) -> list[str]:
    """Returns the header fields `name` of a request.

    WSGI servers, and Django under ASGI, join repeated fields with commas.
    """
    environ = _environ_of(request)
    if environ.get("type") == "http":  # an ASGI scope
        wanted, headers = name.lower().encode("latin-1"), environ["headers"]
        return [value.decode("latin-1") for field, value in headers if field.lower() == wanted]
    field = name.upper().replace("-", "_")
    prefix = "" if field in ("CONTENT_LENGTH", "CONTENT_TYPE") else "HTTP_"
    value = environ.get(prefix + field)
    return [] if value is None else [value]


def field_of(request: Any, name: str) -> str:
    """Returns the header field `name` of a request; empty if it is absent."""
    return ",".join(fields_of(request, name))


def target_of(request: Any) -> list[str]:
    """Returns the method, the app's mount path and the path of a request."""
    environ = _environ_of(request)
    names = _ASGI_TARGET if environ.get("type") == "http" else _WSGI_TARGET
    return [environ.get(name, "") for name in names]


def fingerprint(request: Any, body: bytes) -> list[str | bytes]:
    """Returns the values that must be the same in all requests with one key."""
    environ = _environ_of(request)
    query = environ.get("query_string", b"").decode("latin-1") or environ.get("QUERY_STRING", "")
    content_type, content_encoding = (
        field_of(request, name) for name in ("content-type", "content-encoding")
    )
    digest = blake2b(body, digest_size=32)
    multipart = None if content_encoding else _MULTIPART.fullmatch(content_type)
    if multipart is not None:
        parts = _parts(body, multipart[2].encode("ascii"))
        if parts is not None:
            content_type = content_type[: multipart.start(2)] + content_type[multipart.end(2) :]
            digest = blake2b(digest_size=32, person=b"parts")
            for part in parts:
                digest.update(blake2b(part, digest_size=32).digest())
    return [*target_of(request), query, content_type, content_encoding, digest.digest()]


def _parts(body: bytes, boundary: bytes) -> list[bytes] | None:
    """Returns the parts of a multipart body, which do not depend on the boundary.

    Clients generate a boundary for each attempt. Returns None if it occurs outside the lines
    between the parts, or if these lines violate RFC 2046, as parsers then read different parts.
    """
    preamble, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary)
    # Some clients begin with a line break.
    if preamble not in (b"", b"\r\n") or len(parts) < 2 or body.count(boundary) != len(parts):
        return None
    if parts[-1] not in (b"--", b"--\r\n"):
        return None
    return parts if all(part.startswith(b"\r\n") for part in parts[:-1]) else None


def parse_key(fields: Sequence[str]) -> str | None:
    """Returns the key in a request's Idempotency-Key fields, or None if they are invalid.

    A quoted key equals the same key without quotes.
    """
    if len(fields) != 1 or len(fields[0]) > _MAX_FIELD_LENGTH:
        return None
    field = fields[0].strip(" \t")
    if quoted := _QUOTED_KEY.fullmatch(field):
        key = re.sub(r"\\(.)", r"\1", quoted[1])
    elif _BARE_KEY.fullmatch(field):
        key = field
    else:
        return None
    return key if 0 < len(key) <= MAX_KEY_LENGTH else None
