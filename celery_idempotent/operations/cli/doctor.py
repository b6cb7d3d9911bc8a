"""``doctor`` checks the configuration, ``health`` what runs; ``keys`` prints a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

import click

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.printable import one_line, plural
from celery_idempotent.operations import doctor as checks
from celery_idempotent.operations.cli import console
from celery_idempotent.operations.cli.command import (
    AppCommand,
    Tasks,
    print_json,
    timeout_option,
    with_options,
)
from celery_idempotent.operations.doctor import Finding, Severity, key_snapshot, versions
from celery_idempotent.operations.worker import inspect_commands

_STYLES = {Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red"}


_common_options = with_options(
    click.option(
        "--fail-on",
        type=click.Choice(["note", "warning", "error", "never"]),
        default="warning",
        show_default=True,
        help="Exit with 1 if a finding has at least this severity.",
    ),
    click.option(
        "--ignore",
        multiple=True,
        metavar="FINDING",
        help="Leave a finding out, as idempotency_doctor_ignore does: NAME, or NAME:SUBJECT; "
        "repeatable.",
    ),
)


@click.command(cls=AppCommand)
@_common_options
@click.option("--offline", is_flag=True, help="Connect to no server: neither Redis nor the broker.")
@click.option(
    "--against",
    "snapshot",
    type=click.File(encoding="utf-8"),
    help="Compare the keys with those of another version, from the output of its 'keys' command.",
)
@click.pass_obj
def doctor(
    obj: Any,
    tasks: Tasks,
    fail_on: str,
    ignore: tuple[str, ...],
    offline: bool,
    snapshot: TextIO | None,
    as_json: bool,
) -> None:
    """Find settings that weaken idempotency.

    Checks the configuration: tasks, broker, Redis and databases. Each finding states what is wrong,
    where, why it matters, and how to fix it. 'health' checks what is running.
    """
    before = None if snapshot is None else _read(snapshot)
    findings = checks.check_configuration(obj.app, before, offline=offline, ignore=ignore)
    stores = list(dict.fromkeys(str(store.config) for store in app_tasks.stores(tasks)))
    if as_json:
        document = {"versions": versions.installed(), "stores": stores}
        print_json({**document, "findings": [finding.to_json() for finding in findings]})
    else:
        installed = ", ".join(f"{name} {at}" for name, at in versions.installed().items())
        _print(findings, f"{installed}; records at {', '.join(stores)}")
        if ignored := checks.ignored(obj.app, ignore):
            click.echo(one_line(f"Ignored: {', '.join(ignored)}"))
    raise SystemExit(_exit_code(findings, fail_on))


@click.command(cls=AppCommand)
@_common_options
@timeout_option
@click.pass_obj
def health(
    obj: Any,
    tasks: Tasks,
    fail_on: str,
    ignore: tuple[str, ...],
    timeout: float,
    as_json: bool,
) -> None:
    """Find faults of the running workers and servers.

    Checks what the workers have counted since they started, their leases, the memory of Redis, and
    the tables of outcomes.
    """
    replies = inspect_commands.ask(obj.app, timeout)
    silence = replies.error if timeout else ""
    findings = checks.check_health(obj.app, replies.totals, replies.leases, silence, ignore=ignore)
    if as_json:
        document = {"workers_answered": bool(replies.workers)}
        print_json({**document, "findings": [finding.to_json() for finding in findings]})
    else:
        _print(findings, f"{plural(len(replies.workers), 'worker')} replied")
    raise SystemExit(_exit_code(findings, fail_on))


def _exit_code(findings: list[Finding], fail_on: str) -> int:
    severities = [] if fail_on == "never" else [finding.severity for finding in findings]
    return int(any(each >= Severity[fail_on.upper()] for each in severities))


def _read(snapshot: TextIO) -> Mapping[str, key_snapshot.Snapshot]:
    try:
        return key_snapshot.read(snapshot.read())
    except ValueError as error:
        raise click.BadParameter(
            f"{snapshot.name} was not written by 'celery idempotency keys': {error}",
            param_hint="'--against'",
        ) from None


def _print(findings: list[Finding], heading: str) -> None:
    out = console.create()
    out.print(console.text(heading))
    for finding in findings:
        out.print()
        severity = console.text(f"{finding.severity}  ", style=_STYLES[finding.severity])
        out.print(severity + console.text(f"{finding.name}: {finding.what}", style="bold"))
        fields = {"where": finding.subject, "why": finding.why, "fix": finding.setting}
        out.print(console.grid(fields))
    if not findings:
        out.print("No findings.")


@click.command(cls=AppCommand, has_json=False)
@click.option("--json", is_flag=True, expose_value=False, hidden=True)  # always JSON
def keys(tasks: Tasks) -> None:
    """Print a snapshot of the key rules, as JSON.

    It has the rule of each task, its parameters, and the keys of sample calls, whose arguments are
    made from the types of the parameters. Key rules that are callables are called with these
    arguments.

    \b
    celery -A shop idempotency keys > keys.json          (with the old code)
    celery -A shop idempotency doctor --offline --against keys.json     (with the new code)
    """
    print_json(key_snapshot.document_of(tasks))
