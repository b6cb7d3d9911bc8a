"""Runs two outages of ``make outages`` with fewer messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from labs.outages.outage import OUTAGES, Outage
from labs.outages.run import run
from tests.servers.redis_server import RedisServer

pytestmark = [pytest.mark.worker, pytest.mark.slow]

MESSAGES = 100


@pytest.mark.parametrize(
    "outage",
    [each for each in OUTAGES if each.name in ("killed", "black-hole")],
    ids=lambda o: o.name,
)
@pytest.mark.exhaustive
def test_no_message_is_lost_or_executed_twice(outage: Outage, tmp_path: Path) -> None:
    with RedisServer.start(config={"databases": "2"}) as server:
        url = server.url.rpartition("/")[0]
        settings = {"broker_url": f"{url}/0", "result_backend": f"{url}/1"}
        verdict = run(replace(outage, seconds=2.0), MESSAGES, settings, tmp_path)

    assert verdict.keeps_promises(outage), verdict
    assert verdict.executed == verdict.keys == 80
    assert verdict.settled_after > 0
