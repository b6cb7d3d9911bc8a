"""The headers in which a message carries its key, and how long its result is kept.

``idempotency_key`` is the explicit key of the call (text, or a list of texts), or False for a call
without protection. ``idempotency_result_ttl`` is a number of seconds. Anyone who publishes by name
may set these two. ``idempotency`` is written by this package: a message that is published again
carries its derived key, so a deploy in between does not change the key. It is one text, because
every publish pays for its size:
``message.explicit.root`` or ``message.explicit.root.key.fingerprint.requeue_count.unanswered_ids``;
a ``requeue_count`` of ``5-2`` has two requeues because of the database; a message that was run
again has the token of the outcome that it replaces at the end. The root names the publish:
it is drawn anew for each, and kept by retries and put-backs.

A task may forward its headers (``child.apply_async(…, headers=self.request.headers)``), so they are
bound to one message: ``message`` is a digest of the task's name and id, ``explicit`` a digest of
the explicit key that came with it; a bound ``idempotency_result_ttl`` is ``seconds message``. Any
other message ignores them, but for an explicit key that was set since.

In shadow (``idempotency_shadow``) the publisher writes into ``idempotency_shadow`` that the message
would not have been published, or that its explicit key cannot be used. The worker counts that,
where the counters are.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery_idempotent.errors import IdempotencyError, KeyRuleError
from celery_idempotent.key.canonical import digest
from celery_idempotent.key.explicit import message_form
from celery_idempotent.key.key import Key
from celery_idempotent.settings import check_value

EXPLICIT_KEY_HEADER = "idempotency_key"
RESULT_TTL_HEADER = "idempotency_result_ttl"
DERIVED_KEY_HEADER = "idempotency"
SHADOW_HEADER = "idempotency_shadow"
#: Findings of the publisher of a message in shadow.
DEDUPLICATED, REFUSED = "deduplicated", "refused"

_BINDING = re.compile(
    r"([A-Za-z0-9_-]{11})\.((?:[A-Za-z0-9_-]{11})?)\.((?:[0-9a-f]{16})?)(?:\.(.*))?",
    re.ASCII | re.DOTALL,
)
_DERIVED_KEY = re.compile(
    r"(~?[A-Za-z0-9_-]{22})\.((?:[0-9a-f]{16})?)\.([0-9]{1,9})(?:-([0-9]{1,9}))?\."
    r"((?:[0-9a-f]{2})*)(?:\.([0-9]{1,17}))?",
    re.ASCII,
)
_SECONDS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,20})?)(?: ([A-Za-z0-9_-]{11}))?", re.ASCII)
_OWN_HEADERS = frozenset({EXPLICIT_KEY_HEADER, RESULT_TTL_HEADER, DERIVED_KEY_HEADER})
#: RabbitMQ's headers about dead-lettering and requeues.
_DEATH = re.compile(r"x-((first-|last-)?death|delivery-count)")


@dataclass(frozen=True, slots=True)
class MessageHeaders:
    """What the headers of one message hold."""

    #: The key that the caller brings.
    explicit: str | list[str] | None = None
    #: The caller has switched protection off for this call.
    unprotected: bool = False
    #: Seconds; None: the task's option.
    result_ttl: float | None = None
    #: Of the publish; empty if it has none.
    root: bytes = b""
    #: The key that was derived when the message was published before.
    key: Key | None = None
    requeue_count: int = 0
    #: How many of these requeues followed a rollback by the database.
    rollback_count: int = 0
    unanswered_ids: bytes = b""
    #: The token of the outcome that is forgotten before this message begins; 0: none.
    forgets: int = 0

    @classmethod
    def read(cls, task: str, task_id: str, headers: Mapping[str, Any] | None) -> MessageHeaders:
        """Reads the custom headers of a message of `task`.

        Headers that belong to another message, and a derived key that is damaged or of another
        version, are ignored.

        Raises:
            KeyRuleError: if the explicit key cannot be used. Another key must not take its place.
            SettingsError: if ``idempotency_result_ttl`` cannot be used.
        """
        headers = headers or {}
        explicit, root, derived = _headers_of(task, task_id, headers)
        if explicit is False:
            return cls(unprotected=True)
        result_ttl = _result_ttl_of(task, task_id, headers)
        fields = _DERIVED_KEY.fullmatch(derived)
        if fields is None:
            return cls(explicit, result_ttl=result_ttl, root=root)
        digest, fingerprint, requeue_count, rollback_count, unanswered_ids, token = fields.groups()
        return cls(
            explicit,
            result_ttl=result_ttl,
            root=root,
            key=Key(task, digest, bytes.fromhex(fingerprint)),
            requeue_count=int(requeue_count),
            rollback_count=int(rollback_count or 0),
            unanswered_ids=bytes.fromhex(unanswered_ids),
            forgets=int(token or 0),
        )


#: Of a message without any of them.
NO_HEADERS = MessageHeaders()


def only_root(task: str, task_id: str, headers: Mapping[str, Any]) -> bytes | None:
    """Returns the root of a message without other headers of this module; None if it has one."""
    text = headers.get(DERIVED_KEY_HEADER)
    if text is None:
        return b""
    fields = _BINDING.fullmatch(text) if isinstance(text, str) else None
    if fields is None or fields[4] or fields[1] != _digest_of("binding", task, task_id):
        return None
    return bytes.fromhex(fields[3])


def of_options(
    task: str, task_id: str, options: dict[str, Any], *, in_shadow: bool
) -> dict[str, Any]:
    """Moves the options of a call into its headers, and binds them to it.

    Raises:
        KeyRuleError: if the explicit key cannot be used.
        SettingsError: if ``idempotency_result_ttl`` cannot be used.
    """
    options = {**options}
    key, headers = options.pop(EXPLICIT_KEY_HEADER, None), options.get("headers")
    result_ttl = options.pop(RESULT_TTL_HEADER, None)
    try:
        if result_ttl is not None:
            check_value(RESULT_TTL_HEADER, result_ttl, task)
            headers = {**(headers or {}), RESULT_TTL_HEADER: result_ttl}
        if key is not None:
            headers = with_explicit_key(task, task_id, headers, key)
        elif headers:
            headers = bind(task, task_id, headers)
    except IdempotencyError:
        if not in_shadow:
            raise
        headers = with_finding(headers, REFUSED, task_id)
    # Also without any: headers that were forwarded, and belong to another message, are dropped.
    return {**options, "headers": headers} if headers or options.get("headers") else options


def with_finding(headers: Mapping[str, Any] | None, finding: str, task_id: str) -> dict[str, Any]:
    """Returns `headers` with a finding about the message `task_id`; any other ignores it."""
    return {**(headers or {}), SHADOW_HEADER: f"{finding} {task_id}"}


def finding_of(task_id: str, headers: Mapping[str, Any] | None) -> str:
    """Returns what the publisher of this message has found out; empty if nothing."""
    finding, _, found_for = str((headers or {}).get(SHADOW_HEADER)).partition(" ")
    return finding if found_for == task_id else ""


def bind(task: str, task_id: str, headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns `headers` bound to this message, without what belongs to another one.

    Raises:
        KeyRuleError: if they hold an explicit key that cannot be used.
        SettingsError: if they hold an ``idempotency_result_ttl`` that cannot be used.
    """
    headers = headers or {}
    return _write(task, task_id, headers, *_headers_of(task, task_id, headers))


