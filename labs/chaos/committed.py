"""Effects that are rows in a database: those that are committed count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from labs.chaos.app import UNIT_SEPARATOR
from labs.chaos.evidence import Execution
from labs.chaos.schedule import Schedule


def declined_units(schedule: Schedule, units: Collection[str]) -> set[str]:
    """Returns those of `units` that end in an error, which rolls back their effects."""
    declined = {call.order for call in schedule.calls if call.ending == "declined"}
    return {unit for unit in units if unit.partition(UNIT_SEPARATOR)[0] in declined}


def without_rolled_back(
    executions: Sequence[Execution], rows: Sequence[Mapping[str, Any]]
) -> list[Execution]:
    """Returns all executions; one that is not among the committed rows has had no effect."""
    kept = {row["execution"] for row in rows}
    return [each if each.execution in kept else replace(each, done_at=None) for each in executions]


def receipts(
    executions: Sequence[Execution], rows: Sequence[Mapping[str, Any]], declined: Collection[str]
) -> dict[str, list[str]]:
    """Returns the receipts that the callers of each order may get.

    Those of its rows; for a declined order, which must have none, those of its executions.
    """
    found: dict[str, list[str]] = defaultdict(list)
    with_row = {row["name"] for row in rows}
    for row in rows:
        if row["name"] not in declined:
            found[row["name"]].append(row["receipt"])
    for each in executions:
        if each.order in declined and each.order not in with_row and each.receipt:
            found[each.order].append(each.receipt)
    return found
