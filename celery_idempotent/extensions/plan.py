"""Chooses the extensions of a call by its options."""

from __future__ import annotations

from celery_idempotent.extensions.steps import Steps
from celery_idempotent.extensions.transaction import RowTransaction
from celery_idempotent.flow.active_call import Plan
from celery_idempotent.settings import Settings


def plan_for(settings: Settings) -> Plan:
    """Returns the extensions that the options of a call add to its flow."""
    return Plan(Steps, () if settings.transaction is None else (RowTransaction,))
