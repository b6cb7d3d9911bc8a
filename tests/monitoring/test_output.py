"""What commands print: no escape sequences of callers or forged records, and documented JSON."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

from celery_idempotent.core.record import steps
from celery_idempotent.operations.calls.formatting import FIELDS
from tests.monitoring.conftest import Shop
from tests.store.record_harness import raw_record

#: Clears the screen, sets the title of the window (ESC and C1), and changes the direction of text.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202eevil\u2066\u200f\u061c\u200b\u2028\nforged\r\x00\x7f"
DIGEST = "PN0MlSPt3FmEwTzQ5dHvBQ"
ERROR = {"exc_type": "GoneError", "exc_module": "gone", "exc_message": [HOSTILE]}
#: Letter, serializer and body of the records.
STATES = {
    "reserved": (b"W", b"", b""),
    "started": (b"A", b"", steps.write(HOSTILE, "json", b"1")),
    "completed": (b"V", b"json", json.dumps([HOSTILE]).encode()),
    "not stored": (b"V", b"", HOSTILE.encode()),
    "failed": (b"E", b"json", json.dumps(ERROR).encode()),
}


@pytest.fixture
def hostile(shop: Shop) -> Shop:
    """A record of each state, with hostile text wherever a record may hold text."""
    for number, (letter, form, body) in enumerate(STATES.values()):
        task_id, worker = (HOSTILE + str(number)).encode(), HOSTILE.encode()
        raw = raw_record(letter, task_id=task_id, worker=worker, owner=b"0", tail=form, body=body)
        for task in ("shop.charge", HOSTILE):
            name = f"idem:{quote(task, safe='')}:{DIGEST[:-1]}{number}"
            shop.client.set(name, raw, px=3_600_000)
        key = shop.charge.idempotency_key_of(number, 1)
        shop.client.set(f"idem:{key}", raw, px=3_600_000)
    return shop


def is_harmless(output: str) -> bool:
    """Whether lines end where we end them, and nothing else acts upon a terminal."""
    return all(line.isprintable() for line in output.split("\n")) and "\nforged" not in output


COMMANDS: dict[str, list[str]] = {
    "list": ["list"],
    **{f"show {s}": ["show", f"shop.charge:{DIGEST[:-1]}{n}"] for n, s in enumerate(STATES)},
    **{f"explain {s}": ["explain", "shop.charge", f"[{n}, 1]"] for n, s in enumerate(STATES)},
    "explain an argument": ["explain", "shop.charge", json.dumps([HOSTILE, 1])],
    "stats": ["stats", "--timeout", "0"],
}


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_gets_no_escape_sequences(hostile: Shop, command: str, as_json: bool) -> None:
    output = hostile.celery(*COMMANDS[command], *["--json"] * as_json)

    assert is_harmless(output), repr(output)
    if as_json:
        assert output.isascii()
        for document in output.splitlines() if command == "list" else [output]:
            json.loads(document)


def test_an_error_quotes_none(hostile: Shop) -> None:
    for command in (("show", f"{HOSTILE} absent"), ("show", "\x1b2J\x7f"), ("explain", HOSTILE)):
        output = hostile.celery(*command, code=1)
        assert is_harmless(output), repr(output)


def test_forget_prints_none(hostile: Shop) -> None:
    name = f"idem:{quote(HOSTILE, safe='')}:{DIGEST[:-1]}0"
    output = hostile.celery("forget", name, code=1, answer="n\n")
    output += hostile.celery("forget", name, "--yes", "--force")

    assert "forgotten" in output
    assert is_harmless(output), repr(output)


RECORD = sorted({field.name for field in FIELDS} - {""})
TASK = [
    *("decisions", "double_executions", "records", "takeovers", "lease_expired", "hit_ratio"),
    *("per_second", "retention"),
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
        "tasks.*.parameters.*",
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
    """Returns the path of every field; names that are not ours are replaced by ``*``."""
    if isinstance(document, list):
        return {path for item in document for path in paths(item, parent)}
    if not isinstance(document, dict):
        return {parent}
    result = set()
    for name, value in document.items():
        field = "*" if parent in ("tasks", "versions", "tasks.*.parameters") else name
        result |= paths(value, f"{parent}.{field}" if parent else field)
    return result
