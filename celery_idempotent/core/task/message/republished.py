"""The headers of a message that is published again, or with the key that its publisher derives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from celery_idempotent.core.key import Key
from celery_idempotent.core.task.message.message_headers import (
    DERIVED_KEY_HEADER,
    MessageHeaders,
    id_text,
)
from celery_idempotent.errors import IdempotencyError, KeyRuleError

#: RabbitMQ's headers about dead-lettering and requeues.
_DEATH = re.compile(r"x-((first-|last-)?death|delivery-count)")


def with_derived_key(
    headers: Mapping[str, Any] | None,
    key: Key,
    task_id: str,
    **fields: Any,
) -> dict[str, Any]:
    """Returns `headers` for a message that is published under `task_id`, or published again.

    Args:
        fields: other fields of `MessageHeaders`, such as ``requeue_count``.
    """
    own = MessageHeaders.read(key.task, task_id, headers)
    carried = MessageHeaders(own.explicit_key, own.result_ttl, key, **fields)
    return carried.write(key.task, task_id, _without_deaths(headers))


def for_retry(
    task: str,
    task_id: str,
    headers: Mapping[str, Any] | None,
    new_headers: Mapping[str, Any] | None,
    key: Key | None = None,
) -> dict[str, Any]:
    """Returns the headers of a retry: the message's own or the new ones, with the explicit key.

    Args:
        key: of the call that is retried.

    Raises:
        KeyRuleError: if the new ones hold another explicit key.
    """
    own, given = MessageHeaders.read(task, task_id, headers), new_headers
    new = own if given is None else MessageHeaders.read(task, task_id, given)
    if given is not None and new.key is not None:
        return dict(given)  # of a message that is requeued
    if new.explicit_key not in (None, own.explicit_key):
        raise KeyRuleError(
            f"{task}: a retry keeps the key of its call; remove idempotency_key from its headers"
        )
    result_ttl = new.result_ttl if own.result_ttl is None else own.result_ttl
    carried = MessageHeaders(own.explicit_key, result_ttl, key or own.key)
    return carried.write(task, task_id, _without_deaths(headers if given is None else given))


def was_requeued(task: str, headers: Mapping[str, Any] | None) -> bool:
    """Returns whether a message of `task`, with its id in the headers, was requeued."""
    text = (headers or {}).get(DERIVED_KEY_HEADER)
    if not isinstance(text, str) or text.count(".") < 4:
        return False  # most messages
    try:
        task_id = id_text((headers or {})["id"])
        return bool(MessageHeaders.read(task, task_id, headers).requeue_count)
    except (IdempotencyError, KeyError):
        return False


def _without_deaths(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns `headers` without those of RabbitMQ about dead-lettering and requeues.

    RabbitMQ drops a message that is dead-lettered in a cycle. A message with these headers that
    waits in the queues of the delayed delivery looks like one.
    """
    return {name: value for name, value in (headers or {}).items() if not _DEATH.match(name)}
