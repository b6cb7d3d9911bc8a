"""Outcomes in the user's own database, written in the transaction of the effects.

An execution claims a row before the body runs, and writes the outcome to it before the commit.
Effects and outcome are therefore committed together or not at all. A second execution of the key
waits in the database for the first to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: The option that names the database, for errors.
OPTION = "idempotency_transaction"


def database_of(task: Any) -> Any:
    """Returns the `Database` of the task's transactions; None if it has none."""
    return task.idempotency_configuration.settings.transaction or None


def databases(tasks: Iterable[Any]) -> set[Any]:
    """Returns each `Database` of these tasks."""
    return set(map(database_of, tasks)) - {None}
