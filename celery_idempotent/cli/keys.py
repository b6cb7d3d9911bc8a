"""``keys``: a snapshot of the key rules, for ``doctor --against``."""

from __future__ import annotations

from typing import Any

import click

from celery_idempotent.cli.command import FriendlyCommand, idempotent_tasks, print_json
from celery_idempotent.doctor import key_snapshot


@click.command(cls=FriendlyCommand)
@click.option("--json", is_flag=True, expose_value=False, hidden=True)  # it is always JSON
@click.pass_obj
def keys(obj: Any) -> None:
    """Print a snapshot of the key rules, as JSON.

    For each task the rule, the parameters, and the keys of sample calls, whose arguments are made
    of the parameters' types. Key rules that are callables are called with them.

    \b
    celery -A shop idempotency keys > keys.json          (with the old code)
    celery -A shop idempotency doctor --against keys.json     (with the new code)
    """
    print_json(key_snapshot.document_of(idempotent_tasks(obj.app)))
