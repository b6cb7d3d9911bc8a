"""``stats``: number, size and rate of records, and the hit ratio, by task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import click

from celery_idempotent.core.events.table import ANSWERED
from celery_idempotent.core.printable import plural
from celery_idempotent.operations.calls import formatting
from celery_idempotent.operations.calls.statistics import (
    STATES,
    collect,
    double_executions,
    refusals,
)
from celery_idempotent.operations.cli import console
from celery_idempotent.operations.cli.command import AppCommand, Tasks, print_json, timeout_option
from celery_idempotent.operations.worker import inspect_commands
from celery_idempotent.signals import SHADOW

#: Headings of the numbers of records.
_RECORDS = (*STATES, "TAKEOVERS", "LEASE EXPIRED")
#: Least console width at which each number has a column of its own.
_WIDE = 140


@click.command(cls=AppCommand)
@click.option(
    "--sample", type=click.IntRange(0), default=200, show_default=True,
    help="Records of each task to measure with MEMORY USAGE.",
)  # fmt: skip
@timeout_option
@click.pass_obj
def stats(obj: Any, tasks: Tasks, sample: int, timeout: float, as_json: bool) -> None:
    """Count records by task and state.

    Scans all records, and also shows their sizes and rates. Records do not count their replays: the
    hit ratio comes from the workers' counters, which begin at zero when a worker starts.
    """
    replies = inspect_commands.ask(obj.app, timeout)
    held = replies.messages_held
    documents = collect(tasks, replies.totals, sample)
    if as_json:
        document = {"workers_answered": bool(replies.workers), "messages_held": held}
        print_json({**document, "tasks": documents})
        return
    _print(documents, {task.name for task in tasks}, replies.error)
    if held is not None:
        console.create().print(f"The workers hold {plural(held, 'message')}.")


def _print(documents: Mapping[str, dict[str, Any]], known: Collection[str], unknown: str) -> None:
    """Prints the tables, and the sums of all tasks.

    Args:
        known: names of the app's tasks.
        unknown: why the workers' counters are unknown; empty if they are not.
    """
    out = console.create()
    wide = out.width >= _WIDE
    columns = tuple(f">{name}" for name in _RECORDS) if wide else ("RECORDS",)
    columns += (">BYTES", ">PER MINUTE", ">PROJECTED", ">HIT RATIO")
    # NOT A TASK: functions, engines (also those of HTTP), and tasks that this app does not have.
    tables = {True: console.table("TASK", *columns), False: console.table("NOT A TASK", *columns)}
    would = (f">{name.removeprefix('would_').replace('_', ' ').upper()}" for name in SHADOW)
    shadow = console.table("IN SHADOW, WOULD", *would, ">DOUBLE EXECUTIONS")
    for name, task in documents.items():
        states = (task["states"][state] for state in STATES)
        numbers = [*states, task["takeovers"], task["lease_expired"]]
        # A narrow terminal shows each number on a line of its own, without zeros.
        pairs = zip(numbers, _RECORDS, strict=True)
        lines = "\n".join(f"{number:,} {heading}" for number, heading in pairs if number)
        ratio, counts = task["hit_ratio"], task["counts"]
        tables[name in known].add_row(
            console.text(name),
            *([f"{number:,}" for number in numbers] if wide else [lines]),
            formatting.size(task["bytes_total"]),
            f"{task['per_second'] * 60:,.1f}",
            formatting.size(task["bytes_projected"]),
            "–" if ratio is None else f"{ratio:.1%}",
        )
        if any(counts.get(decision) for decision in SHADOW):
            cells = [*(counts.get(decision, 0) for decision in SHADOW), task["double_executions"]]
            shadow.add_row(console.text(name), *(f"{number:,}" for number in cells))
    for table in (*tables.values(), shadow):
        if table.row_count or table is tables[True]:
            out.print(table)
    tasks = documents.values()
    stored, projected = (
        formatting.size(sum(task[name] or 0.0 for task in tasks))
        for name in ("bytes_total", "bytes_projected")
    )
    out.print(
        f"{plural(sum(task['records'] for task in tasks), 'record')}, {stored} (estimated from a "
        f"sample); {projected} projected from the rate of the last hour (rate × retention × size)."
    )
    counted = sum((Counter(task["counts"]) for task in tasks), Counter[str]())
    for line in [f"{unknown}{_UNKNOWN}"] if unknown else _summary(counted):
        out.print(console.text(line))
    if corrupt := sum(task["states"]["CORRUPT"] for task in tasks):
        out.print(
            f"{plural(corrupt, 'record')} cannot be read: "
            "find them with list, and forget them by key."
        )


_UNKNOWN = ", so HIT RATIO (the share of calls that were replayed) is unknown."


def _summary(counter: Counter[str]) -> Iterator[str]:
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in refusals(counter).items())
    yield (
        f"Since the workers started: {plural(counter['run'] + counter['takeover'], 'execution')}, "
        f"{plural(counter['replay'], 'replay')}, {plural(counter['conflict'], 'conflict')}, "
        f"{plural(counter['takeover'], 'takeover')}, {plural(counter['refused'], 'refusal')}"
        f"{f' ({reasons})' if reasons else ''}, "
        f"{plural(counter['deduplicated'], 'duplicate')} not published by them."
    )
    soon, later, last = (counter[name] for name in ANSWERED)
    if soon + later + last:
        yield (
            f"Duplicates that were put back: {soon:,} answered within 100 ms after the run, "
            f"{later:,} within 1 s, {last:,} later."
        )
    if doubles := double_executions(counter):
        yield (
            f"{plural(doubles, 'call')} in shadow ran although another call with the same key had "
            "run, was running or was queued."
        )
