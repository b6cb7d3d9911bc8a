"""The commands ``celery -A shop idempotency …``: tables for people, ``--json`` for programs.

Celery loads this group through the entry point ``celery.commands`` and passes the app of its
``-A``. rich and humanize are imported when a table is printed.
"""

from __future__ import annotations

import click
from celery.bin.control import inspect

from celery_idempotent.operations.cli.changes import forget, purge, rerun
from celery_idempotent.operations.cli.dashboard import dashboard
from celery_idempotent.operations.cli.doctor import doctor, health, keys
from celery_idempotent.operations.cli.listing import list_records, stats
from celery_idempotent.operations.cli.show import explain, show

# Registers the inspect commands in this process, so that `celery inspect` accepts their names.
from celery_idempotent.operations.worker import inspect_commands


@click.group()
def idempotency() -> None:
    """Inspect the records of idempotent tasks, forget those that block calls, rerun calls."""


for _parameter in inspect.params:
    # Older versions of Celery list the command names at import, before ours are registered.
    if isinstance(_parameter.type, click.Choice):
        _parameter.type = click.Choice([*_parameter.type.choices, *inspect_commands.COMMANDS])

for _command in (
    *(list_records, show, forget, rerun, stats, explain),
    *(doctor, health, keys, dashboard, purge),
):
    idempotency.add_command(_command)
