"""An outage is logged when it begins and when it ends."""

from __future__ import annotations

import logging

import pytest

from celery_idempotent.core.events import report
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.node import OutageLogger


@pytest.fixture
def outage() -> OutageLogger:
    return OutageLogger(str(StoreConfig(url="redis://:secret@shop/0")))


def test_there_is_one_line_a_minute(outage: OutageLogger, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(report, "monotonic", lambda: now)
    assert [outage.count_failure() for _ in range(3)] == [0, None, None]
    now += report.INTERVAL

    assert [outage.count_failure() for _ in range(2)] == [2, None]


def test_its_end_is_one_line_without_secrets(
    outage: OutageLogger, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        outage.count_failure()
    outage.end()
    outage.end()

    (transport,) = caplog.records
    assert transport.levelno == logging.WARNING
    assert "3 calls could not reach it" in transport.getMessage()
    assert "secret" not in transport.getMessage()


def test_the_end_after_a_single_call_is_not_logged(
    outage: OutageLogger, caplog: pytest.LogCaptureFixture
) -> None:
    outage.count_failure()
    outage.end()

    assert caplog.records == []
    assert outage.count_failure() == 0, "the next outage is logged again"
