"""The report of a run, as text and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .tasks import LEASE_SECONDS
from .verdict import Evidence, differences, money

_TITLES = {
    "idempotent": "IdempotentTask",
    "plain": "a plain celery.Task",
    "shadow": "IdempotentTask in shadow",
}
#: The text report shows this many differences, the JSON report all.
SHOWN_DIFFERENCES = 6


def as_json(evidence: Evidence, *, task: str) -> dict[str, Any]:
    """Returns the report in a form that can be written as JSON.

    Args:
        task: "idempotent", "plain" or "shadow".
    """
    found = differences(evidence)
    expected, ledger = evidence.deliveries.totals(), evidence.ledger_totals
    recovery = evidence.recovery_seconds
    return {
        "task": task,
        "exactly_once": not found and not evidence.charged_again,
        "differences": found,
        "events": len(evidence.deliveries.firsts),
        "deliveries": len(evidence.replies),
        "charges": len(evidence.charges),
        "charged_more_than_once": len(evidence.charged_again),
        "double_charges": evidence.double_charges,
        "charges_of_message_killed_after_commit": evidence.charges_of_killed_message,
        **_shadow(evidence),
        "replays": evidence.signals["replayed"],
        "conflicts": evidence.signals["conflicted"],
        "takeovers": evidence.signals["taken_over"],
        "rejected_reuse": len(evidence.rejected),
        "expected_rejections": len(evidence.reuses),
        "killed_event": evidence.kill.event_id,
        "killed_pid": evidence.kill.pid,
        "recovery_seconds": recovery and round(recovery, 2),
        "kills": _kills(evidence),
        "signals": dict(sorted(evidence.signals.items())),
        "totals": {
            currency: {"expected": expected.get(currency, 0), "ledger": ledger.get(currency, 0)}
            for currency in sorted(expected.keys() | ledger.keys())
        },
        "seconds": round(evidence.seconds, 1),
    }


def _kills(evidence: Evidence) -> dict[str, int]:
    """Returns how many processes were killed, by the point of the execution."""
    return {"during_charge": 1, "after_commit": int(evidence.kill_after_commit is not None)}


def _shadow(evidence: Evidence) -> dict[str, Any]:
    if evidence.preventable is None:
        return {}
    names = ("would_replay", "would_conflict", "would_refuse")
    return {
        "would_have_prevented": len(evidence.preventable),
        **{name: evidence.signals[name] for name in names},
    }


def show(evidence: Evidence, console: Console, *, task: str) -> None:
    """Prints the report."""
    data = as_json(evidence, task=task)
    title = f" with {_TITLES[task]}, {data['seconds']} s"
    console.print(Text.assemble("\n", ("Payments", "bold"), title))
    console.print()
    console.print(_summary(data))
    console.print()
    console.print(_totals(data))
    console.print()
    for line in _verdict(data, task):
        console.print(line)


def _summary(data: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", style="cyan")
    table.add_column(style="bold")
    table.add_column(style="dim")
    table.add_row(str(data["deliveries"]), "deliveries", "of " + _number(data["events"], "event"))
    table.add_row(
        _against(data["charges"], data["events"]), "charges", f"{data['events']} expected"
    )
    table.add_row("1", "process killed", _recovery(data["recovery_seconds"]))
    if data["kills"]["after_commit"]:
        table.add_row("1", "process killed", _after_commit(data))
    if data["task"] == "shadow":
        table.add_row(str(data["would_replay"]), "would be replays", "of an earlier delivery")
        table.add_row(str(data["would_conflict"]), "would be conflicts", "during a charge")
        table.add_row(str(data["would_refuse"]), "would be rejected", "same id, other amount")
        return table
    table.add_row(
        str(data["takeovers"]),
        "takeovers",
        f"without waiting for the end of the lease of {LEASE_SECONDS:.0f} s",
    )
    table.add_row(str(data["conflicts"]), "conflicts", "duplicates during a charge")
    table.add_row(str(data["replays"]), "replays", "duplicates that got the first receipt")
    table.add_row(
        _against(data["rejected_reuse"], data["expected_rejections"]),
        "rejected reuse",
        f"same id, other amount; {data['expected_rejections']} expected",
    )
    return table


def _recovery(seconds: float | None) -> str:
    restart = "not restarted" if seconds is None else f"restarted {seconds:.1f} s later"
    return f"during a charge, {restart}"


def _after_commit(data: dict[str, Any]) -> str:
    again = data["charges_of_message_killed_after_commit"] > 1
    return f"right after the COMMIT of a charge, {'' if again else 'not '}charged again"


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _against(number: int, expected: int) -> Text:
    return Text(str(number), style="green" if number == expected else "bold red")


def _totals(data: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for heading in ("expected", "ledger", "difference"):
        table.add_column(heading, justify="right")
    for currency, total in data["totals"].items():
        table.add_row(
            money(total["expected"], currency),
            money(total["ledger"], currency),
            Text(
                money(total["ledger"] - total["expected"], currency),
                style="green" if total["ledger"] == total["expected"] else "bold red",
            ),
        )
    return table


def _verdict(data: dict[str, Any], task: str) -> list[Text]:
    if task == "shadow" and not data["differences"]:
        return _shadow_verdict(data)
    if data["exactly_once"]:
        events = _number(data["events"], "event")
        kills = data["kills"]
        return [
            Text(f"{events}, each charged exactly once.", "bold green"),
            Text(
                f"{kills['during_charge']} process was killed during a charge, "
                f"{kills['after_commit']} between a COMMIT and the completion in Redis."
            ),
        ]
    found = data["differences"]
    lines = [Text(f"- {sentence}", "red") for sentence in found[:SHOWN_DIFFERENCES]]
    if (hidden := len(found) - SHOWN_DIFFERENCES) > 0:
        lines.append(Text(f"- and {hidden} more; --json lists them all.", "red"))
    if task == "plain":
        lines.append(Text("\nThis is what plain Celery does with at-least-once delivery:"))
        lines.append(Text("every duplicate runs. Without --plain, each event is charged once."))
    return lines


def _shadow_verdict(data: dict[str, Any]) -> list[Text]:
    doubles, events = data["double_charges"], _number(data["events"], "event")
    return [
        Text(f"{_number(doubles, 'double charge')} in the ledger.", "bold red"),
        Text(
            f"{data['would_have_prevented']} charges were counted as preventable: the same ones.",
            "bold green",
        ),
        Text(f"The others are one for each of {events}. Without --shadow, only they happen."),
    ]
