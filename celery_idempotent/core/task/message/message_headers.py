"""The headers in which a message carries its key and the retention of its result.

``idempotency_key`` is the explicit key of the call (text, or a list of texts), or False for a call
without protection. ``idempotency_result_ttl`` is a number of seconds. A publisher without the code
of the task may set these two.

Only this package writes ``idempotency``. It is one text: ``message.explicit`` in a message with one
of the other two, or ``message.explicit.key.fingerprint.put_back_count`` with the derived key. A
message has that after a deduplicated publish, and whenever it is published again, so that a deploy
in between does not change its key. A ``put_back_count`` of ``5-2`` includes two rollbacks by the
database. A rerun appends the token of the outcome that it replaces.

That is why a retry keeps its key, also with other arguments:
`IdempotentTask.signature_from_request` takes the key of the running call,
`message_copy.retry_headers` writes it into this header, and `resolve_key` prefers the header to the
rule. Meanwhile, the end of the first execution reserves the key for the message's id
(`commands.reserve_retry`).

A task may forward its headers (``child.apply_async(…, headers=self.request.headers)``), so they are
bound to one message: ``message`` is a digest of the task's name and id, ``explicit`` a digest of
the explicit key that came with it. A bound ``idempotency_result_ttl`` is ``seconds message``. Any
other message ignores them, except for an explicit key that was set since.

``idempotency_waits`` is written into a message that is put back because of a conflict, and bound to
it: ``message since token holder``.

In shadow mode the publisher notes in ``idempotency_shadow`` that it would not have published the
message, or that an option of the call cannot be used. The worker counts it.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from typing import Any, NamedTuple

from celery_idempotent.core.key import Key, message_form
from celery_idempotent.core.key.canonical import digest
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.settings import check_value

EXPLICIT_KEY_HEADER = "idempotency_key"
RESULT_TTL_HEADER = "idempotency_result_ttl"
DERIVED_KEY_HEADER = "idempotency"
SHADOW_HEADER = "idempotency_shadow"
WAITS_HEADER = "idempotency_waits"
#: Findings of the publisher of a message in shadow.
DEDUPLICATED, REFUSED = "deduplicated", "refused"

_BINDING = re.compile(
    r"([A-Za-z0-9_-]{11})\.((?:[A-Za-z0-9_-]{11})?)(?:\.(.*))?",
    re.ASCII | re.DOTALL,
)
_DERIVED_KEY = re.compile(
    r"(~?[A-Za-z0-9_-]{22})\.((?:[0-9a-f]{16})?)\.([0-9]{1,9})(?:-([0-9]{1,9}))?"
    r"(?:\.([0-9]{1,17}))?",
    re.ASCII,
)
_SECONDS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,20})?)(?: ([A-Za-z0-9_-]{11}))?", re.ASCII)
_WAITS = re.compile(r"([A-Za-z0-9_-]{11}) ([0-9]{1,13}) ([0-9]{1,17}) (.*)", re.ASCII | re.DOTALL)
_OWN_HEADERS = frozenset({EXPLICIT_KEY_HEADER, RESULT_TTL_HEADER, DERIVED_KEY_HEADER, WAITS_HEADER})


class Waits(NamedTuple):
    """What a message waits for that was put back because of a conflict."""

    #: Since when it waits: milliseconds since the epoch.
    since_ms: int
    #: Token of the execution that had the key then.
    token: int
    #: Task id of that execution.
    task_id: str


class MessageHeaders(NamedTuple):
    """The contents of the headers of one message."""

    #: The key that the caller supplies; False switches protection off for this call.
    explicit_key: Any = None
    #: Seconds for which the result is kept; None for the task's option.
    result_ttl: float | None = None
    #: The key that a deduplicated publish, or an earlier delivery of the message, has derived.
    key: Key | None = None
    #: How often the message was put back.
    put_back_count: int = 0
    #: How many of these put-backs followed a rollback by the database.
    rollback_count: int = 0
    #: For a rerun: the token of the outcome to forget before this message begins; else 0.
    forgets: int = 0
    #: What the message waits for; None unless it was put back because of a conflict.
    waits: Waits | None = None

    @classmethod
    def read(cls, task: str, task_id: str, headers: Mapping[str, Any] | None) -> MessageHeaders:
        """Reads the custom headers of a message of `task`.

        Headers that belong to another message, and a derived key that is damaged or of another
        version, are ignored.

        Raises:
            KeyRuleError: if the explicit key cannot be used. Another key must not take its place.
            SettingsError: if ``idempotency_result_ttl`` cannot be used.
        """
        if not headers:
            return NO_HEADERS
        explicit, text = headers.get(EXPLICIT_KEY_HEADER), headers.get(DERIVED_KEY_HEADER)
        derived = None
        if isinstance(text, str) and (fields := _BINDING.fullmatch(text)):
            message, explicit_digest, its_derived = fields.groups()
            if message == _digest_of_message(task, task_id):
                derived = its_derived
            elif explicit_digest == _digest_of_explicit(explicit):
                explicit = None
        if explicit is not None and explicit is not False:
            explicit = message_form(task, explicit)
        carried = cls(explicit, _result_ttl_of(task, task_id, headers))
        fields = _DERIVED_KEY.fullmatch(derived or "")
        if fields is None:
            return carried
        digest, fingerprint, put_back_count, rollback_count, token = fields.groups()
        return carried._replace(
            key=Key(task, digest, bytes.fromhex(fingerprint)),
            put_back_count=int(put_back_count),
            rollback_count=int(rollback_count or 0),
            forgets=int(token or 0),
            waits=_waits_of(task, task_id, headers),
        )

    def write(
        self, task: str, task_id: str, headers: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns `headers` with these contents instead of their own, bound to the message."""
        written = without_keys(headers or {})
        if self == NO_HEADERS:
            return written
        message = _digest_of_message(task, task_id)
        if self.result_ttl is not None:
            written[RESULT_TTL_HEADER] = f"{self.result_ttl} {message}"
        if self.explicit_key is not None:
            written[EXPLICIT_KEY_HEADER] = self.explicit_key
        fields = [message, _digest_of_explicit(self.explicit_key)]
        if self.key is not None:
            rollbacks = f"-{self.rollback_count}" if self.rollback_count else ""
            count = f"{self.put_back_count}{rollbacks}"
            fields += [self.key.digest, self.key.fingerprint.hex(), count]
            fields += [str(self.forgets)] if self.forgets else []
        if self.waits is not None:
            written[WAITS_HEADER] = " ".join(map(str, (message, *self.waits)))
        if any(fields[1:]):
            written[DERIVED_KEY_HEADER] = ".".join(fields)
        return written


