"""``stats``: how many, how large, how fast, and what duplicates it saves."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from celery_idempotent.cli import console as screen
from celery_idempotent.cli import formatting
from celery_idempotent.cli.command import FriendlyCommand, gated_tasks, json_option, print_json
from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.monitoring import inspect_commands
from celery_idempotent.monitoring.statistics import TaskStatistics, collect

_STATES = ("RESERVED", "STARTED", "COMPLETED", "FAILED")
_NUMBERS = (*_STATES, "TRY > 1", "LEASE OVER")
#: Letters that a table with a column for each number takes.
_WIDE = 130


@click.command(cls=FriendlyCommand)
@click.option(
    "--sample", type=click.IntRange(0), default=200, show_default=True,
    help="Records of each task to measure with MEMORY USAGE.",
)  # fmt: skip
@click.option(
    "--timeout", type=click.FloatRange(0), default=1.0, show_default=True,
    help="Seconds to wait for the workers' counts; 0 does not ask.",
)  # fmt: skip
@json_option
@click.pass_obj
def stats(obj: Any, sample: int, timeout: float, as_json: bool) -> None:
    """Count records by task and state, with their sizes, rates and replays.

    Goes over all records by SCAN. How many calls were answered from a record, no record can tell:
    that is what the workers have counted since they were started.
    """
    tasks = gated_tasks(obj.app)
    with _progress(tasks) as progress:
        collected = collect(tasks, sample, progress)
    counts = inspect_commands.counts(obj.app, timeout) if timeout else None
    if as_json:
        print_json(_document(collected, counts))
    else:
        _print(collected, counts)


def hit_ratio(counts: Mapping[str, int]) -> float | None:
    """The part of calls that was answered from a record."""
    calls = counts.get("begun", 0) + counts.get("replayed", 0)
    return counts.get("replayed", 0) / calls if calls else None


@contextmanager
def _progress(tasks: Sequence[IdempotentTaskLike]) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, for scans that last; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    total = 0
    for store in app_tasks.stores(tasks):
        with store.open_reader() as open_reader:
            total += open_reader.count_names()
    columns = (TextColumn("scanning"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen.console(stderr=True), transient=True) as bar:
        task = bar.add_task("scanning", total=total)

        def advance(number: int) -> None:
            bar.update(task, advance=number)

        yield advance


def _document(
    collected: Mapping[str, TaskStatistics], counts: Mapping[str, Counter[str]] | None
) -> dict[str, Any]:
    return {
        "workers_answered": counts is not None,
        "tasks": {
            name: {
                "records": one.records,
                "states": {state: one.states[state] for state in (*_STATES, "CORRUPT")},
                "takeovers": one.taken_over,
                "lease_expired": one.lease_expired,
                "bytes_per_record": one.bytes_per_record,
                "bytes_total": one.bytes_total,
                "per_second": one.rate,
                "retention": one.retention,
                "bytes_projected": one.bytes_projected,
                "counts": dict((counts or {}).get(name, {})),
                "hit_ratio": hit_ratio((counts or {}).get(name, {})),
            }
            for name in sorted({*collected, *(counts or {})})
            for one in [collected.get(name, TaskStatistics())]
        },
    }


def _print(
    collected: Mapping[str, TaskStatistics], counts: Mapping[str, Counter[str]] | None
) -> None:
    from rich.text import Text

    console = screen.console()
    wide = console.width >= _WIDE
    numbers = tuple(f">{name}" for name in _NUMBERS) if wide else ("RECORDS",)
    table = screen.table("TASK", *numbers, ">BYTES", ">A MINUTE", ">AT THIS RATE", ">HITS")
    corrupt = 0
    for name in sorted({*collected, *(counts or {})}):
        one = collected.get(name, TaskStatistics())
        corrupt += one.states["CORRUPT"]
        table.add_row(
            Text(name),
            *(_numbers(one) if wide else [_lines(one)]),
            _size(one.bytes_total),
            f"{one.rate * 60:,.1f}",
            _size(one.bytes_projected),
            _percent(hit_ratio((counts or {}).get(name, {}))),
        )
    console.print(table)
    for line in _remarks(collected, counts, corrupt):
        console.print(line)


def _numbers(one: TaskStatistics) -> list[str]:
    """In the order of the columns."""
    states = (one.states[state] for state in _STATES)
    return [f"{number:,}" for number in (*states, one.taken_over, one.lease_expired)]


def _lines(one: TaskStatistics) -> str:
    """The same below each other, where the terminal has no room for columns; no zeros."""
    named = zip(_NUMBERS, _numbers(one), strict=True)
    return "\n".join(f"{number} {name}" for name, number in named if number != "0")


def _remarks(
    collected: Mapping[str, TaskStatistics],
    counts: Mapping[str, Counter[str]] | None,
    corrupt: int,
) -> Iterator[str]:
    number = sum(one.records for one in collected.values())
    now = sum(one.bytes_total or 0 for one in collected.values())
    then = sum(one.bytes_projected or 0 for one in collected.values())
    yield (
        f"{formatting.plural(number, 'record')}, {formatting.size(now)} by a sample; "
        f"{formatting.size(then)} if "
        "outcomes go on coming as in the last hour (rate × retention × size)."
    )
    if counts is None:
        yield "No worker has answered: HITS (the part of calls that was replayed) is not known."
    else:
        total: Counter[str] = sum(counts.values(), Counter())
        yield (
            f"Since the workers started: {formatting.plural(total['begun'], 'execution')}, "
            f"{formatting.plural(total['replayed'], 'replay')}, "
            f"{formatting.plural(total['conflicted'], 'conflict')}, "
            f"{formatting.plural(total['taken_over'], 'takeover')}."
        )
    if corrupt:
        yield (
            f"{formatting.plural(corrupt, 'record')} cannot be read: "
            "see list, and forget them by key."
        )


def _size(number: float | None) -> str:
    return "–" if number is None else formatting.size(number)


def _percent(part: float | None) -> str:
    return "–" if part is None else f"{part:.1%}"
