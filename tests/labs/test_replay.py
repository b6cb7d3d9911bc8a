"""The scripts equal the model, and mutants are detected by what they reply, store or never do."""

from __future__ import annotations

import pytest

from celery_idempotent.core.store import scripts
from labs.verification import live, replay
from labs.verification.lua_mutants import SCRIPTS, Mutant
from tests.conftest import exhaustive_except


@pytest.mark.parametrize("script", exhaustive_except(SCRIPTS, "begin", "extend", "settle", "queue"))
def test_a_script_equals_the_model(script: str) -> None:
    assert replay.mismatch(script, "any") == ""


def test_sequences_of_calls_equal_the_model() -> None:
    assert live.mismatch("any", sequences=20, seed=1) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".. (case == 'ok' and '' or raw)", ""),
        ("now + lease_ms", "now + lease_ms + 1"),
        ("'PX', ttl_ms)", "'PX', ttl_ms + 1)"),
        ("return case", "return (case"),
        ("return case", "while true do end return case"),
    ],
    ids=["another reply", "another record", "another expiry", "a syntax error", "an endless loop"],
)
def test_a_mutant_is_detected(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    monkeypatch.setattr(replay, "_TIMEOUT", 0.5)
    source = scripts.load("extend").source
    assert old in source

    assert replay.run(Mutant("extend", 1, old, old, new, source.replace(old, new, 1))) != ""