#: The contents of a message without any of these headers.
NO_HEADERS = MessageHeaders()


def id_text(task_id: Any) -> str:
    """Returns a task id as text, for a record. Celery also accepts a UUID or bytes."""
    return task_id.decode(errors="replace") if isinstance(task_id, bytes) else str(task_id)


def as_mapping(headers: Any) -> Mapping[str, Any]:
    """Returns the headers of a call as a mapping. Celery also accepts pairs.

    Raises:
        TypeError, ValueError: as in Celery, if they are something else.
    """
    return headers if isinstance(headers, Mapping) else dict(headers or {})


def of_options(
    task: str, task_id: str, options: dict[str, Any], *, in_shadow: bool
) -> dict[str, Any]:
    """Moves the options of a call into its headers, and binds them to it.

    Raises:
        KeyRuleError: if the explicit key cannot be used.
        SettingsError: if ``idempotency_result_ttl`` cannot be used.
    """
    options = {**options}
    key, headers = options.pop(EXPLICIT_KEY_HEADER, None), options.pop("headers", None)
    result_ttl = options.pop(RESULT_TTL_HEADER, None)
    if key is None and result_ttl is None and not headers:
        return options
    try:
        carried = MessageHeaders.read(task, task_id, headers)
        if key is not None:
            explicit = key if key is False else message_form(task, key)
            carried = MessageHeaders(explicit, carried.result_ttl)
        if result_ttl is not None:
            result_ttl = check_value(RESULT_TTL_HEADER, result_ttl, task)
            carried = carried._replace(result_ttl=result_ttl)
        written = carried.write(task, task_id, headers)
    except IdempotencyError:
        if not in_shadow:
            raise
        written = with_finding(without_keys(headers or {}), REFUSED, task_id)
    return {**options, "headers": written} if written or headers else options


def with_finding(headers: Mapping[str, Any] | None, finding: str, task_id: str) -> dict[str, Any]:
    """Returns `headers` with a finding about the message `task_id`; other messages ignore it."""
    return {**(headers or {}), SHADOW_HEADER: f"{finding} {task_id}"}


def finding_of(task_id: str, headers: Mapping[str, Any] | None) -> str:
    """Returns the finding of the publisher of this message; empty if there is none."""
    finding, _, found_for = str((headers or {}).get(SHADOW_HEADER)).partition(" ")
    return finding if found_for == task_id else ""


def bind(task: str, task_id: str, headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the headers of this message as its body gets them, which may forward them.

    They are bound to the message, without those that belong to another one, and without the state
    of a put-back: a message that the body publishes was never put back, and waits for nothing.

    Raises:
        KeyRuleError: if they hold an explicit key that cannot be used.
        SettingsError: if they hold an ``idempotency_result_ttl`` that cannot be used.
    """
    own = MessageHeaders.read(task, task_id, headers)
    return MessageHeaders(own.explicit_key, own.result_ttl, own.key).write(task, task_id, headers)


def without_keys(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `headers` without those of `MessageHeaders`."""
    return {name: value for name, value in headers.items() if name not in _OWN_HEADERS}


def _result_ttl_of(task: str, task_id: str, headers: Mapping[str, Any]) -> float | None:
    """Returns the seconds that belong to this message.

    Raises:
        SettingsError: if they are not a valid number.
    """
    value = headers.get(RESULT_TTL_HEADER)
    if isinstance(value, str) and (fields := _SECONDS.fullmatch(value)):
        seconds, message = fields.groups()
        if message not in (None, _digest_of_message(task, task_id)):
            return None
        value = float(seconds)
    if value is not None:
        check_value(RESULT_TTL_HEADER, value, task)
    return value


def _waits_of(task: str, task_id: str, headers: Mapping[str, Any]) -> Waits | None:
    fields = _WAITS.fullmatch(str(headers.get(WAITS_HEADER) or ""))
    if fields is None or fields[1] != _digest_of_message(task, task_id):
        return None
    return Waits(int(fields[2]), int(fields[3]), fields[4])


def _digest_of_message(task: str, task_id: str) -> str:
    return _digest_of("binding", task, task_id)


def _digest_of_explicit(explicit: Any) -> str:
    return "" if explicit is None else _digest_of("own", explicit)


def _digest_of(*values: Any) -> str:
    return urlsafe_b64encode(digest(ascii(values).encode(), 8))[:11].decode()
