"""``purge``: deletes the rows of SQL outcomes whose retention has ended."""

from __future__ import annotations

import time
from collections import Counter

import click

from celery_idempotent.cli.command import AppCommand, Tasks, databases_option, print_json
from celery_idempotent.configuration import app_tasks
from celery_idempotent.printable import plural
from celery_idempotent.sql.database import Database

#: Rows that one transaction deletes.
BATCH = 500


@click.command(cls=AppCommand)
@click.option(
    "--batch", type=click.IntRange(1, 10_000), default=BATCH, help="Rows per transaction."
)
@click.option(
    "--pause", type=click.FloatRange(0), default=0.0, help="Seconds between two transactions."
)
@databases_option
def purge(tasks: Tasks, batch: int, pause: float, databases: set[Database], as_json: bool) -> None:
    """Delete expired outcomes from the databases of idempotency_transaction, and of --database.

    Rows are deleted in batches, oldest first, each in a short transaction. Run it from cron, at any
    time; several may run at once. Expired rows that are not deleted do no harm.
    """
    deleted: Counter[str] = Counter()
    for database in app_tasks.databases(tasks) | databases:
        found, after = batch, 0
        while found == batch:
            found, after = database.purge(batch, after)
            deleted[database.engine.name] += found
            time.sleep(pause if found == batch else 0)
    if as_json:
        print_json({"deleted": deleted})
        return
    for name, number in deleted.items():
        click.echo(f"{name}: deleted {plural(number, 'expired outcome')}")
    if not deleted:
        click.echo("No task has idempotency_transaction.")
