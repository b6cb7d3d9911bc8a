"""The fields of each command's ``--json``, at every depth, which programs read by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_idempotent.operations.calls.formatting import FIELDS
from tests.monitoring.conftest import Shop

RECORD = sorted({field.name for field in FIELDS} - {""})
TASK = [
    *(
        "decisions",
        "double_executions",
        "records",
        "takeovers",
        "lease_expired",
        "hit_ratio",
        "per_second",
        "retention",
    ),
    *("bytes_per_record", "bytes_total", "bytes_projected"),
    *(f"states.{state}" for state in ("RESERVED", "STARTED", "COMPLETED", "FAILED", "CORRUPT")),
]

FIELDS: dict[str, list[str]] = {
    "list": RECORD,
    "show": [*RECORD, "result.amount", "result.order"],
    "show failed": [*RECORD, "error.message", "error.type"],
    "forget": ["case", "key"],
    "stats": [*(f"tasks.*.{name}" for name in TASK), "messages_held", "workers_answered"],
    "explain": [
        *(f"arguments.{name}" for name in ("at_default", "canonical", "in_key", "name")),
        *("fingerprint", "form", "key", "explicit", "prediction.case"),
        *(f"record.{name}" for name in RECORD),
        *("prediction.sentence", "redis_name", "rule", "task", "waiting"),
    ],
    "doctor": [
        *(f"findings.{n}" for n in ("name", "setting", "severity", "subject", "what", "why")),
        *("stores", "versions.*"),
    ],
    "health": ["workers_answered"],
    "keys": [
        *("celery_idempotent_keys", "tasks.*.rule", "tasks.*.prefix"),
        *("tasks.*.parameters.default", "tasks.*.parameters.name"),
        *(f"tasks.*.samples.{name}" for name in ("args", "digest", "fingerprint")),
    ],
}

CALLS: dict[str, tuple[str, ...]] = {
    "list": ("list", "--state", "COMPLETED"),
    "show": ("show", "shop.charge", "[1, 999]"),
    "show failed": ("show", "shop.charge", "[2, 13]"),
    "forget": ("forget", "shop.charge", "[1, 999]", "--yes"),
    "stats": ("stats", "--timeout", "0"),
    "explain": ("explain", "shop.charge", "[1, 999]"),
    "doctor": ("doctor",),
    "health": ("health", "--timeout", "0"),
    "keys": ("keys",),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_fields_are_as_documented(shop: Shop, call: str) -> None:
    shop.charge.apply((1, 999))
    shop.charge.apply((2, 13))

    document = json.loads(shop.celery(*CALLS[call], "--json", code=int(call == "doctor")))

    assert sorted(paths(document)) == sorted(FIELDS[call])


def paths(document: Any, parent: str = "") -> set[str]:
    """Returns the path of every field; names of tasks and packages are replaced by ``*``."""
    if isinstance(document, list):
        return {path for item in document for path in paths(item, parent)}
    if not isinstance(document, dict):
        return {parent}
    result = set()
    for name, value in document.items():
        field = "*" if parent in ("tasks", "versions") else name
        result |= paths(value, f"{parent}.{field}" if parent else field)
    return result
