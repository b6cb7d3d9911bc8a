"""``doctor``: everything that makes the promise weaker."""

from __future__ import annotations

from typing import Any

import click

from celery_idempotent import doctor as doctor_checks
from celery_idempotent.cli import console as screen
from celery_idempotent.cli.command import FriendlyCommand, gated_tasks, json_option, print_json
from celery_idempotent.configuration import app_tasks
from celery_idempotent.doctor import Finding, Severity, versions

_STYLES = {Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red"}


@click.command(cls=FriendlyCommand)
@click.option(
    "--fail-on",
    type=click.Choice(["note", "warning", "error", "never"]),
    default="warning",
    show_default=True,
    help="Exit with 1 if there is a finding as grave as this.",
)
@json_option
@click.pass_obj
def doctor(obj: Any, fail_on: str, as_json: bool) -> None:
    """Find what makes the promise weaker: the setting to change, and why."""
    tasks = gated_tasks(obj.app)
    findings = doctor_checks.examine(obj.app)
    places = list(dict.fromkeys(str(store.config) for store in app_tasks.stores(tasks)))
    if as_json:
        print_json(
            {
                "versions": versions.installed(),
                "stores": places,
                "findings": [
                    {
                        "name": one.name,
                        "severity": str(one.severity),
                        "subject": one.subject,
                        "what": one.what,
                        "setting": one.setting,
                        "why": one.why,
                    }
                    for one in findings
                ],
            }
        )
    else:
        _print(findings, places)
    grave = fail_on != "never" and any(
        one.severity >= Severity[fail_on.upper()] for one in findings
    )
    raise SystemExit(1 if grave else 0)


def _print(findings: list[Finding], places: list[str]) -> None:
    from rich.text import Text

    console = screen.console()
    here = ", ".join(f"{name} {number}" for name, number in versions.installed().items())
    console.print(Text(f"{here}; records at {', '.join(places)}"))
    for one in findings:
        console.print()
        head = Text(f"{one.severity}  ", style=_STYLES[one.severity])
        console.print(head + Text(f"{one.subject}: {one.what}", style="bold"))
        grid = screen.pairs()
        grid.add_row("why", Text(one.why))
        grid.add_row("change", Text(one.setting))
        console.print(grid)
    if not findings:
        console.print("Nothing to mend.")
