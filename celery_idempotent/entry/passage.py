"""What a message carries for the gate, in two headers.

``idempotency_key`` is the caller's own key, or False to let this one call through. Anyone who
publishes by name may set it. ``idempotency`` is the gate's: a message that it, or a retry, puts
back carries its derived key, so that a deploy in between changes nothing for it. It is one text,
``digest.fingerprint.returns.prior``, since every publish with a reservation pays for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_idempotent.errors import KeyRuleError
from celery_idempotent.key.key import Key
from celery_idempotent.key.rule import as_text

KEY_HEADER = "idempotency_key"
PASSAGE_HEADER = "idempotency"

_CARRIED = re.compile(
    r"([A-Za-z0-9_-]{22})\.((?:[0-9a-f]{16})?)\.([0-9]{1,9})\.((?:[0-9a-f]{2})*)", re.ASCII
)
_DEATH = re.compile(r"x-(first-|last-)?death")


@dataclass(frozen=True, slots=True)
class Passage:
    """The headers of one message, read."""

    #: The caller's own key.
    explicit: str | None = None
    #: The caller wants no gate for this call.
    ungated: bool = False
    #: What an earlier pass derived.
    key: Key | None = None
    returns: int = 0
    prior: bytes = b""

    @classmethod
    def read(cls, task: str, headers: Mapping[str, Any] | None) -> Passage:
        """The passage in a message's custom headers; one that is damaged counts as none."""
        if not headers or (KEY_HEADER not in headers and PASSAGE_HEADER not in headers):
            return _FIRST
        explicit = headers.get(KEY_HEADER)
        if explicit is False:
            return cls(ungated=True)
        carried = headers.get(PASSAGE_HEADER)
        parts = _CARRIED.fullmatch(carried) if isinstance(carried, str) else None
        if parts is None:
            return cls(explicit)
        digest, fingerprint, returns, prior = parts.groups()
        return cls(
            explicit,
            key=Key(task, digest, bytes.fromhex(fingerprint)),
            returns=int(returns),
            prior=bytes.fromhex(prior),
        )


_FIRST = Passage()


def with_own_key(task: str, headers: Mapping[str, Any] | None, key: Any) -> dict[str, Any]:
    """`headers` for a call that carries its own key, or False.

    Raises:
        KeyRuleError: if `key` is neither text, number or UUID, nor False.
    """
    if key is not False:
        if not isinstance(key, bool):
            key = as_text(key)
        if not isinstance(key, str) or not key:
            raise KeyRuleError(
                f"{task}: idempotency_key must be non-empty text, a number, a UUID or False"
            )
    return {**(headers or {}), KEY_HEADER: key}


def kept(headers: Mapping[str, Any] | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `headers` of a message for its retry; where that has some `given`, these, and the key."""
    headers = headers or {}
    if given is None:
        return _without_deaths(headers)
    own_key = {KEY_HEADER: headers[KEY_HEADER]} if KEY_HEADER in headers else {}
    return {**own_key, **given}


def put_back(
    headers: Mapping[str, Any] | None, key: Key, returns: int = 0, prior: bytes = b""
) -> dict[str, Any]:
    """`headers` for a message that passes again later."""
    carried = f"{key.digest}.{key.fingerprint.hex()}.{returns}.{prior.hex()}"
    return {**_without_deaths(headers or {}), PASSAGE_HEADER: carried}


def _without_deaths(headers: Mapping[str, Any]) -> dict[str, Any]:
    """All but RabbitMQ's notes on where a message has been dead-lettered.

    It drops a message that is dead-lettered round a circle, and that is what it takes one for which
    brings them along and then waits in its delay queues.
    """
    return {name: value for name, value in headers.items() if not _DEATH.match(name)}
