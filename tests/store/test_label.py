"""The label of a call stays in its record through every transition, and never affects the key."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_idempotent.key.key import Key
from celery_idempotent.printable import MAX_BYTES
from tests.store import deployments
from tests.store.record_harness import (
    HOLD_MS,
    KEY,
    NO_ARGUMENTS,
    OTHER_ARGUMENTS,
    SECOND,
    RecordHarness,
)

pytestmark = pytest.mark.parametrize(
    "site", deployments.params(deployments.PLAIN[0]), indirect=True
)

LABEL = "order 42 · Straße"


def taken_over(harness: RecordHarness) -> None:
    harness.expired(label=LABEL)
    harness.started(task_id=SECOND, label=LABEL)


def poisoned(harness: RecordHarness) -> None:
    harness.started(label=LABEL)
    harness.abandon()
    assert harness.begin(task_id=SECOND, max_attempts=1).case == "finished"


HISTORIES: dict[str, Callable[[RecordHarness], object]] = {
    "reserved": lambda harness: harness.reserve(label=LABEL),
    "started": lambda harness: harness.started(label=LABEL),
    "extended": lambda harness: harness.extend(harness.started(label=LABEL).token),
    "with a step": lambda harness: harness.save_step(harness.started(label=LABEL).token),
    "taken over": taken_over,
    "abandoned": lambda harness: (harness.started(label=LABEL), harness.abandon()),
    "held for a retry": lambda harness: harness.release(
        harness.started(label=LABEL).token, HOLD_MS
    ),
    "completed": lambda harness: harness.completed(label=LABEL),
    "continued": lambda harness: (harness.sending(label=LABEL), harness.mark_continued()),
    "failed": lambda harness: harness.failed(label=LABEL),
    "poisoned": poisoned,
}


@pytest.mark.parametrize("key", [KEY, NO_ARGUMENTS], ids=["fingerprint", "no fingerprint"])
@pytest.mark.parametrize("history", HISTORIES)
def test_a_label_stays_in_the_record(harness: RecordHarness, history: str, key: Key) -> None:
    harness.key = key
    HISTORIES[history](harness)

    record = harness.record()

    assert record.label == LABEL
    assert record.fingerprint == key.fingerprint


@pytest.mark.parametrize(
    ("stored", "label", "begun", "other_label", "case"),
    [
        # Whether a label is there, and what it is, does not matter.
        (KEY, LABEL, KEY, "", "held"),
        (KEY, "", KEY, LABEL, "held"),
        (KEY, LABEL, KEY, "Order 42", "held"),
        (KEY, LABEL, OTHER_ARGUMENTS, LABEL, "reused"),
        (KEY, LABEL, OTHER_ARGUMENTS, "", "reused"),
        (KEY, "", OTHER_ARGUMENTS, LABEL, "reused"),
        # A key without a fingerprint fits every record of it.
        (NO_ARGUMENTS, LABEL, KEY, LABEL, "held"),
        (KEY, LABEL, NO_ARGUMENTS, LABEL, "held"),
        (NO_ARGUMENTS, LABEL, NO_ARGUMENTS, "Order 42", "held"),
        (NO_ARGUMENTS, "", NO_ARGUMENTS, LABEL, "held"),
    ],
    ids=[
        *(
            "stored only",
            "given only",
            "another",
            "other arguments",
            "other arguments, stored only",
        ),
        *("other arguments, given only", "stored alone", "given alone", "both alone"),
        "given alone, nothing stored",
    ],
)
@pytest.mark.parametrize("finished", [False, True], ids=["running", "finished"])
def test_only_fingerprints_are_compared(
    harness: RecordHarness,
    stored: Key,
    label: str,
    begun: Key,
    other_label: str,
    case: str,
    finished: bool,
) -> None:
    token = harness.started(key=stored, label=label).token
    if finished:
        harness.complete(token)
        case = "finished" if case == "held" else case

    assert harness.begin(key=begun, task_id=SECOND, label=other_label).case == case
    assert harness.reserve(SECOND, key=begun, label=other_label).case == case


def test_the_longest_label_fits_beside_a_fingerprint(harness: RecordHarness) -> None:
    longest = "x" * MAX_BYTES

    assert harness.completed(label=longest).label == longest


def test_a_label_costs_its_bytes(harness: RecordHarness) -> None:
    harness.completed()
    without = len(harness.raw or b"")
    harness.forget()
    harness.completed(label=LABEL)

    assert len(harness.raw or b"") - without == len(LABEL.encode())


def test_a_label_that_another_program_wrote_is_escaped(harness: RecordHarness) -> None:
    harness.completed(label=LABEL)
    raw = harness.raw
    assert raw is not None
    harness.put(raw.replace("Straße".encode(), b"\x1b[2J\xff\n\n"))

    assert harness.record().label == "order 42 · \\x1b[2J\ufffd\\x0a\\x0a"
