"""The sender of a request, so that one client's key never returns another's response.

Except with `anonymous`, an identity is the whole text of a credential, never a part of it: two
requests have the same identity only if they present the same credential. It is hashed into the key
and is stored nowhere.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from celery_idempotent.contrib.http.request import fields_of

logger = logging.getLogger(__name__)

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")

#: Payload, time and signature: a session stored in the cookie itself, as Flask, Starlette
#: (itsdangerous) and Django write it. Each write of the session changes the value.
_SIGNED_SESSION = re.compile(r'"?[\w+/=.-]+([.:])[\w-]{6}\1[\w-]{27,86}"?', re.ASCII)
#: Authorization schemes whose credentials have a signature or a nonce for each request.
_SIGNED_REQUEST = re.compile(
    r"(?:aws4-\S+|digest|hawk|mac|negotiate|ntlm|signature)\s|oauth\s.*oauth_nonce=", re.I
)


def anonymous(request: Any) -> str:
    """Identifies all clients as one.

    A client that guesses another's key and sends the same request gets its response.
    """
    return "anonymous"


def by_header(name: str) -> Callable[[Any], str | None]:
    """Identifies a client by a header field that only it can send, such as Authorization.

    A client is not identified if the field is absent, empty or (except under WSGI and Django, which
    join the values) repeated. An Authorization that differs in each request identifies no one.

    Raises:
        ValueError: if `name` cannot be the name of a header, or is Cookie.
    """
    _check_name(name, "header")
    if name.lower() == "cookie":
        raise ValueError("by_header cannot use all cookies together; use by_cookie for one of them")
    is_authorization = name.lower() == "authorization"

    def identity(request: Any) -> str | None:
        values = fields_of(request, name)
        if len(values) != 1 or not values[0]:
            return None
        if is_authorization and _SIGNED_REQUEST.match(values[0]):
            _warn(f"the header {name} differs in each request")
            return None
        return f"header {name.lower()}: {values[0]}"

    return identity


def by_cookie(name: str) -> Callable[[Any], str | None]:
    """Identifies a client by a cookie that only it has, such as its session cookie.

    A client is not identified if the cookie is absent, empty or sent with several values, since
    frameworks differ in which they use. A cookie that contains a signed session identifies nobody,
    because it changes with each write to the session.

    Raises:
        ValueError: if `name` cannot be the name of a cookie.
    """
    _check_name(name, "cookie")

    def identity(request: Any) -> str | None:
        values = set()
        for pair in ";".join(fields_of(request, "cookie")).split(";"):
            cookie, equals, value = pair.partition("=")
            if equals and cookie.strip() == name:
                values.add(value.strip())
        if len(values) != 1 or not (value := values.pop()):
            return None
        if _SIGNED_SESSION.fullmatch(value):
            _warn(f"the cookie {name} is a signed session, which differs after each write")
            return None
        return f"cookie {name}: {value}"

    return identity


def _warn(reason: str) -> None:
    logger.warning(
        "A request with an Idempotency-Key is refused, since its retry would be executed again: "
        "%s; identify the user instead, with a function as identity",
        reason,
    )


def _check_name(name: Any, kind: str) -> None:
    if not isinstance(name, str) or not _TOKEN.fullmatch(name):
        raise ValueError(f"by_{kind} needs the name of a {kind}, not {name!r}")
