"""The heartbeat of a process whose server is frozen, and of a forked child."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from celery_idempotent.lease.heartbeat import Heartbeat
from tests.servers.redis_server import RedisServer
from tests.store import deployments
from tests.store.record_harness import SECOND, RecordHarness, store_at
from tests.store.test_heartbeat import (
    REPOSITORY,
    Holder,
)
from tests.waiting import POLL_INTERVAL, eventually

pytestmark = pytest.mark.parametrize(
    "site", deployments.params(deployments.PLAIN[0]), indirect=True
)


class TestFrozenServer:
    def test_trust_ends_and_comes_back(
        self, harness: RecordHarness, server: RedisServer, heart: Heartbeat
    ) -> None:
        holder = Holder(harness, harness.key)
        heart.start_renewal(holder.lease)
        assert holder.lease.trusted

        server.pause()
        try:
            eventually(lambda: not holder.lease.trusted)
            assert not holder.losses, "the server has not replied lost"
        finally:
            server.resume()

        eventually(lambda: holder.lease.trusted)
        assert harness.begin(task_id=SECOND).case == "held"
        heart.stop_renewal(holder.lease)

    @pytest.mark.exhaustive
    def test_leases_on_other_servers_are_extended(
        self, harness: RecordHarness, heart: Heartbeat
    ) -> None:
        """As many servers as would use up the lease, if one request followed the other."""
        with ExitStack() as stack:
            others = [stack.enter_context(RedisServer.start(deployments.ANY)) for _ in range(6)]
            frozen = [
                Holder(
                    RecordHarness(store_at(other.url), stack.enter_context(other.client())),
                    harness.key,
                    lease_ms=2_000,
                )
                for other in others
            ]
            holder = Holder(harness, harness.key, lease_ms=2_000)
            for each in (*frozen, holder):
                heart.start_renewal(each.lease)

            for other in others:
                other.pause()

            while harness.now_ms() < holder.begun.at_ms + 2 * 2_000:
                time.sleep(POLL_INTERVAL)
                assert holder.lease.trusted
                assert harness.begin(task_id=SECOND).case == "held"
            assert not any(each.lease.trusted for each in frozen)
            for each in (*frozen, holder):
                heart.stop_renewal(each.lease)

    def test_an_unreachable_server_is_logged_and_tried_again(
        self,
        harness: RecordHarness,
        server: RedisServer,
        heart: Heartbeat,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        holder = Holder(harness, harness.key)
        server.kill()

        heart.start_renewal(holder.lease)

        eventually(lambda: "1 lease not extended" in caplog.text)
        assert not holder.losses
        server.restart()
        eventually(lambda: holder.losses == 1)  # the server restarted empty


FORK = """
import os, sys, time
from celery_idempotent.lease.heartbeat import heartbeat
from tests.store.record_harness import RecordHarness, store_at
from tests.waiting import eventually
from tests.store.test_heartbeat import Holder, deadline, keys
import redis
from celery_idempotent.store import commands

url = sys.argv[1]
scene = RecordHarness(store_at(url), redis.Redis.from_url(url))
mine, childs = keys(2)
holder = Holder(scene, mine)
heartbeat.start_renewal(holder.lease)
eventually(lambda: deadline(scene, mine) > holder.begun.at_ms)
child = os.fork()
if child == 0:
    assert heartbeat.held() == ()
    own = Holder(scene, childs)
    heartbeat.start_renewal(own.lease)
    eventually(lambda: deadline(scene, childs) > own.begun.at_ms + 300)
    assert heartbeat.held() == (own.lease,)
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
seen = deadline(scene, mine)
eventually(lambda: deadline(scene, mine) > seen)
assert heartbeat.held() == (holder.lease,)
print("both beat")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_has_a_heartbeat_of_its_own(
    server: RedisServer, harness: RecordHarness
) -> None:
    parent = subprocess.run(
        # Newer versions of Python warn of a fork of a process with threads, which is tested here.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, server.url],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert parent.stdout == "both beat\n", parent.stderr
