"""A part of ``make outages``: fewer messages, and the outages that differ most."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from celery_idempotent.testing.server import RedisServer
from tests.labs.outages.discovery import named
from tests.labs.outages.outage import Outage
from tests.labs.outages.report import is_met
from tests.labs.outages.run import run

pytestmark = [pytest.mark.worker, pytest.mark.slow]

MESSAGES = 100


@pytest.mark.parametrize("outage", [named("killed"), named("black-hole")], ids=lambda o: o.name)
def test_nothing_is_lost_and_nothing_done_twice(outage: Outage, tmp_path: Path) -> None:
    with RedisServer.start(config={"databases": "2"}) as server:
        url = server.url.rpartition("/")[0]
        settings = {"broker_url": f"{url}/0", "result_backend": f"{url}/1"}
        verdict = run(
            replace(outage, seconds=2.0), MESSAGES, settings, tmp_path, lambda begin_replied: None
        )

    assert is_met(outage, verdict), verdict
    assert verdict.executed == verdict.keys == 80
    assert verdict.settled_after > 0
