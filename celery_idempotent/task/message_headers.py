"""What a message carries for the gate, in two headers.

``idempotency_key`` is the caller's own key, or False to let this one call through. Anyone who
publishes by name may set it. ``idempotency`` is the gate's: a message that it, or a retry, puts
back carries its derived key, so that a deploy in between changes nothing for it. It is one text,
``binding.own`` or ``binding.own.digest.fingerprint.returns.prior``, since every publish with a
reservation pays for it.

A task may pass its own headers on (``child.apply_async(…, headers=self.request.headers)``), so both
are bound to one message: ``binding`` is a digest of its task's name and id, ``own`` one of the own
key that came with it. In any other message they count as none, but for an own key set since then.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from celery_idempotent.errors import KeyRuleError
from celery_idempotent.key.canonical import digest
from celery_idempotent.key.key import Key
from celery_idempotent.key.rule import as_text

KEY_HEADER = "idempotency_key"
REQUEUE_HEADER = "idempotency"

_BOUND = re.compile(
    r"([A-Za-z0-9_-]{11})\.((?:[A-Za-z0-9_-]{11})?)(?:\.(.*))?", re.ASCII | re.DOTALL
)
_CARRIED = re.compile(
    r"([A-Za-z0-9_-]{22})\.((?:[0-9a-f]{16})?)\.([0-9]{1,9})\.((?:[0-9a-f]{2})*)", re.ASCII
)
_DEATH = re.compile(r"x-((first-|last-)?death|delivery-count)")


@dataclass(frozen=True, slots=True)
class MessageHeaders:
    """The headers of one message, read."""

    #: The caller's own key.
    explicit: str | None = None
    #: The caller has switched protection off for this call.
    unprotected: bool = False
    #: What an earlier pass derived.
    key: Key | None = None
    requeue_count: int = 0
    unanswered_ids: bytes = b""

    @classmethod
    def read(cls, task: str, task_id: str, headers: Mapping[str, Any] | None) -> MessageHeaders:
        """The passage in the custom headers of a message of `task`.

        What belongs to another message, is damaged or of another version counts as none.
        """
        if not _speaks(headers):
            return NO_HEADERS
        explicit, headers_read = _meant_for(task, task_id, headers)
        if explicit is False:
            return cls(unprotected=True)
        parts = _CARRIED.fullmatch(headers_read)
        if parts is None:
            return cls(explicit)
        digest, fingerprint, requeue_count, unanswered_ids = parts.groups()
        return cls(
            explicit,
            key=Key(task, digest, bytes.fromhex(fingerprint)),
            requeue_count=int(requeue_count),
            unanswered_ids=bytes.fromhex(unanswered_ids),
        )


#: Of a message that carries nothing for this package.
NO_HEADERS = MessageHeaders()


def bound(task: str, task_id: str, headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """`headers` for this message alone: what belongs to another one is left out."""
    if not _speaks(headers):
        return dict(headers or {})
    return _bind(task, task_id, headers, *_meant_for(task, task_id, headers))


def with_own_key(
    task: str, task_id: str, headers: Mapping[str, Any] | None, key: Any
) -> dict[str, Any]:
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
    headers = headers or {}
    _, headers_read = _meant_for(task, task_id, headers)
    return _bind(task, task_id, headers, key, headers_read)


def kept(
    task: str,
    task_id: str,
    headers: Mapping[str, Any] | None,
    given: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The `headers` of a message for its retry; where that has some `given`, these, and the key."""
    headers = headers or {}
    if given is None:
        return bound(task, task_id, _without_deaths(headers))
    explicit, _ = _meant_for(task, task_id, given)
    if explicit is None:
        explicit, _ = _meant_for(task, task_id, headers)
    return _bind(task, task_id, given, explicit)


def put_back(
    headers: Mapping[str, Any] | None,
    key: Key,
    task_id: str,
    requeue_count: int = 0,
    unanswered_ids: bytes = b"",
) -> dict[str, Any]:
    """`headers` for a message that passes again later, under `task_id`."""
    headers = _without_deaths(headers or {})
    explicit, _ = _meant_for(key.task, task_id, headers)
    headers_read = f"{key.digest}.{key.fingerprint.hex()}.{requeue_count}.{unanswered_ids.hex()}"
    return _bind(key.task, task_id, headers, explicit, headers_read)


def _speaks(headers: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    return headers is not None and (KEY_HEADER in headers or REQUEUE_HEADER in headers)


def _meant_for(task: str, task_id: str, headers: Mapping[str, Any]) -> tuple[Any, str]:
    """The caller's own key and what an earlier pass carried, as far as they are this message's."""
    own, text = headers.get(KEY_HEADER), headers.get(REQUEUE_HEADER)
    parts = _BOUND.fullmatch(text) if isinstance(text, str) else None
    if parts is None:
        return own, ""
    binding, bound_with, headers_read = parts.groups()
    if binding == _binding(task, task_id):
        return own, headers_read or ""
    return None if bound_with == _digest_of_own(own) else own, ""


def _bind(
    task: str, task_id: str, headers: Mapping[str, Any], own: Any, headers_read: str = ""
) -> dict[str, Any]:
    rest = {
        name: value for name, value in headers.items() if name not in (KEY_HEADER, REQUEUE_HEADER)
    }
    if own is not None:
        rest[KEY_HEADER] = own
    if own is not None or headers_read:
        parts = [
            _binding(task, task_id),
            _digest_of_own(own),
            *([headers_read] if headers_read else []),
        ]
        rest[REQUEUE_HEADER] = ".".join(parts)
    return rest


def _binding(task: str, task_id: str) -> str:
    return _short("binding", task, task_id)


def _digest_of_own(own: Any) -> str:
    return "" if own is None else _short("own", own)


def _short(*values: Any) -> str:
    return urlsafe_b64encode(digest(ascii(values).encode(), 8))[:11].decode()


def _without_deaths(headers: Mapping[str, Any]) -> dict[str, Any]:
    """All but RabbitMQ's notes on where a message has been dead-lettered, and how often requeued.

    It drops a message that is dead-lettered round a circle, and that is what it takes one for which
    brings them along and then waits in its delay queues.
    """
    return {name: value for name, value in headers.items() if not _DEATH.match(name)}
