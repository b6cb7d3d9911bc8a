"""What people see: rich tables as wide as the terminal, plain text when piped."""

from __future__ import annotations

import importlib
import shutil
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Piped output is cut nowhere: whoever reads it has grep and cut.
PIPED_WIDTH = 1000

STYLES = {"RESERVED": "cyan", "STARTED": "yellow", "COMPLETED": "green", "FAILED": "red"}


def need_libraries() -> None:
    """Say in one line what is missing.

    Raises:
        ClickException: if the extra is not installed.
    """
    try:
        for library in ("rich", "humanize"):
            importlib.import_module(library)
    except ImportError as error:
        raise click.ClickException(
            f"{error.name} is missing: pip install 'celery-idempotent[cli]', or use --json"
        ) from None


def console(*, stderr: bool = False) -> Console:
    """Where to print."""
    need_libraries()
    from rich.console import Console

    out = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not out.is_terminal:
        out.width = PIPED_WIDTH
    return out


def table(*columns: str, title: str | None = None) -> Table:
    """A table without a frame; a column whose name begins with ``>`` is for numbers."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in columns:
        numbers = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if numbers else "left")
    return made


def pairs() -> Table:
    """A table of names and values."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    return made


def terminal_lines() -> int:
    """How many lines the terminal shows."""
    return shutil.get_terminal_size().lines
