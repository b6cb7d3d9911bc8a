"""``list`` prints records as a scan returns them; ``stats``, their number, size and rate."""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from time import sleep, strftime
from typing import TYPE_CHECKING, Any

import click

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.events.table import ANSWERED
from celery_idempotent.core.printable import did_you_mean, one_line, plural
from celery_idempotent.core.record import State
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.operations.calls import formatting
from celery_idempotent.operations.calls.statistics import (
    STATES,
    collect,
    double_executions,
    refusals,
)
from celery_idempotent.operations.cli import console
from celery_idempotent.operations.cli.command import (
    AppCommand,
    Tasks,
    filter_options,
    print_json,
    timeout_option,
)
from celery_idempotent.operations.records.query import RecordFilter, record_views
from celery_idempotent.operations.records.reader import RecordView
from celery_idempotent.operations.worker.inspect_commands import ask
from celery_idempotent.signals import SHADOW

if TYPE_CHECKING:
    from rich.console import Console

#: Name and width of each column before KEY, and the minimum width of a terminal that shows it.
_COLUMNS = (
    ("STATE", 9, 0),
    ("ATTEMPT", 7, 0),
    ("SINCE", 14, 0),
    ("UNTIL", 28, 110),
    ("TASK ID", 36, 150),
)
#: Maximum width of a label; a longer one is cut.
_LABEL_WIDTH = 24
#: Number of rows that are printed at a time.
_CHUNK = 100


@click.command("list", cls=AppCommand)
@filter_options
@click.option("--text", help="Part of the label, task, key, task id or worker.")
@click.option("--limit", type=click.IntRange(1), help="Print at most this many records.")
@click.option(
    "--watch",
    type=click.FloatRange(0.1),
    is_flag=False,
    flag_value=2.0,
    metavar="[SECONDS]",
    help="Keep running, and show the newest records every so many seconds (default: 2).",
)
def list_records(
    tasks: Tasks, limit: int | None, watch: float | None, as_json: bool, **selected: Any
) -> None:
    """List records, one per line. With --json, one JSON object per line."""
    stores, record_filter = app_tasks.stores(tasks), RecordFilter(**selected)
    if watch is not None:
        if as_json:
            raise click.UsageError("--watch cannot be combined with --json")
        with contextlib.suppress(KeyboardInterrupt):
            _watch(stores, record_filter, watch, limit)
        return
    views = islice((view for page in record_views(stores, record_filter) for view in page), limit)
    if as_json:
        for view in views:
            print_json(formatting.view_fields(view), indent=None)
    else:
        known, wanted = [task.name for task in tasks], record_filter.task
        hint = did_you_mean(wanted, known) if wanted and wanted not in known else ""
        _print(views, any(task.idempotency_configuration.label for task in tasks), hint)


def _print(views: Iterator[RecordView], labelled: bool, hint: str) -> None:
    """Prints the lines of a table in chunks, so that `list | head` ends after the first rows."""
    out = console.create()
    printed = False
    while chunk := list(islice(views, _CHUNK)):
        labelled = labelled or (not printed and _have_labels(chunk))
        lines = _lines(chunk, out, labelled=labelled)
        click.echo("\n".join(islice(lines, int(printed), None)))
        printed = True
    if not printed:
        out.print(f"No matching records{hint or '.'}")


def _have_labels(views: Iterable[RecordView]) -> bool:
    return any(view.record is not None and view.record.label for view in views)


def _lines(views: Iterable[RecordView], out: Console, *, labelled: bool) -> Iterator[str]:
    """Yields the header and a line for each record. A table of rich would take 20 times as long."""
    from rich.cells import cell_len, set_cell_size

    def styled(text: str, **style: Any) -> str:
        return text if out.no_color or not out.is_terminal else click.style(text, **style)

    columns = {name: size for name, size, least in _COLUMNS if out.width >= least}
    if labelled:
        columns["LABEL"] = _LABEL_WIDTH
    yield styled(
        " ".join([*(name.ljust(size) for name, size in columns.items()), "KEY"]), bold=True
    )
    for view in views:
        cells = _cells(view)
        parts = []
        for name, size in columns.items():
            text = one_line(cells.get(name, ""))
            if cell_len(text) > size:
                text = set_cell_size(text, size - 1) + "…"
            parts.append(set_cell_size(text, size))
        parts[0] = styled(parts[0], fg=console.STATE_STYLES.get(view.state, "magenta"))
        yield " ".join([*parts, cells["KEY"]])


def _cells(view: RecordView) -> dict[str, str]:
    record, cells = view.record, {"STATE": view.state, "KEY": str(view.key)}
    if record is None:
        return cells
    until = formatting.relative_time(record.deadline or record.expires_at, view.now)
    if record.deadline is not None:
        label = "lease" if record.state is State.STARTED else "reserved"
        until = f"{label} {'expired ' if view.is_past_deadline else ''}{until}"
    return cells | {
        "ATTEMPT": str(record.attempt or ""),
        "SINCE": formatting.relative_time(view.since, view.now),
        "UNTIL": until,
        "TASK ID": record.task_id,
        "LABEL": record.label,
    }


def _watch(
    stores: list[RecordStore], record_filter: RecordFilter, seconds: float, limit: int | None
) -> None:
    """Shows the newest records that fit on the screen, and the number in each state."""
    out = console.create()
    from rich.text import Text

    numbers: Counter[str] = Counter()

    def counted() -> Iterator[RecordView]:
        for page in record_views(stores, record_filter):
            numbers.update(view.state for view in page)
            yield from page

    while True:
        numbers.clear()
        # Four lines are left for the header, the caption and the prompt.
        rows = limit or max(1, out.height - 4)
        newest = heapq.nlargest(rows, counted(), key=lambda view: view.since)
        states = ", ".join(f"{number:,} {state}" for state, number in sorted(numbers.items()))
        caption = f"{strftime('%H:%M:%S')}  {states or 'no records'}"
        lines = [*_lines(newest, out, labelled=_have_labels(newest)), caption]
        click.clear()  # does nothing if piped
        out.print(Text.from_ansi("\n".join(lines), no_wrap=True, overflow="ellipsis"))
        sleep(seconds)


#: Headings of the numbers of records.
_RECORDS = (*STATES, "TAKEOVERS", "LEASE EXPIRED")
#: Minimum width of a console in which each number has a column of its own.
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
    replies = ask(obj.app, timeout)
    messages = replies.messages_held
    documents = collect(tasks, replies.totals, sample)
    if as_json:
        document = {"workers_answered": bool(replies.workers), "messages_held": messages}
        print_json({**document, "tasks": documents})
        return
    _print_statistics(documents, {task.name for task in tasks}, replies.error)
    if messages is not None:
        console.create().print(f"The workers hold {plural(messages, 'message')}.")


def _print_statistics(
    documents: Mapping[str, dict[str, Any]], known: Collection[str], unknown: str
) -> None:
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
