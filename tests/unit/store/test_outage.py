"""An outage is told loudly once, and once more when it is over."""

from __future__ import annotations

import logging

import pytest

from celery_idempotent.store.config import Place
from celery_idempotent.store.outage import Outage


@pytest.fixture
def outage() -> Outage:
    return Outage(Place(url="redis://:secret@shop/0"))


def test_the_first_call_is_told_from_the_others(outage: Outage) -> None:
    assert [outage.another_call() for _ in range(3)] == [True, False, False]


def test_its_end_is_one_line_without_secrets(
    outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        outage.another_call()
    outage.over()
    outage.over()

    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert "3 calls could not ask it" in line.getMessage()
    assert "secret" not in line.getMessage()


def test_a_single_call_has_been_told_already(
    outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    outage.another_call()
    outage.over()

    assert caplog.records == []


def test_the_next_outage_is_told_anew(outage: Outage) -> None:
    outage.another_call()
    outage.over()

    assert outage.another_call()
