"""Evaluates orders: the committed effects in a database, and those that may run again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
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


def overlaps(
    executions: Sequence[Execution],
    is_explained: Callable[[Execution, Execution], bool],
    begin_of: Callable[[Execution], float],
) -> list[str]:
    """Returns the orders of which two executions ran at once, without a reason.

    Args:
        begin_of: the sort key of the executions of an order.
    """
    by_order: dict[str, list[Execution]] = defaultdict(list)
    for execution in executions:
        order, separator, _ = execution.order.partition(UNIT_SEPARATOR)
        if separator and execution.done_at is not None:
            by_order[order].append(execution)
    found = []
    for order, its_executions in by_order.items():
        its_executions.sort(key=begin_of)
        for earlier, later in pairwise(its_executions):
            assert earlier.done_at is not None
            if later.started_at < earlier.done_at and not is_explained(earlier, later):
                found.append(order)
    return found


def is_swallowed(publish: Mapping[str, Any], by_order: Mapping[str, Sequence[Execution]]) -> bool:
    """Whether all effects of the message that answered a publish had begun before it."""
    started = [each.started_at for each in by_order.get(publish["order"], ()) if each.done_at]
    return bool(started) and max(started) < publish["at"]
