"""Console output: rich tables as wide as the terminal, plain text when piped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from celery_idempotent.core.printable import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

#: Piped output is not truncated to a terminal's width.
PIPED_WIDTH = 1000

STATE_STYLES = {"RESERVED": "cyan", "STARTED": "yellow", "COMPLETED": "green", "FAILED": "red"}


def create() -> Console:
    """Returns a console.

    Raises:
        ClickException: if the extra ``cli`` is not installed.
    """
    try:
        import humanize  # noqa: F401 - formats sizes
        from rich.console import Console
    except ImportError as error:
        raise click.ClickException(
            f"{error.name} is not installed: pip install 'celery-idempotent[cli]', or use --json"
        ) from None
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


def text(value: str, style: str = "") -> Text:
    """Returns `value`, which may be untrusted, as one line without control characters."""
    from rich.text import Text

    return Text(one_line(value), style=style)


def table(*columns: str) -> Table:
    """Returns a table without a frame; ``>`` before the name of a column aligns it right."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        result.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left")
    return result


def grid(fields: Mapping[str, str]) -> Table:
    """Returns a table of field names and values, without the fields that have no value."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in fields.items():
        if value:
            grid.add_row(name, text(value, STATE_STYLES.get(value, "")))
    return grid
