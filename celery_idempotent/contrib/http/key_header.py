"""The request header field Idempotency-Key.

The IETF draft defines it as an RFC 8941 String, such as ``"8e03978e"`` with its quotes. Most
clients send the bare key, so that form is also accepted if it is unambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

KEY_HEADER = "idempotency-key"
#: In characters, as at Stripe.
MAX_KEY_LENGTH = 255
#: In characters of the whole field: a key of only escaped quotes, and some parameters.
_MAX_FIELD_LENGTH = 1024

_STRING = r'"((?:[ !#-\[\]-~]|\\["\\])*)"'
_BARE_ITEM = (
    r'(?:"(?:[ !#-\[\]-~]|\\["\\])*"|-?[0-9]{1,15}(?:\.[0-9]{1,3})?'
    r"|[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*|:[A-Za-z0-9+/=]*:|\?[01])"
)
#: Any item may have parameters; this field defines none, so they are ignored.
_QUOTED_KEY = re.compile(_STRING + rf"(?:; *[a-z*][a-z0-9_\-.*]*(?:={_BARE_ITEM})?)*")
#: Visible ASCII without quotes, backslashes, commas (which join repeated fields) and semicolons.
_BARE_KEY = re.compile(r"[!#-+\--:<-\[\]-~]+")


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
