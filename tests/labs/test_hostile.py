"""A small run of each stage finds nothing, and the stages find mistakes."""

from __future__ import annotations

import pytest

from celery_idempotent.key import canonical
from celery_idempotent.record import reservation
from labs.hostile import damage, keys, messages
from tests.servers.redis_server import RedisServer


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
        monkeypatch.setattr(reservation, "read", fail)
        *_, verdict = damage.records(server.url, **settings)

    assert any("ValueError" in failure for failure in verdict.failures)
