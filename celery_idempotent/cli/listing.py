"""``list``: prints records as a scan returns them, or a table that is refreshed."""

from __future__ import annotations

import contextlib
import heapq
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from time import sleep, strftime
from typing import TYPE_CHECKING, Any

import click

from celery_idempotent.cli import console
from celery_idempotent.cli.command import (
    FriendlyCommand,
    filter_options,
    idempotent_tasks,
    json_option,
    print_json,
)
from celery_idempotent.configuration import app_tasks
from celery_idempotent.monitoring import formatting, json_format
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.inspection.record_query import RecordFilter, record_views, since
from celery_idempotent.store.inspection.record_reader import RecordView
from celery_idempotent.store.record_store import RecordStore

if TYPE_CHECKING:
    from rich.table import Table

#: Name and width of each column before KEY, and the width of the terminal that it needs.
_COLUMNS = (
    ("STATE", 9, 0),
    ("ATTEMPT", 7, 0),
    ("SINCE", 14, 0),
    ("UNTIL", 28, 110),
    ("TASK ID", 36, 150),
)
#: Columns of a label; a longer one is cut.
_LABEL_WIDTH = 24
#: Rows of the first printed chunk, and of each later one.
_FIRST_CHUNK, _CHUNK = 10, 100


@click.command("list", cls=FriendlyCommand)
@filter_options
@click.option("--limit", type=click.IntRange(1), help="Print at most this many records.")
@click.option(
    "--watch",
    type=click.FloatRange(0.1),
    is_flag=False,
    flag_value=2.0,
    metavar="[SECONDS]",
    help="Keep running, and show the newest records every so many seconds (default: 2).",
)
@json_option
@click.pass_obj
def list_records(
    obj: Any,
    record_filter: RecordFilter,
    limit: int | None,
    watch: float | None,
    as_json: bool,
) -> None:
    """List records, one per line. With --json, one JSON object per line."""
    tasks = idempotent_tasks(obj.app)
    stores = app_tasks.stores(tasks)
    if watch is not None:
        if as_json:
            raise click.UsageError("--watch cannot be combined with --json")
        with contextlib.suppress(KeyboardInterrupt):
            _watch(stores, record_filter, watch, limit)
        return
    views = islice((view for page in record_views(stores, record_filter) for view in page), limit)
    if as_json:
        for view in views:
            print_json(json_format.view_fields(view), indent=None)
    else:
        _print(views, any(task.idempotency_configuration.label for task in tasks))


def _print(views: Iterator[RecordView], labelled: bool) -> None:
    """Prints a table in chunks, so that `list | head` ends after the first rows."""
    out = console.create()
    size, printed = _FIRST_CHUNK, False
    while chunk := list(islice(views, size)):
        if not printed:
            labelled = labelled or any(map(_label, chunk))
        out.print(_table(chunk, out.width, labelled, show_header=not printed), crop=False)
        size, printed = _CHUNK, True
    if not printed:
        out.print("No matching records.")


def _table(
    views: Iterable[RecordView], width: int, labelled: bool, *, show_header: bool = True
) -> Table:
    from rich.table import Table

    columns = [(name, size) for name, size, least in _COLUMNS if width >= least]
    if labelled:
        columns.append(("LABEL", _LABEL_WIDTH))
    table = Table(box=None, show_header=show_header, pad_edge=False, header_style="bold")
    for name, size in columns:
        table.add_column(name, width=size, no_wrap=True, overflow="ellipsis")
    table.add_column("KEY", no_wrap=True, overflow="ellipsis")
    for view in views:
        cells = _cells(view)
        style = console.STATE_STYLES.get(cells["STATE"], "magenta")
        table.add_row(
            *(
                console.text(cells[name], style=style if name == "STATE" else "")
                for name, _ in columns
            ),
            console.text(str(view.key)),
        )
    return table


def _cells(view: RecordView) -> dict[str, str]:
    record = view.record
    if record is None:
        return {name: "" for name, _, _ in _COLUMNS} | {"STATE": "CORRUPT", "LABEL": ""}
    return {
        "STATE": record.state.value,
        "ATTEMPT": str(record.attempt or ""),
        "SINCE": formatting.relative_time(since(record), view.now),
        "UNTIL": _until(record, view),
        "TASK ID": record.task_id,
        "LABEL": record.label,
    }


def _label(view: RecordView) -> str:
    return "" if view.record is None else view.record.label


def _until(record: Record, view: RecordView) -> str:
    if record.deadline is None:
        return formatting.relative_time(record.expires_at, view.now)
    label = "lease" if record.state is State.STARTED else "reserved"
    expired = "expired " if view.is_past_deadline else ""
    return f"{label} {expired}{formatting.relative_time(record.deadline, view.now)}"


def _watch(
    stores: list[RecordStore], record_filter: RecordFilter, seconds: float, limit: int | None
) -> None:
    out = console.create()
    from rich.live import Live

    # On a terminal each table replaces the one before; piped, it follows it.
    screen = Live(console=out, auto_refresh=False, screen=True)
    with screen if out.is_terminal else contextlib.nullcontext() as live:
        while True:
            table = _newest(stores, record_filter, limit, out.width)
            if live is None:
                out.print(table)
            else:
                live.update(table, refresh=True)
            sleep(seconds)


def _newest(
    stores: list[RecordStore], record_filter: RecordFilter, limit: int | None, width: int
) -> Table:
    """Returns a table of the newest records that fit the screen, and the number in each state."""
    numbers: Counter[str] = Counter()

    def readable_views() -> Iterator[RecordView]:
        for page in record_views(stores, record_filter):
            for view in page:
                numbers[view.state] += 1
                if view.record is not None:
                    yield view

    # The header, the caption and the prompt take lines, too.
    rows = limit or max(1, shutil.get_terminal_size().lines - 4)
    newest = heapq.nlargest(rows, readable_views(), key=_since)
    table = _table(newest, width, any(map(_label, newest)))
    table.caption = f"{strftime('%H:%M:%S')}  " + (
        ", ".join(f"{number:,} {state}" for state, number in sorted(numbers.items()))
        or "no records"
    )
    table.caption_justify = "left"
    return table


def _since(view: RecordView) -> datetime:
    assert view.record is not None
    return since(view.record)
