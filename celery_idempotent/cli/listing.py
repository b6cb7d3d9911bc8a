"""``list``: records as they are come by, or a picture of them that is kept up to date."""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import islice
from time import sleep, strftime
from typing import TYPE_CHECKING, Any

import click

from celery_idempotent.cli import console as screen
from celery_idempotent.cli import formatting
from celery_idempotent.cli.command import (
    FriendlyCommand,
    choosing,
    gated_tasks,
    json_option,
    print_json,
)
from celery_idempotent.configuration import app_tasks
from celery_idempotent.monitoring import json_format
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.record_query import RecordFilter, RecordView, record_views, since
from celery_idempotent.store.record_store import RecordStore

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Widths of the columns before the last one, which has what is left; and from which width on.
_COLUMNS = (
    ("STATE", 9, 0),
    ("TRY", 3, 0),
    ("SINCE", 14, 0),
    ("UNTIL", 25, 100),
    ("TASK ID", 36, 140),
)


@click.command("list", cls=FriendlyCommand)
@choosing
@click.option("--limit", type=click.IntRange(1), help="Stop after so many.")
@click.option(
    "--watch",
    type=click.FloatRange(0.1),
    is_flag=False,
    flag_value=2.0,
    metavar="[SECONDS]",
    help="Stay, and look again every so many seconds (2): the newest first.",
)
@json_option
@click.pass_obj
def list_records(
    obj: Any,
    state: str | None,
    task: str | None,
    older_than: timedelta | None,
    limit: int | None,
    watch: float | None,
    as_json: bool,
) -> None:
    """List records, one a line. `--json`: one JSON object a line."""
    stores = app_tasks.stores(gated_tasks(obj.app))
    record_filter = RecordFilter(None if state is None else State(state.upper()), task, older_than)
    if watch is not None:
        if as_json:
            raise click.UsageError("--watch is for people, --json for programs")
        with contextlib.suppress(KeyboardInterrupt):
            _watch(stores, record_filter, watch, limit)
        return
    found = islice((one for page in record_views(stores, record_filter) for one in page), limit)
    if as_json:
        for record_view in found:
            print_json(json_format.of_view(record_view), indent=None)
        return
    _print(screen.console(), found)


def _print(console: Console, found: Iterator[RecordView]) -> None:
    """A table that does not wait for its last row: `list | head` ends with the first ten."""
    width = console.width
    printed, run_sync = False, 10
    while chunk := list(islice(found, run_sync)):
        console.print(_table(chunk, width, heads=not printed), crop=False)
        printed, run_sync = True, 100
    if not printed:
        console.print("No such records.")


def _table(found: Iterable[RecordView], width: int, *, heads: bool = True) -> Table:
    from rich.table import Table
    from rich.text import Text

    columns = [(name, size) for name, size, least in _COLUMNS if width >= least]
    table = Table(box=None, show_header=heads, pad_edge=False, header_style="bold")
    for name, size in columns:
        table.add_column(name, width=size, no_wrap=True)
    table.add_column("KEY", no_wrap=True, overflow="ellipsis")
    for record_view in found:
        cells = _cells(record_view)
        table.add_row(
            *(Text.from_markup(cells[name]) for name, _ in columns), Text(str(record_view.key))
        )
    return table


def _cells(record_view: RecordView) -> dict[str, str]:
    record = record_view.record
    if record is None:
        return {name: "" for name, _, _ in _COLUMNS} | {"STATE": "[magenta]CORRUPT[/]"}
    from rich.markup import escape

    style = screen.STYLES[record.state.value]
    return {
        "STATE": f"[{style}]{record.state}[/]",
        "TRY": str(record.attempt or ""),
        "SINCE": formatting.when(since(record), record_view.now),
        "UNTIL": _until(record, record_view),
        "TASK ID": escape(record.task_id),
    }


def _until(record: Record, record_view: RecordView) -> str:
    if record.deadline is None:
        return formatting.when(record.expires_at, record_view.now)
    what = "lease" if record.state is State.STARTED else "held"
    over = record.deadline <= record_view.now
    return f"{what} {'ended ' if over else ''}{formatting.when(record.deadline, record_view.now)}"


def _watch(
    stores: list[RecordStore], record_filter: RecordFilter, seconds: float, limit: int | None
) -> None:
    console = screen.console()
    from rich.live import Live

    on_screen = Live(console=console, auto_refresh=False, screen=True)
    # Piped, one picture follows the other.
    with on_screen if console.is_terminal else contextlib.nullcontext() as live:
        while True:
            picture = _picture(stores, record_filter, limit, console.width)
            if live is None:
                console.print(picture)
            else:
                live.update(picture, refresh=True)
            sleep(seconds)


def _picture(
    stores: list[RecordStore], record_filter: RecordFilter, limit: int | None, width: int
) -> Table:
    """The newest records, as many as there is room for, over the number of all."""
    counts: Counter[str] = Counter()

    def counted() -> Iterator[RecordView]:
        for page in record_views(stores, record_filter):
            for record_view in page:
                counts[
                    "CORRUPT" if record_view.record is None else record_view.record.state.value
                ] += 1
                if record_view.record is not None:
                    yield record_view

    room = limit or max(1, screen.terminal_lines() - 4)
    newest = heapq.nlargest(room, counted(), key=_moment)
    table = _table(newest, width)
    table.caption = f"{strftime('%H:%M:%S')}  " + (
        ", ".join(f"{number:,} {state}" for state, number in sorted(counts.items())) or "no records"
    )
    table.caption_justify = "left"
    return table


def _moment(record_view: RecordView) -> float:
    return 0.0 if record_view.record is None else since(record_view.record).timestamp()
