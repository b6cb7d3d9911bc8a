"""``list``: prints records as a scan returns them, or keeps refreshing a table."""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from time import sleep, strftime
from typing import TYPE_CHECKING, Any

import click

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.printable import did_you_mean, one_line
from celery_idempotent.core.record import State
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.operations.calls import formatting
from celery_idempotent.operations.cli import console
from celery_idempotent.operations.cli.command import AppCommand, Tasks, filter_options, print_json
from celery_idempotent.operations.records.query import RecordFilter, record_views
from celery_idempotent.operations.records.reader import RecordView

if TYPE_CHECKING:
    from rich.console import Console

#: Name and width of each column before KEY, and the least width of a terminal that shows it.
_COLUMNS = (
    ("STATE", 9, 0),
    ("ATTEMPT", 7, 0),
    ("SINCE", 14, 0),
    ("UNTIL", 28, 110),
    ("TASK ID", 36, 150),
)
#: Maximum width of a label; a longer one is cut.
_LABEL_WIDTH = 24
#: Rows that are printed at once.
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
        # The header, the caption and the prompt also take lines.
        rows = limit or max(1, out.height - 4)
        newest = heapq.nlargest(rows, counted(), key=lambda view: view.since)
        states = ", ".join(f"{number:,} {state}" for state, number in sorted(numbers.items()))
        caption = f"{strftime('%H:%M:%S')}  {states or 'no records'}"
        lines = [*_lines(newest, out, labelled=_have_labels(newest)), caption]
        click.clear()  # does nothing if piped
        out.print(Text.from_ansi("\n".join(lines), no_wrap=True, overflow="ellipsis"))
        sleep(seconds)
