"""The protocol's model: nothing goes wrong in any order of things, and each mistake shows."""

from __future__ import annotations

from ast import literal_eval
from functools import cache
from typing import Any

import pytest

from tests.labs.verification.environment import Runtime
from tests.labs.verification.environments import LIMITS, SHORT
from tests.labs.verification.model_mutants import MUTANTS, Mutant
from tests.labs.verification.search import search, told


@cache
def nothing_is_wrong(setting: str) -> bool:
    return search(Runtime(**literal_eval(setting))).found is None


@pytest.mark.parametrize("setting", SHORT.values(), ids=SHORT)
def test_every_invariant_holds_in_every_state(setting: dict[str, Any]) -> None:
    searched = search(Runtime(**setting))

    assert searched.found is None, "\n" + "\n".join(told(searched.found))
    assert searched.states > 100


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_caught(mutant: Mutant) -> None:
    # Without the mistake nothing is found there: what is found is the mistake.
    assert nothing_is_wrong(str(mutant.where))

    assert mutant.conformance_run().found is not None


@pytest.mark.parametrize(("setting", "wrong"), LIMITS.values(), ids=LIMITS)
def test_what_cannot_be_promised_is_known(setting: dict[str, Any], wrong: str) -> None:
    found = search(Runtime(**setting)).found

    assert found is not None
    assert found.wrong == wrong


def test_a_counterexample_reads_as_a_story() -> None:
    found = next(one for one in MUTANTS if one.name == "no token check").conformance_run().found
    assert found is not None

    story = list(told(found))

    assert story[0].startswith("  1. T1 is handed out to A")
    assert "freezes" in "".join(story)
    assert story[-1] == "  ✗  a stale token keeps the lease"
