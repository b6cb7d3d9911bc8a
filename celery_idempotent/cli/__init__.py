"""``celery -A shop idempotency …``: tables for people, ``--json`` for programs.

Celery finds the group by the entry point ``celery.commands`` and gives it the app of its ``-A``.
Each command is a file here; what they print with (rich, humanize) is imported when they print.
"""

from __future__ import annotations

import click
from celery.bin.control import inspect

from celery_idempotent.cli.doctor import doctor
from celery_idempotent.cli.explain import explain
from celery_idempotent.cli.forget import forget
from celery_idempotent.cli.listing import list_records
from celery_idempotent.cli.show import show
from celery_idempotent.cli.stats import stats

# `celery inspect` and `celery control` must know our commands as well, and look in this process.
from celery_idempotent.monitoring import inspect_commands


@click.group()
def idempotency() -> None:
    """Look at the records of idempotent tasks, and mend what stands in the way."""


for _parameter in inspect.params:
    # Older Celerys list the commands when they are imported, which was before ours were known.
    if isinstance(_parameter.type, click.Choice):
        _parameter.type = click.Choice([*_parameter.type.choices, *inspect_commands.COMMANDS])

for _command in (list_records, show, forget, stats, explain, doctor):
    idempotency.add_command(_command)
