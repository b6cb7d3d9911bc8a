"""The alert rules over hours and days, by ``promtool test rules``: what fires, what does not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from celery_idempotent import signals
from celery_idempotent.contrib.prometheus import BEGIN_BUCKETS, TAKEOVER_BUCKETS

pytestmark = [pytest.mark.exhaustive, pytest.mark.prometheus]

FILE = Path(__file__).parents[2] / "docs/alerts.yml"
GROUPS = yaml.safe_load(FILE.read_text("utf-8"))["groups"]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
TASK, INSTANCE = "shop.charge", "worker-1:9808"
#: In minutes.
HOUR = 60
END = 4 * HOUR


def decision(name: str) -> str:
    return f'celery_idempotent_decisions_total{{decision="{name}"}}'


def outcome(name: str) -> str:
    return f'celery_idempotent_outcomes_total{{outcome="{name}"}}'


def refused(reason: str) -> str:
    return f'celery_idempotent_refused_total{{reason="{reason}"}}'


def buckets(metric: str, limits: tuple[float, ...], values: Mapping[float, str]) -> dict[str, str]:
    """Returns the series of a histogram; `values` are those of a bucket and all above it."""
    series, current = {}, ZERO
    for limit in (*limits, float("inf")):
        current = values.get(limit, current)
        series[f'{metric}_bucket{{le="{"+Inf" if limit == float("inf") else limit}"}}'] = current
    return series | {f"{metric}_count": current}


def begins(values: Mapping[float, str]) -> dict[str, str]:
    return buckets("celery_idempotent_begin_seconds", BEGIN_BUCKETS, values)


def takeovers_after(values: Mapping[float, str]) -> dict[str, str]:
    return buckets("celery_idempotent_takeover_seconds", TAKEOVER_BUCKETS, values)


RENEWED = "celery_idempotent_messages_renewed_timestamp_seconds"
#: A series that stays at zero.
ZERO = f"0x{END}"
#: What a worker serves from its start.
IDLE = {
    **{decision(name): ZERO for name in signals.DECISIONS},
    **{outcome(name): ZERO for name in signals.OUTCOMES},
    **{refused(reason): ZERO for reason in signals.REASONS},
    **begins({}),
    **takeovers_after({}),
    "celery_idempotent_heartbeats_replaced_total": ZERO,
    "celery_idempotent_bypassed_total": ZERO,
    RENEWED: ZERO,
}


def once(number: int = 1) -> str:
    """A counter that increases after an hour, within a minute."""
    return f"0x{HOUR - 1} {number}x{END}"


def each_minute(number: float) -> str:
    """A counter that increases by `number` each minute, from the second hour on."""
    return f"0x{HOUR} {number}+{number}x{END}"


#: Hours in which everything ordinary happens: 60 calls a minute, duplicates that wait and are
#: replayed, errors, retries, shutdowns, and three processes that die in each hour.
ORDINARY = {
    decision("run"): f"0+60x{END}",
    decision("replay"): f"0+20x{END}",
    decision("conflict"): f"0+40x{END}",
    decision("interrupted"): f"0+1x{END}",
    decision("takeover"): " ".join(str(minute // 20) for minute in range(END)),
    outcome("completed"): f"0+50x{END}",
    outcome("failed"): f"0+5x{END}",
    outcome("released"): f"0+5x{END}",
    **begins({0.0025: f"0+150x{END}", 2.5: f"0+151x{END}"}),
    **takeovers_after({0.25: " ".join(str(minute // 20) for minute in range(END))}),
}

#: A name for what happens, and its series.
QUIET: dict[str, Mapping[str, str]] = {
    "nothing": {},
    "ordinary hours": ORDINARY,
    "a failover of Redis": {decision("store_unavailable"): once(200)},
    "a failover of Redis in shadow": {
        decision("would_run"): f"0+60x{END}",
        decision("unprotected"): once(60),
    },
    "a burst of a thousand duplicates": {
        decision("run"): once(),
        decision("conflict"): f"0x{HOUR - 1} 3000 6000x{END}",
        decision("replay"): f"0x{HOUR} 500 1000x{END}",
    },
    "a worker that renews its messages": {RENEWED: f"60+60x{END}"},
    "a lease that expires for half a minute": {
        "celery_idempotent_leases_expired": f"0x{HOUR} 1 0x{END}"
    },
    "one process that dies": {decision("takeover"): once(), **takeovers_after({0.1: once()})},
    "a host that dies with ten executions": {
        decision("run"): f"0+60x{END}",
        decision("takeover"): once(10),
        **takeovers_after({60.0: once(10)}),
    },
}

#: Counters that increase once, with the alert; and a takeover after an hour.
COUNTED = {
    outcome("outcome_unsaved"): "IdempotencyOutcomeUnsaved",
    outcome("lease_lost"): "IdempotencyLeaseLost",
    refused("poisoned"): "IdempotencyPoisoned",
    refused("corrupt"): "IdempotencyRecordCorrupt",
    refused("key_rule"): "IdempotencyKeyRule",
    refused("invalid"): "IdempotencyCallInvalid",
    refused("reused"): "IdempotencyKeyReused",
    outcome("not_stored"): "IdempotencyResultNotStored",
    refused("not_stored"): "IdempotencyResultNotStored",
    decision("unprotected"): "IdempotencyUnprotected",
    "celery_idempotent_bypassed_total": "IdempotencyUnprotected",
    "celery_idempotent_heartbeats_replaced_total": "IdempotencyHeartbeatReplaced",
}
EVENTS = [
    *(({name: once()}, alert) for name, alert in COUNTED.items()),
    (takeovers_after({3600.0: once()}), "IdempotencyTakeoverSlow"),
]

TAKEOVERS = {decision("run"): f"0+5x{END}", decision("takeover"): each_minute(0.5)}
CONFLICTS = {decision("run"): f"0+2x{END}", decision("conflict"): each_minute(120)}
SLOW = begins({0.0025: each_minute(50), 2.5: each_minute(60)})
#: Series, with the minutes after which the alert fires.
LASTING: list[tuple[Mapping[str, str], int, str]] = [
    ({decision("store_unavailable"): each_minute(2)}, 4, "IdempotencyStoreUnavailable"),
    ({refused("store_unavailable"): each_minute(2)}, 4, "IdempotencyStoreUnavailable"),
    ({"celery_idempotent_leases_expired": f"0x{HOUR - 1} 1x{END}"}, 1, "IdempotencyLeaseExpired"),
    (TAKEOVERS, 20, "IdempotencyTakeovers"),
    (CONFLICTS, 35, "IdempotencyConflictStorm"),
    ({RENEWED: f"60+60x{HOUR - 2} {60 * HOUR}x{END}"}, 3, "IdempotencyBrokerUnavailable"),
    (SLOW, 15, "IdempotencyBeginSlow"),
]


def expected(alert: str) -> dict[str, Any]:
    """Returns an alert as promtool compares it."""
    rule = RULES[alert]
    label = "task" if "by (task" in rule["expr"] else "instance"
    value = TASK if label == "task" else INSTANCE
    summary = rule["annotations"]["summary"].replace("{{ $labels." + label + " }}", value)
    return {
        "exp_labels": {label: value, **rule["labels"]},
        "exp_annotations": {**rule["annotations"], "summary": summary},
    }


def labelled(series: str) -> str:
    labels = f'task="{TASK}",instance="{INSTANCE}"'
    return f"{series[:-1]},{labels}}}" if "{" in series else f"{series}{{{labels}}}"


def scenario(series: Mapping[str, str], firing: Mapping[int, str | None]) -> dict[str, Any]:
    """Returns one test: at each minute of `firing` that alert fires and no other, or none."""
    served = {**IDLE, **series}.items()
    tests = [
        {"eval_time": f"{minute}m", "alertname": name}
        | {"exp_alerts": [expected(name)] if name == alert else []}
        for minute, alert in firing.items()
        for name in RULES
    ]
    inputs = [{"series": labelled(name), "values": values} for name, values in served]
    return {"interval": "1m", "input_series": inputs, "alert_rule_test": tests}


def run(tmp_path: Path, *tests: dict[str, Any]) -> None:
    """Runs ``promtool test rules``, whose files may be JSON, since that is YAML."""
    file = tmp_path / "test.yml"
    document = {"rule_files": [str(FILE)], "evaluation_interval": "1m", "tests": list(tests)}
    file.write_text(json.dumps(document))
    command = ["promtool", "test", "rules", str(file)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_accepts_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", str(FILE)], check=True, capture_output=True)


@pytest.mark.parametrize("name", QUIET)
def test_ordinary_events_raise_no_alert(tmp_path: Path, name: str) -> None:
    run(tmp_path, scenario(QUIET[name], dict.fromkeys(range(5, END, 5))))


def test_one_event_raises_its_alert_for_half_an_hour(tmp_path: Path) -> None:
    tests = []
    for series, alert in EVENTS:
        firing = dict.fromkeys((HOUR - 1, HOUR + 31))
        tests.append(scenario(series, firing | {HOUR: alert, HOUR + 29: alert}))
    run(tmp_path, *tests)


def test_a_lasting_event_raises_its_alert_when_it_has_lasted(tmp_path: Path) -> None:
    tests = []
    for series, minutes, alert in LASTING:
        firing = {HOUR - 1: None, HOUR: None, HOUR + minutes: alert, HOUR + minutes + 20: alert}
        tests.append(scenario(series, firing))
    run(tmp_path, *tests)


def test_every_rule_is_tested() -> None:
    assert {alert for *_, alert in (*EVENTS, *LASTING)} == set(RULES)
