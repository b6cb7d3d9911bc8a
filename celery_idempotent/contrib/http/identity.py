"""Who sends a request, so that a key of one client never leads to the response of another.

An identity is the text that a credential consists of, never a part of it, and never a default: two
requests have the same identity only if they present the same credential. It is hashed into the key
and is stored nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def anonymous(request: Any) -> str:
    """Identifies all clients as one, so that a client which guesses another one's key, and sends
    the same request, gets its response.
    """
    return "anonymous"


def checked_name(name: Any, kind: str) -> str:
    """Returns `name` if it can be the name of a header or a cookie.

    Raises:
        ValueError: if it cannot; `kind` says which of the two it is.
    """
    if not isinstance(name, str) or not _TOKEN.fullmatch(name):
        raise ValueError(f"by_{kind} needs the name of a {kind}, not {name!r}")
    return name


def of_header(name: str, values: Sequence[str]) -> str | None:
    """Returns the identity in a header field; None if it is absent, empty or repeated.

    Which one of two fields the app uses cannot be known here.
    """
    if len(values) != 1 or not values[0]:
        return None
    return f"header {name.lower()}: {values[0]}"


def of_cookie(name: str, cookie_fields: Iterable[str]) -> str | None:
    """Returns the identity in a cookie; None if it is absent, empty or sent with several values.

    Frameworks differ in which one of several they use.
    """
    values = set()
    for pair in ";".join(cookie_fields).split(";"):
        cookie, equals, value = pair.partition("=")
        if equals and cookie.strip() == name:
            values.add(value.strip())
    if len(values) != 1 or not (value := values.pop()):
        return None
    return f"cookie {name}: {value}"
