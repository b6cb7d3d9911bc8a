"""Evaluates the orders that may run again: one execution at once, and no publish swallowed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from labs.chaos.app import UNIT_SEPARATOR
from labs.chaos.evidence import Execution


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
