"""``stats``: number, size and rate of records, and the hit ratio, by task."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from celery_idempotent import signals
from celery_idempotent.cli import console
from celery_idempotent.cli.command import AppCommand, Tasks, print_json, timeout_option
from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.events.table import REFUSED_FOR
from celery_idempotent.monitoring import formatting, inspect_commands
from celery_idempotent.monitoring.statistics import TaskStatistics, collect, double_executions
from celery_idempotent.printable import plural
from celery_idempotent.record.record import State
from celery_idempotent.signals import SHADOW
from celery_idempotent.store.inspection.record_reader import RecordReader

_STATES = tuple(state.value for state in State)
#: Console width from which on each number has a column of its own.
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

    Scans all records, and shows their sizes and rates as well. Records do not count how often they
    were replayed, so the hit ratio comes from the workers' counters, which begin at zero when a
    worker starts.
    """
    with _progress(tasks) as progress:
        statistics = collect(tasks, sample, progress)
    replies = inspect_commands.ask(obj.app, timeout)
    counters, held = replies.totals(), replies.messages_held()
    rows = {
        name: (statistics.get(name, TaskStatistics()), (counters or {}).get(name, Counter()))
        for name in sorted({*statistics, *(counters or {})})
    }
    if as_json:
        documents = {name: _document(*row) for name, row in rows.items()}
        document = {"workers_answered": counters is not None, "messages_held": held}
        print_json({**document, "tasks": documents})
    else:
        known = {task.name for task in tasks}
        _print(rows, known, "" if counters is not None else replies.error)
        if held is not None:
            console.create().print(f"The workers hold {plural(held, 'message')}.")


def hit_ratio(counter: Mapping[str, int]) -> float | None:
    """Returns the share of calls that were replayed; None if there were no calls."""
    replays = counter.get("replay", 0)
    calls = counter.get("run", 0) + counter.get("takeover", 0) + replays
    return replays / calls if calls else None


@contextmanager
def _progress(tasks: Sequence[IdempotentTaskLike]) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on a terminal; yields a function that advances it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    out = console.create(stderr=True)
    from rich import progress

    total = 0
    for store in app_tasks.stores(tasks):
        with RecordReader.open(store) as reader:
            total += reader.count_names()
    columns = (
        *(progress.TextColumn("scanning"), progress.BarColumn()),
        *(progress.MofNCompleteColumn(), progress.TimeRemainingColumn()),
    )
    with progress.Progress(*columns, console=out, transient=True) as bar:
        scan = bar.add_task("scanning", total=total)
        yield lambda number: bar.update(scan, advance=number)


def _document(statistics: TaskStatistics, counter: Mapping[str, int]) -> dict[str, Any]:
    names = (
        *("takeovers", "lease_expired", "bytes_per_record", "bytes_total"),
        *("per_second", "retention", "bytes_projected"),
    )
    return {
        "records": statistics.records,
        "states": {state: statistics.states[state] for state in (*_STATES, "CORRUPT")},
        **{name: getattr(statistics, name) for name in names},
        "counts": dict(counter),
        "decisions": sum(counter.get(decision, 0) for decision in signals.DECISIONS),
        "refused": _refusals(counter),
        "double_executions": double_executions(counter),
        "hit_ratio": hit_ratio(counter),
    }


def _refusals(counter: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of refusals by reason."""
    counts = {reason: counter.get(REFUSED_FOR + reason, 0) for reason in signals.REASONS}
    return {reason: number for reason, number in counts.items() if number}


def _print(
    rows: Mapping[str, tuple[TaskStatistics, Counter[str]]], known: Collection[str], unknown: str
) -> None:
    out = console.create()
    names = (*_STATES, "TAKEOVERS", "LEASE EXPIRED")
    wide = out.width >= _WIDE
    columns = tuple(f">{name}" for name in names) if wide else ("RECORDS",)
    columns += (">BYTES", ">PER MINUTE", ">PROJECTED", ">HIT RATIO")
    # Functions and engines, those of HTTP among them, and tasks that this app does not have.
    tables = {True: console.table("TASK", *columns), False: console.table("NOT A TASK", *columns)}
    shadow_columns = (
        f">{name.removeprefix('would_').replace('_', ' ').upper()}" for name in SHADOW
    )
    shadow = console.table("IN SHADOW, WOULD", *shadow_columns, ">DOUBLE EXECUTIONS")
    total, counted = TaskStatistics(), Counter[str]()
    stored = projected = 0.0
    for name, (found, counter) in rows.items():
        states = [found.states[state] for state in _STATES]
        numbers = dict(zip(names, [*states, found.takeovers, found.lease_expired], strict=True))
        # For narrow terminals the numbers but zeros, a line each.
        lines = "\n".join(f"{number:,} {name}" for name, number in numbers.items() if number)
        ratio = hit_ratio(counter)
        tables[name in known].add_row(
            console.text(name),
            *([f"{number:,}" for number in numbers.values()] if wide else [lines]),
            formatting.size(found.bytes_total),
            f"{found.per_second * 60:,.1f}",
            formatting.size(found.bytes_projected),
            "–" if ratio is None else f"{ratio:.1%}",
        )
        if any(counter[name] for name in SHADOW):
            counts = (f"{counter[name]:,}" for name in SHADOW)
            shadow.add_row(console.text(name), *counts, f"{double_executions(counter):,}")
        total.states += found.states
        stored += found.bytes_total or 0
        projected += found.bytes_projected or 0
        counted += counter
    for table in (*tables.values(), shadow):
        if table.row_count or table is tables[True]:
            out.print(table)
    out.print(
        f"{plural(total.records, 'record')}, {formatting.size(stored)} (estimated from a sample); "
        f"{formatting.size(projected)} projected from the rate of the last hour "
        "(rate × retention × size)."
    )
    for line in [f"{unknown}{_UNKNOWN}"] if unknown else _summary(counted):
        out.print(console.text(line))
    if corrupt := total.states["CORRUPT"]:
        out.print(
            f"{plural(corrupt, 'record')} cannot be read: "
            "find them with list, and forget them by key."
        )


_UNKNOWN = ", so HIT RATIO (the share of calls that were replayed) is unknown."


def _summary(counter: Counter[str]) -> Iterator[str]:
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in _refusals(counter).items())
    yield (
        f"Since the workers started: {plural(counter['run'] + counter['takeover'], 'execution')}, "
        f"{plural(counter['replay'], 'replay')}, {plural(counter['conflict'], 'conflict')}, "
        f"{plural(counter['takeover'], 'takeover')}, {plural(counter['refused'], 'refusal')}"
        f"{f' ({reasons})' if reasons else ''}, "
        f"{counter['deduplicated']:,} not published as duplicates."
    )
    if doubles := double_executions(counter):
        yield (
            f"{plural(doubles, 'call')} in shadow ran although another call of the same key had "
            "run, was running or was queued."
        )
