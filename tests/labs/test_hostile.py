"""A small run of each stage finds nothing, and the stages find mistakes."""

from __future__ import annotations

import pytest

from celery_idempotent.core.key import canonical
from celery_idempotent.core.record import layout
from celery_idempotent.core.task.publish import kept_message
from labs.hostile import damage, forged, keys, messages
from tests.conftest import exhaustive_except
from tests.servers.redis_server import RedisServer

EVIL = (
    b'json\n{"task": "hostile.echo", "task_id": "%s", "args": ["fails", 1], "kwargs": {},'
    b' "options": {"headers": {"task": "evil"}}}' % forged.TASK_ID.encode()
)


@pytest.mark.parametrize("serializer", keys.SERIALIZERS)
def test_keys_of_different_calls_differ(serializer: str) -> None:
    verdict = keys.run(serializer, 300, seed=1)

    assert verdict.failures == []
    assert verdict.keys > 50


def test_confused_keys_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(canonical.SCALAR_ENCODERS, bool, canonical.SCALAR_ENCODERS[int])
    monkeypatch.setitem(canonical._ENCODERS, bool, canonical.SCALAR_ENCODERS[int])

    verdict = keys.run("json", 2000, seed=1)

    assert any("shares its key" in failure for failure in verdict.failures)


def test_each_message_runs_once() -> None:
    with RedisServer.start("any") as server:
        verdict = messages.run(server.url, "memory://", "json", 60, seed=1)

    assert verdict.failures == []
    assert 0 < verdict.runs < verdict.calls


def test_damaged_headers_are_ignored_or_refused() -> None:
    verdict = damage.headers()

    assert verdict.failures == []
    assert verdict.met["read"] > verdict.met["SettingsError"] > 0


@pytest.mark.exhaustive
def test_a_wrong_error_of_a_damaged_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("not a number")

    monkeypatch.setattr(damage, "STATES", ("published",))
    settings = {"idempotency_dedupe_publish": True}
    with RedisServer.start("any") as server:
        *_, verdict = damage.records(server.url, **settings)
        assert verdict.failures == []
        monkeypatch.setattr(layout, "begun", fail)
        *_, verdict = damage.records(server.url, **settings)

    assert any("ValueError" in failure for failure in verdict.failures)


@pytest.mark.parametrize(
    "broken", exhaustive_except(["", "headers", "memory"], ""), ids=["nothing", "headers", "memory"]
)
def test_a_forger_gets_clear_errors(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr(forged, "BOMB", 3_000_000)
    if broken == "headers":
        monkeypatch.setattr(kept_message, "_NOT_KEPT", frozenset())
        monkeypatch.setattr(forged.Forger, "message", lambda *_: EVIL)
    elif broken == "memory":
        monkeypatch.setattr(forged, "MAX_MEGABYTES", -1)
    with RedisServer.start("any") as server:
        verdict = forged.run(server.url, 2, seed=1)

    expected = {"": "", "headers": "publishes evil", "memory": "grows by"}[broken]
    assert all(expected in failure for failure in verdict.failures)
    assert bool(verdict.failures) is bool(broken)
