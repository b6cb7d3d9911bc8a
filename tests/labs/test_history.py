"""The checker explains what happened, and nothing else."""

from __future__ import annotations

import random
from collections import defaultdict
from operator import attrgetter

import pytest

from labs.history import checker
from labs.history.__main__ import record, verdicts
from labs.history.checker import check
from labs.history.operation import Operation

pytestmark = [pytest.mark.exhaustive, pytest.mark.clock]

SECONDS = 8.0
ALTERED = 60
FIRST = 40


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of one key gives up soon; most keys need less than a thousand configurations."""
    monkeypatch.setattr(checker, "LIMIT", 20_000)


@pytest.fixture(scope="module")
def history() -> list[Operation]:
    calls, faults = record("single", 7, SECONDS)
    assert faults.total() > 0
    return calls


def test_replies_are_explained(history: list[Operation]) -> None:
    found = verdicts("single", history)

    assert len(history) > 200
    assert [verdict.counterexample for verdict in found if verdict.counterexample] == []
    assert sum(verdict.undecided for verdict in found) < len(found) / 3


def test_altered_replies_are_not() -> None:
    """Each of them alone: another case, or another record.

    Of the first calls of each key, so that the search for an explanation ends.
    """
    by_key: dict[str, list[Operation]] = defaultdict(list)
    for call in sorted(record("undisturbed", 7, SECONDS / 4)[0], key=attrgetter("invoked")):
        by_key[call.key].append(call)
    beginnings = [calls[:FIRST] for calls in by_key.values()]
    explained = [calls for calls in beginnings if not next(check(calls)).counterexample]
    assert len(explained) > len(beginnings) / 2
    chance = random.Random(7)
    for _ in range(ALTERED):
        calls = chance.choice(explained)
        call = chance.choice([call for call in calls if call.script == "begin"])
        altered = alter(call, chance)
        (verdict,) = check([altered if each is call else each for each in calls])
        assert verdict.counterexample, f"{call} as {altered}"


def alter(call: Operation, chance: random.Random) -> Operation:
    if chance.random() < 0.5:
        others = {"begun", "held", "finished", "sent", "reused"} - {call.case}
        return call._replace(case=chance.choice(sorted(others)))
    token = int.from_bytes(call.raw[2:9], "big") + 1
    return call._replace(raw=call.raw[:2] + token.to_bytes(7, "big") + call.raw[9:])


def test_a_store_that_loses_records_is_found() -> None:
    calls, _ = record("flushed", 1, SECONDS)

    assert any(verdict.counterexample for verdict in verdicts("flushed", calls))
