"""The extensions of a call, by its options."""

from __future__ import annotations

from collections.abc import Callable

from celery_idempotent.extensions.combined_write import CombinedWrite
from celery_idempotent.extensions.steps import Steps
from celery_idempotent.extensions.transaction import RowTransaction
from celery_idempotent.flow.active_call import ActiveCall
from celery_idempotent.flow.extension import Extension, Plan
from celery_idempotent.settings import Settings


def plan_for(settings: Settings, *, writes_result: bool = False) -> Plan:
    """Returns what the options of a call add to its flow.

    Args:
        writes_result: whether the script that completes a record writes the task's result, too.
    """
    extensions: list[Callable[[ActiveCall], Extension]] = []
    if writes_result:
        extensions.append(CombinedWrite)
    if settings.transaction is not None:
        extensions.append(RowTransaction)
    return Plan(Steps, tuple(extensions))
