"""A message of a task in shadow (``idempotency_shadow``): its body runs, whatever its key is.

What the publisher has found out before is in a header of the message: that it would not have been
published, or that its explicit key cannot be used. The worker counts that, where the counters are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.app.task import Context

from celery_idempotent.errors import IdempotencyError, KeyRuleError
from celery_idempotent.executor import shadow
from celery_idempotent.executor.executor import Executor
from celery_idempotent.task import message_headers
from celery_idempotent.task.call import TaskCall
from celery_idempotent.task.options.call_options import SHADOW_HEADER

if TYPE_CHECKING:
    from celery_idempotent.task.task import IdempotentTask

logger = logging.getLogger(__name__)

#: What the publisher has found out.
DEDUPLICATED, REFUSED = "deduplicated", "refused"


def mark(headers: Mapping[str, Any] | None, finding: str, task_id: str) -> dict[str, Any]:
    """Returns `headers` with a finding about the message `task_id`; any other ignores it."""
    return {**(headers or {}), SHADOW_HEADER: f"{finding} {task_id}"}


def retry_options(
    task: IdempotentTask, request: Context, options: dict[str, Any]
) -> dict[str, Any]:
    """Returns the options of a retry, with the key of the message among its headers."""
    call = TaskCall.of(request)
    if call is None:
        return options
    try:
        headers = message_headers.for_retry(
            task.name, request.id, request.headers, options.get("headers")
        )
        headers = message_headers.with_derived_key(headers, call.key, request.id, call.root)
    except IdempotencyError as error:
        logger.debug("%s: in shadow: the retry has no key: %s", call.key, error)
        return options
    return {**options, "headers": headers}


def check(task: str, request: Context) -> None:
    """Rejects a message of `task` whose publisher was given an explicit key that cannot be used.

    Raises:
        KeyRuleError: naming the task.
    """
    if _finding(request) == REFUSED:
        raise KeyRuleError(f"{task}: an option of the call cannot be used")


def enter_of(executor: Executor, request: Context) -> Callable[[TaskCall], Any]:
    """Returns the function that runs the call of `request`."""
    request.idempotency_without_body = False
    return partial(shadow.enter, executor, deduplicated=_finding(request) == DEDUPLICATED)


def _finding(request: Context) -> str:
    """Returns what the publisher of this message has found out; empty if nothing."""
    finding, _, task_id = str((request.headers or {}).get(SHADOW_HEADER)).partition(" ")
    return finding if task_id == request.id else ""
