"""The class of a message in the worker's main process."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import ImproperlyConfigured
from celery.worker.request import Request

from celery_idempotent.core import shared_counters, worker
from celery_idempotent.core.events import report
from celery_idempotent.core.shared_counters import SharedCounters
from celery_idempotent.core.task.receive.request import IdempotentRequest, request_class
from tests.unit.conftest import shop, task_in


class OwnRequest(Request):
    """A class of the user's."""


class TestRequestClass:
    @pytest.mark.parametrize("own", [OwnRequest, f"{__name__}:OwnRequest"], ids=["class", "path"])
    def test_of_the_users_own_is_combined(self, own: object) -> None:
        combined = request_class(task_in(shop(), Request=own))

        assert combined.__mro__[:4] == (combined, IdempotentRequest, OwnRequest, Request)
        assert request_class(task_in(shop(), Request=combined)) is combined

    def test_is_ours_by_default(self) -> None:
        assert request_class(task_in(shop())) is IdempotentRequest

    def test_that_cannot_be_combined_is_refused(self) -> None:
        task = task_in(shop(), Request=object)

        with pytest.raises(ImproperlyConfigured, match="shop.charge: its Request, object, "):
            task.start_strategy(task.app, None)


@pytest.mark.parametrize(
    ("failed", "pid", "reached", "conf", "is_reported"),
    [
        (0, 0, False, {}, True),
        (0, None, False, {}, True),
        (0, 0, True, {}, False),
        (1, 0, False, {}, False),
        (0, 1, False, {}, False),  # a spawned process does not share the counters
        (0, 0, False, {"worker_deduplicate_successful_tasks": True}, False),
    ],
)
def test_a_message_that_has_succeeded_without_its_task_is_counted(
    monkeypatch: pytest.MonkeyPatch,
    failed: int,
    pid: int | None,
    reached: bool,
    conf: dict[str, Any],
    is_reported: bool,
) -> None:
    counters = SharedCounters(["shop.charge"])
    monkeypatch.setattr(worker, "counters", counters)
    monkeypatch.setattr(report, "counters", [counters.count])
    pid = os.getpid() if pid == 0 else pid
    request = SimpleNamespace(id="1", name="shop.charge", task=None, worker_pid=pid)
    request.app = shop(**conf)
    request.delivery_info, request._received_ms = {"redelivered": True}, shared_counters.now_ms()
    if reached:
        counters.enter("1")

    IdempotentRequest.check_decided(request, failed=failed)  # type: ignore[arg-type]

    counted = {"bypassed": 1} if is_reported else {}
    assert counters.totals() == {"shop.charge": counted}
