"""The request header field Idempotency-Key.

The IETF draft defines it as a String of RFC 8941, such as ``"8e03978e"`` with its quotes. Most
clients send the bare key, so that form is accepted, too, as long as it is unambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

KEY_HEADER = "idempotency-key"
#: Characters of a key, as at Stripe.
MAX_KEY_LENGTH = 255
#: Characters of the whole field: a key of quotes alone, each escaped, and some parameters.
_MAX_FIELD_LENGTH = 1024

_STRING = r'"((?:[ !#-\[\]-~]|\\["\\])*)"'
_BARE_ITEM = (
    r'(?:"(?:[ !#-\[\]-~]|\\["\\])*"|-?[0-9]{1,15}(?:\.[0-9]{1,3})?'
    r"|[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*|:[A-Za-z0-9+/=]*:|\?[01])"
)
#: Any item may have parameters; none is defined for this field, so they mean nothing.
_QUOTED_KEY = re.compile(_STRING + rf"(?:; *[a-z*][a-z0-9_\-.*]*(?:={_BARE_ITEM})?)*")
#: Visible ASCII without quotes, backslashes, commas (which join repeated fields) and semicolons.
_BARE_KEY = re.compile(r"[!#-+\--:<-\[\]-~]+")


def parse_key(fields: Sequence[str]) -> str | None:
    """Returns the key that a request's Idempotency-Key fields name, or None if they are invalid.

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
