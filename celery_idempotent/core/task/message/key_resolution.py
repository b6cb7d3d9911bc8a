"""Resolves the key of a call from its message.

The task, the worker's request and the publisher all use this module, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery.app.task import Context

from celery_idempotent.core.configuration.configuration import TaskConfiguration
from celery_idempotent.core.key import Key
from celery_idempotent.core.task.message import call_options, message_headers
from celery_idempotent.core.task.message.message_headers import NO_HEADERS, MessageHeaders
from celery_idempotent.errors import KeyRuleError, SettingsError


def resolve_key(
    configuration: TaskConfiguration,
    task_id: str,
    headers: Mapping[str, Any] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    request: Context | None = None,
) -> tuple[Key | None, MessageHeaders]:
    """Returns the key of a call (None for an unprotected one) and its parsed headers.

    A key that the message carries takes precedence over the task's rule: a message that is
    published again keeps its key, even if the rule has changed since.

    Args:
        configuration: of the task.
        headers: the custom headers of the message.
        request: of a received message; the call may be a part of a canvas that has replaced a task
            with the same key.

    Raises:
        KeyRuleError: if the rule cannot derive a key from the arguments, or the message has an
            invalid explicit key; SettingsError: if it has an invalid result_ttl.
        TypeError: if the arguments do not fit the task's signature.
    """
    if not configuration.is_protected:
        return None, NO_HEADERS
    parsed = (
        MessageHeaders.read(configuration.rule.task, task_id, headers) if headers else NO_HEADERS
    )
    if parsed.explicit_key is False:
        return None, parsed
    if parsed.key is not None:
        return parsed.key, parsed
    id_in_key = task_id
    if request is not None and request.is_eager:
        # Celery gives all links of an eager chain the same id; their arguments differ.
        id_in_key = f"{task_id} {args!r} {kwargs!r}"
    key = configuration.rule.derive(
        args, kwargs, task_id=id_in_key, explicit_key=parsed.explicit_key
    )
    if request and request.headers and (request.replaced_task_nesting or request.is_eager):
        from celery_idempotent.core.task.message.canvas import key_in_canvas

        key = key_in_canvas(key, request, task_id)
    return key, parsed


def resolve_received_key(
    configuration: TaskConfiguration,
    request: Context,
    task_id: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Key | None, MessageHeaders]:
    """As :func:`resolve_key`, for a message that a worker runs; binds the headers for its body.

    Raises:
        KeyRuleError: also if the publisher has put a key where it is not read or, in shadow, has
            passed an invalid option.
        TypeError: if the arguments do not fit the task's signature.
    """
    task, enabled = configuration.rule.task, configuration.is_protected
    if enabled:
        names = (*(request.headers or ()), *(request.properties or ()), *kwargs)
        if call_options.names_any(names):
            from celery_idempotent.core.task.message import misplaced

            misplaced.check_message(configuration.rule, request, kwargs)
        if configuration.in_shadow:
            finding = message_headers.finding_of(task_id, request.headers)
            if finding == message_headers.REFUSED:
                raise KeyRuleError(f"{task}: an option of the call cannot be used")
    if headers := request.headers:
        try:
            request.headers = message_headers.bind(task, task_id, headers)
        except (KeyRuleError, SettingsError):
            if enabled:
                raise
            request.headers = message_headers.without_keys(headers)
    return resolve_key(configuration, task_id, headers, args, kwargs, request=request)
