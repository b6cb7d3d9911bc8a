"""Mutants of the Lua are detected by what they reply and store, and by never replying."""

from __future__ import annotations

import pytest

from celery_idempotent.store import scripts
from labs.verification import replay
from labs.verification.lua_mutants import Mutant


def mutant(old: str, new: str) -> Mutant:
    source = scripts.read_source("extend")
    assert old in source
    return Mutant("extend", 1, old, old, new, source.replace(old, new))


@pytest.mark.exhaustive
def test_the_unchanged_script_equals_the_model() -> None:
    assert [*replay.mismatches("extend")] == []
    assert replay.run(mutant("local", "local")) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("reply('lost', raw)", "reply('lost')"),
        ("with_time(raw, now + lease_ms)", "with_time(raw, now + lease_ms + 1)"),
        ("ttl_ms)\nif", "ttl_ms + 1)\nif"),
        ("return reply('ok')", "return reply('ok'"),
        ("return reply('ok')", "while true do end"),
    ],
    ids=["another reply", "another record", "another expiry", "a syntax error", "an endless loop"],
)
def test_a_mutant_is_detected(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    monkeypatch.setattr(replay, "_TIMEOUT", 2.0)

    assert replay.run(mutant(old, new)) != ""
