"""``doctor`` finds settings that weaken the guarantees; ``keys`` prints a snapshot to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import click

from celery_idempotent import doctor as doctor_checks
from celery_idempotent.cli import console
from celery_idempotent.cli.command import AppCommand, Tasks, print_json, timeout_option
from celery_idempotent.configuration import app_tasks
from celery_idempotent.doctor import Finding, Severity, key_snapshot, versions
from celery_idempotent.monitoring import inspect_commands

_STYLES = {Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red"}


@click.command(cls=AppCommand)
@click.option(
    "--fail-on",
    type=click.Choice(["note", "warning", "error", "never"]),
    default="warning",
    show_default=True,
    help="Exit with 1 if a finding has at least this severity.",
)
@timeout_option
@click.option(
    "--against",
    "snapshot",
    type=click.File(encoding="utf-8"),
    help="Compare the keys with those of another version, from the output of its 'keys' command.",
)
@click.pass_obj
def doctor(
    obj: Any, tasks: Tasks, fail_on: str, timeout: float, snapshot: TextIO | None, as_json: bool
) -> None:
    """Find settings that weaken idempotency.

    Checks the tasks, the broker, Redis, and the counters of the workers. Each finding states what
    is wrong, where, why it matters, and how to fix it. Findings named in the setting
    idempotency_doctor_ignore are left out.
    """
    before = None if snapshot is None else _read(snapshot)
    replies = inspect_commands.ask(obj.app, timeout)
    findings = doctor_checks.examine(obj.app, replies.totals, replies.leases, before)
    stores = list(dict.fromkeys(str(store.config) for store in app_tasks.stores(tasks)))
    if as_json:
        print_json(
            {
                "versions": versions.installed(),
                "stores": stores,
                "workers_answered": bool(replies.workers),
                "findings": [finding.to_json() for finding in findings],
            }
        )
    else:
        _print(findings, stores, doctor_checks.ignored(obj.app), replies.error)
    severities = [] if fail_on == "never" else [finding.severity for finding in findings]
    raise SystemExit(int(any(each >= Severity[fail_on.upper()] for each in severities)))


def _read(snapshot: TextIO) -> Mapping[str, key_snapshot.Snapshot]:
    try:
        return key_snapshot.read(snapshot.read())
    except ValueError as error:
        raise click.BadParameter(
            f"{snapshot.name} was not written by 'celery idempotency keys': {error}",
            param_hint="'--against'",
        ) from None


def _print(
    findings: list[Finding], stores: list[str], ignored: Sequence[str], unknown: str
) -> None:
    out = console.create()
    installed = ", ".join(f"{name} {version}" for name, version in versions.installed().items())
    out.print(console.text(f"{installed}; records at {', '.join(stores)}"))
    if unknown:
        out.print(console.text(f"{unknown}, so the workers' counters are not checked."))
    for finding in findings:
        out.print()
        severity = console.text(f"{finding.severity}  ", style=_STYLES[finding.severity])
        out.print(severity + console.text(f"{finding.name}: {finding.what}", style="bold"))
        fields = {"where": finding.subject, "why": finding.why, "fix": finding.setting}
        out.print(console.grid(fields))
    if not findings:
        out.print("No findings.")
    if ignored:
        out.print(console.text(f"Ignored: {', '.join(ignored)}"))


@click.command(cls=AppCommand, has_json=False)
@click.option("--json", is_flag=True, expose_value=False, hidden=True)  # always JSON
def keys(tasks: Tasks) -> None:
    """Print a snapshot of the key rules, as JSON.

    It has the rule of each task, its parameters, and the keys of sample calls, whose arguments are
    made from the types of the parameters. Key rules that are callables are called with these
    arguments.

    \b
    celery -A shop idempotency keys > keys.json          (with the old code)
    celery -A shop idempotency doctor --against keys.json     (with the new code)
    """
    print_json(key_snapshot.document_of(tasks))
