"""Explains a call that a form or a JSON object describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

from celery_idempotent.dashboard.context import Context
from celery_idempotent.errors import KeyRuleError
from celery_idempotent.key.rule import TASK_ID
from celery_idempotent.monitoring.explained_call import ExplainedCall, explain_call


def explained(context: Context, call: Mapping[str, Any]) -> ExplainedCall:
    """Explains a call.

    Args:
        call: ``task``, ``args``, ``kwargs``, ``key`` (a text, or a list of texts) and ``task_id``;
            all but the task may be missing.

    Raises:
        HTTPException: 400 if it is not the call of an idempotent task.
    """
    task = next((task for task in context.tasks if task.name == call.get("task")), None)
    if task is None:
        raise HTTPException(400, f"{call.get('task')!r} is not an idempotent task of this app.")
    args, kwargs = call.get("args", []), call.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise HTTPException(400, "The arguments are not a JSON list and a JSON object.")
    own_key, task_id = call.get("key") or None, call.get("task_id") or None
    if isinstance(own_key, list):
        own_key = tuple(own_key)
    if task.idempotency_configuration.settings.key is TASK_ID and not (own_key or task_id):
        raise HTTPException(400, f"The key rule of {task.name} is TASK_ID: give the task's id.")
    try:
        return explain_call(task, args, kwargs, own_key=own_key, task_id=task_id)
    except TypeError as error:
        raise HTTPException(400, f"The arguments do not fit {task.name}: {error}") from None
    except KeyRuleError as error:
        raise HTTPException(400, f"No key can be derived: {error}") from None
