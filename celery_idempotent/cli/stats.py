"""``stats``: number, size and rate of records, and the hit ratio, by task."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from celery_idempotent import signals
from celery_idempotent.cli import console
from celery_idempotent.cli.command import (
    FriendlyCommand,
    idempotent_tasks,
    json_option,
    print_json,
    timeout_option,
)
from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.events.table import REFUSED_FOR
from celery_idempotent.monitoring import formatting, inspect_commands
from celery_idempotent.monitoring.statistics import TaskStatistics, collect, double_executions

_STATES = ("RESERVED", "STARTED", "COMPLETED", "FAILED")
_NUMBERS = (*_STATES, "TAKEOVERS", "LEASE EXPIRED")
#: Console width from which on each number has a column of its own.
_WIDE = 140


@click.command(cls=FriendlyCommand)
@click.option(
    "--sample", type=click.IntRange(0), default=200, show_default=True,
    help="Records of each task to measure with MEMORY USAGE.",
)  # fmt: skip
@timeout_option
@json_option
@click.pass_obj
def stats(obj: Any, sample: int, timeout: float, as_json: bool) -> None:
    """Count records by task and state.

    Scans all records, and shows their sizes and rates as well. Records do not count how often they
    were replayed, so the hit ratio comes from the workers' counters, which begin at zero when a
    worker starts.
    """
    tasks = idempotent_tasks(obj.app)
    with _progress(tasks) as progress:
        statistics = collect(tasks, sample, progress)
    counters = inspect_commands.counts(obj.app, timeout) if timeout else None
    names = sorted({*statistics, *(counters or {})})
    rows = {
        name: (statistics.get(name, TaskStatistics()), (counters or {}).get(name, Counter()))
        for name in names
    }
    if as_json:
        print_json(
            {
                "workers_answered": counters is not None,
                "tasks": {name: _document(*row) for name, row in rows.items()},
            }
        )
    else:
        _print(rows, workers_replied=counters is not None)


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
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    total = 0
    for store in app_tasks.stores(tasks):
        with store.open_reader() as reader:
            total += reader.count_names()
    columns = (TextColumn("scanning"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        scan = bar.add_task("scanning", total=total)
        yield lambda number: bar.update(scan, advance=number)


def _document(statistics: TaskStatistics, counter: Mapping[str, int]) -> dict[str, Any]:
    return {
        "records": statistics.records,
        "states": {state: statistics.states[state] for state in (*_STATES, "CORRUPT")},
        "takeovers": statistics.takeovers,
        "lease_expired": statistics.lease_expired,
        "bytes_per_record": statistics.bytes_per_record,
        "bytes_total": statistics.bytes_total,
        "per_second": statistics.per_second,
        "retention": statistics.retention,
        "bytes_projected": statistics.bytes_projected,
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


def _reasons(counter: Mapping[str, int]) -> str:
    refusals = _refusals(counter)
    listed = ", ".join(f"{reason} {number:,}" for reason, number in refusals.items())
    return f" ({listed})" if listed else ""


def _print(
    rows: Mapping[str, tuple[TaskStatistics, Counter[str]]], *, workers_replied: bool
) -> None:
    out = console.create()
    wide = out.width >= _WIDE
    numbers = tuple(f">{name}" for name in _NUMBERS) if wide else ("RECORDS",)
    table = console.table("TASK", *numbers, ">BYTES", ">PER MINUTE", ">PROJECTED", ">HIT RATIO")
    for name, (statistics, counter) in rows.items():
        ratio = hit_ratio(counter)
        table.add_row(
            console.text(name),
            *(_numbers(statistics) if wide else [_number_lines(statistics)]),
            formatting.size(statistics.bytes_total),
            f"{statistics.per_second * 60:,.1f}",
            formatting.size(statistics.bytes_projected),
            "–" if ratio is None else f"{ratio:.1%}",
        )
    out.print(table)
    _print_shadow({name: counter for name, (_, counter) in rows.items()}, out)
    for line in _summary(rows, workers_replied=workers_replied):
        out.print(line)


def _print_shadow(counters: Mapping[str, Mapping[str, int]], out: Any) -> None:
    """Shows what would have become of the calls of each task in shadow."""
    names = signals.SHADOW
    headings = (f">{name.removeprefix('would_').replace('_', ' ').upper()}" for name in names)
    table = console.table("IN SHADOW, WOULD", *headings, ">DOUBLE EXECUTIONS")
    for task, counter in counters.items():
        if any(counter.get(name) for name in names):
            numbers = (f"{counter.get(name, 0):,}" for name in names)
            table.add_row(console.text(task), *numbers, f"{double_executions(counter):,}")
    if table.row_count:
        out.print(table)


def _numbers(statistics: TaskStatistics) -> list[str]:
    """Returns the numbers in the order of _NUMBERS."""
    states = (statistics.states[state] for state in _STATES)
    return [f"{n:,}" for n in (*states, statistics.takeovers, statistics.lease_expired)]


def _number_lines(statistics: TaskStatistics) -> str:
    """Returns the numbers but zeros in one cell, a line each, for narrow terminals."""
    named = zip(_NUMBERS, _numbers(statistics), strict=True)
    return "\n".join(f"{number} {name}" for name, number in named if number != "0")


def _summary(
    rows: Mapping[str, tuple[TaskStatistics, Counter[str]]], *, workers_replied: bool
) -> Iterator[str]:
    all_statistics = [statistics for statistics, _ in rows.values()]
    number = sum(statistics.records for statistics in all_statistics)
    total = formatting.size(sum(statistics.bytes_total or 0 for statistics in all_statistics))
    projected = formatting.size(
        sum(statistics.bytes_projected or 0 for statistics in all_statistics)
    )
    yield (
        f"{formatting.plural(number, 'record')}, {total} (estimated from a sample); {projected} "
        "projected from the rate of the last hour (rate × retention × size)."
    )
    if workers_replied:
        counter: Counter[str] = sum((counter for _, counter in rows.values()), Counter())
        yield (
            "Since the workers started: "
            f"{formatting.plural(counter['run'] + counter['takeover'], 'execution')}, "
            f"{formatting.plural(counter['replay'], 'replay')}, "
            f"{formatting.plural(counter['conflict'], 'conflict')}, "
            f"{formatting.plural(counter['takeover'], 'takeover')}, "
            f"{formatting.plural(counter['refused'], 'refusal')}{_reasons(counter)}, "
            f"{counter['deduplicated']:,} not published as duplicates."
        )
        if doubles := double_executions(counter):
            yield (
                f"{formatting.plural(doubles, 'call')} in shadow ran although another call of the "
                "same key had run, was running or was queued."
            )
    else:
        yield "No worker replied, so HIT RATIO (the share of calls that were replayed) is unknown."
    corrupt = sum(statistics.states["CORRUPT"] for statistics in all_statistics)
    if corrupt:
        yield (
            f"{formatting.plural(corrupt, 'record')} cannot be read: "
            "find them with list, and forget them by key."
        )
