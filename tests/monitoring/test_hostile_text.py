"""Text of callers and of forged records is printed without escape sequences and marks."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest

from celery_idempotent.core.record import steps
from tests.monitoring.conftest import Shop
from tests.store.record_harness import raw_record

#: Clears the screen, sets the title of the window (ESC and C1), and changes the direction of text.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202eevil\u2066\u200f\u061c\u200b\u2028\nforged\r\x00\x7f"
DIGEST = "PN0MlSPt3FmEwTzQ5dHvBQ"
ERROR = {"exc_type": "GoneError", "exc_module": "gone", "exc_message": [HOSTILE]}


@pytest.fixture
def hostile(shop: Shop) -> Shop:
    """A record of each state, with hostile text wherever a record may hold text."""
    raw_steps = steps.write(HOSTILE, "json", b"1")
    for number, (letter, form, body) in enumerate(
        [
            (b"W", b"", b""),
            (b"A", b"", raw_steps),
            (b"V", b"json", json.dumps([HOSTILE]).encode()),
            (b"V", b"", HOSTILE.encode()),
            (b"E", b"json", json.dumps(ERROR).encode()),
        ]
    ):
        raw = raw_record(
            letter,
            task_id=(HOSTILE + str(number)).encode(),
            worker=HOSTILE.encode(),
            owner=b"0",
            tail=form,
            body=body,
        )
        for task in ("shop.charge", HOSTILE):
            name = f"idem:{quote(task, safe='')}:{DIGEST[:-1]}{number}"
            shop.client.set(name, raw, px=3_600_000)
        key = shop.charge.idempotency_key_of(number, 1)
        shop.client.set(f"idem:{key}", raw, px=3_600_000)
    return shop


def is_harmless(output: str) -> bool:
    """Whether lines end where we end them, and nothing else acts upon a terminal."""
    return all(line.isprintable() for line in output.split("\n")) and "\nforged" not in output


STATES = ("reserved", "started", "completed", "not stored", "failed")
COMMANDS: dict[str, list[str]] = {
    "list": ["list"],
    **{
        f"show {state}": ["show", f"shop.charge:{DIGEST[:-1]}{n}"] for n, state in enumerate(STATES)
    },
    **{
        f"explain {state}": ["explain", "shop.charge", f"[{n}, 1]"]
        for n, state in enumerate(STATES)
    },
    "explain an argument": ["explain", "shop.charge", json.dumps([HOSTILE, 1])],
    "stats": ["stats", "--timeout", "0"],
}
commands = pytest.mark.parametrize("command", COMMANDS)


@commands
def test_a_terminal_gets_no_escape_sequences(hostile: Shop, command: str) -> None:
    output = hostile.celery(*COMMANDS[command])

    assert is_harmless(output), repr(output)


@commands
def test_json_is_ascii(hostile: Shop, command: str) -> None:
    output = hostile.celery(*COMMANDS[command], "--json")

    assert output.isascii()
    assert is_harmless(output), repr(output)
    for document in output.splitlines() if command == "list" else [output]:
        json.loads(document)


def test_an_error_quotes_none(hostile: Shop) -> None:
    output = hostile.celery("show", f"{HOSTILE} absent", code=1)
    output += hostile.celery("show", "\x1b2J\x7f", code=1)
    output += hostile.celery("explain", HOSTILE, code=1)

    assert is_harmless(output), repr(output)


def test_forget_prints_none(hostile: Shop) -> None:
    name = f"idem:{quote(HOSTILE, safe='')}:{DIGEST[:-1]}0"
    output = hostile.celery("forget", name, code=1, answer="n\n")
    output += hostile.celery("forget", name, "--yes", "--force")

    assert "forgotten" in output
    assert is_harmless(output), repr(output)
