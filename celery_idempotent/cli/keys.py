"""``keys``: a snapshot of the key rules, for ``doctor --against``."""

from __future__ import annotations

import click

from celery_idempotent.cli.command import AppCommand, Tasks, print_json
from celery_idempotent.doctor import key_snapshot


@click.command(cls=AppCommand, has_json=False)
@click.option("--json", is_flag=True, expose_value=False, hidden=True)  # always JSON
def keys(tasks: Tasks) -> None:
    """Print a snapshot of the key rules, as JSON.

    It has the rule of each task, its parameters, and the keys of sample calls, whose arguments are
    made from the types of the parameters. Key rules that are callables are called with them.

    \b
    celery -A shop idempotency keys > keys.json          (with the old code)
    celery -A shop idempotency doctor --against keys.json     (with the new code)
    """
    print_json(key_snapshot.document_of(tasks))