def with_root(
    task: str, task_id: str, headers: Mapping[str, Any] | None, draw: Callable[[], bytes]
) -> dict[str, Any]:
    """Returns bound `headers` with a root: their own, or a new one."""
    headers = headers or {}
    explicit, root, derived = _headers_of(task, task_id, headers)
    text = _bound(task, task_id, explicit, root or draw(), derived)
    return {**headers, DERIVED_KEY_HEADER: text}


def without_keys(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `headers` without those of this module."""
    return {name: value for name, value in headers.items() if name not in _OWN_HEADERS}


def with_explicit_key(
    task: str, task_id: str, headers: Mapping[str, Any] | None, key: Any
) -> dict[str, Any]:
    """Returns `headers` for a call with an explicit key, or False.

    Raises:
        KeyRuleError: if `key` cannot be used as a key.
    """
    if key is not False:
        key = message_form(task, key)
    headers = {**(headers or {}), EXPLICIT_KEY_HEADER: key}
    _, root, derived = _headers_of(task, task_id, headers)
    return _write(task, task_id, headers, key, root, derived)


def with_derived_key(
    headers: Mapping[str, Any] | None,
    key: Key,
    task_id: str,
    root: bytes,
    requeue_count: int = 0,
    unanswered_ids: bytes = b"",
    rollback_count: int = 0,
    forgets: int = 0,
) -> dict[str, Any]:
    """Returns `headers` for a message that is published under `task_id`, or published again."""
    headers = _without_deaths(headers or {})
    explicit, _, _ = _headers_of(key.task, task_id, headers)
    count = f"{requeue_count}-{rollback_count}" if rollback_count else f"{requeue_count}"
    derived = f"{key.digest}.{key.fingerprint.hex()}.{count}.{unanswered_ids.hex()}"
    if forgets:
        derived += f".{forgets}"
    return _write(key.task, task_id, headers, explicit, root, derived)


def for_retry(
    task: str,
    task_id: str,
    headers: Mapping[str, Any] | None,
    new_headers: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Returns the headers of a retry: the message's own or the new ones, with the explicit key.

    Raises:
        KeyRuleError: if the new ones hold another explicit key.
    """
    headers = headers or {}
    if new_headers is None:
        return bind(task, task_id, _without_deaths(headers))
    explicit, root, _ = _headers_of(task, task_id, headers)
    new_explicit, _, _ = _headers_of(task, task_id, new_headers)
    if new_explicit not in (None, explicit):
        raise KeyRuleError(
            f"{task}: a retry keeps the key of its call; remove idempotency_key from its headers"
        )
    if (result_ttl := _result_ttl_of(task, task_id, headers)) is not None:
        new_headers = {**new_headers, RESULT_TTL_HEADER: result_ttl}
    return _write(task, task_id, new_headers, explicit, root)


def _headers_of(task: str, task_id: str, headers: Mapping[str, Any]) -> tuple[Any, bytes, str]:
    """Returns the explicit key, the root and the derived key, as far as they are this message's.

    Raises:
        KeyRuleError: if the explicit key cannot be used.
    """
    explicit, text = headers.get(EXPLICIT_KEY_HEADER), headers.get(DERIVED_KEY_HEADER)
    fields = _BINDING.fullmatch(text) if isinstance(text, str) else None
    root, derived = "", ""
    if fields is not None:
        message_digest, explicit_digest, its_root, its_derived = fields.groups()
        if message_digest == _digest_of("binding", task, task_id):
            root, derived = its_root, its_derived or ""
        elif explicit_digest == _digest_of_explicit(explicit):
            return None, b"", ""
    if explicit is not None and explicit is not False:
        explicit = message_form(task, explicit)
    return explicit, bytes.fromhex(root), derived


def was_requeued(task: str, headers: Mapping[str, Any] | None) -> bool:
    """Returns whether a message of `task`, with its id in the headers, was requeued."""
    text = (headers or {}).get(DERIVED_KEY_HEADER)
    if not isinstance(text, str) or text.count(".") < 3:
        return False  # most messages
    try:
        return bool(MessageHeaders.read(task, str(headers["id"]), headers).requeue_count)  # type: ignore[index]
    except (IdempotencyError, KeyError):
        return False


def _result_ttl_of(task: str, task_id: str, headers: Mapping[str, Any]) -> float | None:
    """Returns the seconds that belong to this message.

    Raises:
        SettingsError: if they are not a valid number.
    """
    value = headers.get(RESULT_TTL_HEADER)
    if isinstance(value, str) and (fields := _SECONDS.fullmatch(value)):
        seconds, message_digest = fields.groups()
        if message_digest not in (None, _digest_of("binding", task, task_id)):
            return None
        value = float(seconds)
    if value is not None:
        check_value(RESULT_TTL_HEADER, value, task)
    return value


def _write(
    task: str,
    task_id: str,
    headers: Mapping[str, Any],
    explicit: Any,
    root: bytes,
    derived: str = "",
) -> dict[str, Any]:
    written = without_keys(headers)
    if (result_ttl := _result_ttl_of(task, task_id, headers)) is not None:
        written[RESULT_TTL_HEADER] = f"{result_ttl} {_digest_of('binding', task, task_id)}"
    if explicit is not None:
        written[EXPLICIT_KEY_HEADER] = explicit
    if explicit is not None or root or derived:
        written[DERIVED_KEY_HEADER] = _bound(task, task_id, explicit, root, derived)
    return written


def _bound(task: str, task_id: str, explicit: Any, root: bytes, derived: str) -> str:
    message = _digest_of("binding", task, task_id)
    binding = f"{message}.{_digest_of_explicit(explicit)}.{root.hex()}"
    return f"{binding}.{derived}" if derived else binding


def _digest_of_explicit(explicit: Any) -> str:
    return "" if explicit is None else _digest_of("own", explicit)


def _digest_of(*values: Any) -> str:
    return urlsafe_b64encode(digest(ascii(values).encode(), 8))[:11].decode()


def _without_deaths(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `headers` without RabbitMQ's about dead-lettering and requeues.

    RabbitMQ drops a message that is dead-lettered in a cycle, and takes one that comes with these
    headers and then waits in the queues of the delayed delivery for such a message.
    """
    return {name: value for name, value in headers.items() if not _DEATH.match(name)}
