"""Idempotent Celery tasks on Redis: duplicates get the first outcome, not a second execution."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery.signals import celeryd_init, worker_process_init

from celery_idempotent.core.key.rule import TASK_ID
from celery_idempotent.core.record import Record, State
from celery_idempotent.core.task.task import IdempotentTask
from celery_idempotent.errors import (
    ConflictError,
    CorruptRecordError,
    IdempotencyError,
    KeyReusedError,
    KeyRuleError,
    LeaseLostError,
    PoisonedTaskError,
    ReplacedError,
    ResultNotStoredError,
    StoreUnavailableError,
    TransactionError,
)

if TYPE_CHECKING:
    from celery_idempotent.core.task.publish.result import CallOutcome, outcome_of
    from celery_idempotent.functions.direct_call import Decision
    from celery_idempotent.functions.engine import Idempotency

__version__ = "0.1.0"

__all__ = [
    "TASK_ID",
    "CallOutcome",
    "ConflictError",
    "CorruptRecordError",
    "Decision",
    "Idempotency",
    "IdempotencyError",
    "IdempotentTask",
    "KeyReusedError",
    "KeyRuleError",
    "LeaseLostError",
    "PoisonedTaskError",
    "Record",
    "ReplacedError",
    "ResultNotStoredError",
    "State",
    "StoreUnavailableError",
    "TransactionError",
    "outcome_of",
]


#: What is imported when it is first used: programs that have only tasks do without it.
_LATER = {
    "CallOutcome": "core.task.publish.result",
    "Decision": "functions.direct_call",
    "Idempotency": "functions.engine",
    "outcome_of": "core.task.publish.result",
}


# Connected here, so that users need no code for checks and monitoring. Programs that only publish
# never load these.
def _on_worker_start(instance: Any, **_: Any) -> None:
    from celery_idempotent.operations.worker import start

    start.add_to(instance.app)


def _on_process_start(**_: Any) -> None:
    from celery_idempotent.operations.worker import start

    start.enter_process()


celeryd_init.connect(_on_worker_start, weak=False)
worker_process_init.connect(_on_process_start, weak=False)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value
    return value
