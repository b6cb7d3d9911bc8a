"""The heartbeat, on a real server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.key.key import Key
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.heartbeat import Heartbeat
from celery_idempotent.lease.lease import Lease
from celery_idempotent.store import commands, scripts
from celery_idempotent.store.commands import Extension
from celery_idempotent.store.transport.sync import Line
from celery_idempotent.testing.server import RedisServer
from tests.faults.proxy import Proxy
from tests.store import deployments as sites
from tests.store.record_harness import HOLD_MS, RETENTION_MS, SECOND, Scene, calls, store_at
from tests.waiting import eventually

#: What a server does with the script is told in the other files, for every kind.
pytestmark = pytest.mark.parametrize("site", sites.params(sites.PLAIN[0]), indirect=True)

REPOSITORY = Path(__file__).parents[2]
LEASE_MS = 300
EXTEND = scripts.load("extend").sha


@pytest.fixture
def heart() -> Heartbeat:
    return Heartbeat()


class Holder:
    """An execution of `key`, with its lease."""

    def __init__(self, scene: Scene, key: Key, lease_ms: int = LEASE_MS) -> None:
        sent_at = monotonic()
        begun = scene.started(key=key, lease_ms=lease_ms)
        self.losses = 0
        self.begun = begun
        self.lease = Lease(
            scene.store,
            Extension(key, begun.token, lease_ms, RETENTION_MS),
            sent_at,
            self._lost,
        )

    def _lost(self) -> None:
        self.losses += 1


def keys(number: int) -> list[Key]:
    return [Key("shop.charge", f"{each:022}") for each in range(number)]


def extensions(scene: Scene) -> int:
    """How many the server has granted or refused so far."""
    return calls(scene.client, "evalsha") + calls(scene.client, "eval")


def deadline(scene: Scene, key: Key) -> int:
    record = scene.store.look_up(key)
    assert record is not None
    return record.at_ms


def await_later_deadline(scene: Scene, key: Key, than: int) -> None:
    eventually(lambda: deadline(scene, key) > than)


def test_a_lease_outlives_its_length(scene: Scene, heart: Heartbeat) -> None:
    holder = Holder(scene, scene.key)

    heart.hold(holder.lease)

    first_end = holder.begun.at_ms
    eventually(lambda: scene.now_ms() > first_end + 2 * LEASE_MS)
    assert scene.begin(task_id=SECOND).case == "held"
    assert holder.lease.trusted
    assert not holder.losses
    heart.let_go(holder.lease)


def test_a_lease_let_go_is_extended_no_more(scene: Scene, heart: Heartbeat) -> None:
    gone, other = (Holder(scene, key) for key in keys(2))
    for holder in (gone, other):
        heart.hold(holder.lease)

    heart.let_go(gone.lease)
    last = deadline(scene, gone.lease.key)

    eventually(lambda: deadline(scene, other.lease.key) > other.begun.at_ms + LEASE_MS)
    assert deadline(scene, gone.lease.key) == last
    assert heart.held() == (other.lease,)
    heart.let_go(other.lease)


def test_all_leases_go_in_one_round_trip(
    scene: Scene, heart: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips: list[int] = []
    send = Line.send

    def counting(line: Line, requests: Sequence[bytes]) -> list[Any]:
        trips.append(len(requests))
        return send(line, requests)

    scene.client.script_load(scripts.load("extend").source)
    # Long enough that all of them begin within one beat, however busy the machine is.
    holders = [Holder(scene, key, lease_ms=3_000) for key in keys(20)]
    monkeypatch.setattr(Line, "send", counting)
    together = monotonic()
    for holder in holders:
        holder.lease.renewed(together)
        heart.hold(holder.lease)

    eventually(lambda: len(trips) >= 3)
    for holder in holders:
        heart.let_go(holder.lease)

    assert trips[:3] == [20, 20, 20]


def test_a_lease_not_yet_due_waits_for_its_turn(
    proxied: Scene, proxy: Proxy, heart: Heartbeat
) -> None:
    soon, late = (Holder(proxied, key, ms) for key, ms in zip(keys(2), (300, 60_000), strict=True))
    for holder in (soon, late):
        heart.hold(holder.lease)

    eventually(lambda: len(proxy.requests_with(EXTEND)) >= 3)
    heart.let_go(soon.lease)
    heart.let_go(late.lease)

    assert deadline(proxied, late.lease.key) == late.begun.at_ms
    assert all(b"0" * 21 + b"1" not in request for request in proxy.requests_with(EXTEND))


def test_a_short_lease_is_not_kept_waiting_by_a_long_one(scene: Scene, heart: Heartbeat) -> None:
    long, short = (Holder(scene, key, ms) for key, ms in zip(keys(2), (60_000, 300), strict=True))
    heart.hold(long.lease)
    eventually(lambda: heart._wakes_at == long.lease.due)  # the thread sleeps for twenty seconds

    heart.hold(short.lease)

    eventually(lambda: deadline(scene, short.lease.key) > short.begun.at_ms, seconds=2)
    heart.let_go(long.lease)
    heart.let_go(short.lease)


def test_cut_connections_are_made_again(proxied: Scene, proxy: Proxy, heart: Heartbeat) -> None:
    holder = Holder(proxied, proxied.key)
    heart.hold(holder.lease)

    for _ in range(3):
        seen = deadline(proxied, proxied.key)
        assert proxy.cut() >= 1
        await_later_deadline(proxied, proxied.key, than=seen)

    assert not holder.losses
    assert proxied.begin(task_id=SECOND).case == "held"
    heart.let_go(holder.lease)


def test_a_lost_reply_is_no_loss(proxied: Scene, proxy: Proxy, heart: Heartbeat) -> None:
    holder = Holder(proxied, proxied.key)
    proxy.lose_reply(to=EXTEND)

    heart.hold(holder.lease)

    eventually(lambda: proxy.pending == 0)
    eventually(lambda: deadline(proxied, proxied.key) > holder.begun.at_ms + LEASE_MS)
    assert not holder.losses
    assert holder.lease.trusted
    heart.let_go(holder.lease)


def test_a_reply_that_never_comes_is_no_loss(
    proxied: Scene, proxy: Proxy, heart: Heartbeat
) -> None:
    # The connection stays open and silent, as behind a firewall that has forgotten it.
    holder = Holder(proxied, proxied.key, lease_ms=1200)
    proxy.swallow_reply(to=EXTEND)

    heart.hold(holder.lease)

    eventually(lambda: proxied.now_ms() > holder.begun.at_ms + 1200)
    assert proxy.pending == 0
    assert proxied.begin(task_id=SECOND).case == "held"
    assert holder.lease.trusted
    heart.let_go(holder.lease)


def test_flushed_scripts_are_no_loss(scene: Scene, heart: Heartbeat) -> None:
    holder = Holder(scene, scene.key)
    heart.hold(holder.lease)

    for _ in range(3):
        scene.client.script_flush()
        seen = deadline(scene, scene.key)
        await_later_deadline(scene, scene.key, than=seen)

    assert not holder.losses
    heart.let_go(holder.lease)


@pytest.mark.parametrize("rival", ["runs", "has completed", "none"])
def test_a_lease_that_was_taken_over_is_noticed_once(
    scene: Scene, heart: Heartbeat, rival: str
) -> None:
    holder = Holder(scene, scene.key)
    scene.forget()
    if rival != "none":
        token = scene.started(task_id=SECOND).token
    if rival == "has completed":
        scene.complete(token)
    before = scene.raw

    heart.hold(holder.lease)

    eventually(lambda: holder.losses > 0)
    assert holder.lease.lost
    assert not holder.lease.trusted
    assert heart.held() == ()
    assert scene.raw == before
    assert holder.losses == 1


def test_a_lease_abandoned_by_the_parent_is_lost(scene: Scene, heart: Heartbeat) -> None:
    holder = Holder(scene, scene.key)
    scene.abandon(grace_ms=60_000)

    heart.hold(holder.lease)

    eventually(lambda: holder.losses == 1)


@pytest.mark.parametrize("end", ["complete", "fail", "hold"])
def test_the_executions_own_end_is_no_loss(scene: Scene, heart: Heartbeat, end: str) -> None:
    holder = Holder(scene, scene.key)
    token = holder.lease.token
    {
        "complete": scene.complete,
        "fail": scene.fail,
        "hold": lambda token: scene.release(token, HOLD_MS),
    }[end](token)
    before = extensions(scene)

    heart.hold(holder.lease)  # as a beat that was under way when the outcome was stored

    eventually(lambda: extensions(scene) >= before + 3)
    assert not holder.losses
    assert not holder.lease.lost
    heart.let_go(holder.lease)


def test_an_answer_that_comes_after_letting_go_is_not_heard(
    proxied: Scene, proxy: Proxy, heart: Heartbeat
) -> None:
    released, other = (Holder(proxied, key) for key in keys(2))
    proxied.store.execute(commands.forget(released.lease.key))
    for holder in (released, other):
        proxy.delay_reply(to=EXTEND, seconds=0.2)
        heart.hold(holder.lease)
    eventually(lambda: bool(proxy.requests_with(EXTEND)))

    heart.let_go(released.lease)

    eventually(lambda: deadline(proxied, other.lease.key) > other.begun.at_ms + LEASE_MS)
    assert released.losses == 0
    heart.let_go(other.lease)


def test_the_thread_starts_with_the_first_lease(scene: Scene) -> None:
    def beating() -> int:
        return sum(thread.name == "idempotency-heartbeat" for thread in threading.enumerate())

    before = beating()
    heart = Heartbeat()
    assert beating() == before

    holders = [Holder(scene, key) for key in keys(3)]
    for holder in holders:
        heart.hold(holder.lease)

    assert beating() == before + 1
    assert all(
        thread.daemon for thread in threading.enumerate() if thread.name == "idempotency-heartbeat"
    )
    for holder in holders:
        heart.let_go(holder.lease)


def test_an_unexpected_error_does_not_end_the_others(
    scene: Scene, heart: Heartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = (Holder(scene, key) for key in keys(2))

    def explode() -> None:
        raise RuntimeError("in a handler")

    bad.lease.on_lost = explode
    scene.store.execute(commands.forget(bad.lease.key))

    heart.hold(bad.lease)
    heart.hold(good.lease)

    eventually(lambda: deadline(scene, good.lease.key) > good.begun.at_ms + LEASE_MS)
    assert "in a handler" in caplog.text
    assert heart.held() == (good.lease,)
    heart.let_go(good.lease)


def test_a_record_that_cannot_be_read_is_told_and_does_not_end_the_others(
    scene: Scene, heart: Heartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = (Holder(scene, key) for key in keys(2))
    name = scene.store.name(bad.lease.key)
    scene.client.delete(name)
    scene.client.rpush(name, "no record")
    scene.client.expire(name, 60)

    for holder in (bad, good):
        heart.hold(holder.lease)

    await_later_deadline(scene, good.lease.key, than=good.begun.at_ms + LEASE_MS)
    assert f"The lease of {bad.lease.key} could not be extended" in caplog.text
    assert not bad.losses, "nobody said that another has it"
    for holder in (bad, good):
        heart.let_go(holder.lease)


def test_two_stores_are_both_served(scene: Scene, server: RedisServer, heart: Heartbeat) -> None:
    elsewhere = Scene(store_at(server.url, prefix="other"), scene.client)
    holders = [Holder(scene, scene.key), Holder(elsewhere, scene.key)]
    for holder in holders:
        heart.hold(holder.lease)

    for place, holder in zip((scene, elsewhere), holders, strict=True):
        await_later_deadline(place, place.key, than=holder.begun.at_ms + LEASE_MS)
        heart.let_go(holder.lease)


class TestFrozenServer:
    def test_trust_ends_and_comes_back(
        self, scene: Scene, server: RedisServer, heart: Heartbeat
    ) -> None:
        holder = Holder(scene, scene.key)
        heart.hold(holder.lease)
        assert holder.lease.trusted

        server.pause()
        try:
            eventually(lambda: not holder.lease.trusted)
            assert not holder.losses, "nobody said that it is lost"
        finally:
            server.resume()

        eventually(lambda: holder.lease.trusted)
        assert scene.begin(task_id=SECOND).case == "held"
        heart.let_go(holder.lease)

    def test_leases_elsewhere_go_on(
        self, scene: Scene, server: RedisServer, heart: Heartbeat
    ) -> None:
        with RedisServer.start(sites.ANY) as other, other.client() as client:
            frozen = Holder(Scene(store_at(other.url), client), scene.key, lease_ms=1200)
            holder = Holder(scene, scene.key, lease_ms=1200)
            for each in (frozen, holder):
                heart.hold(each.lease)

            other.pause()

            eventually(lambda: scene.now_ms() > holder.begun.at_ms + 1200)
            assert not frozen.lease.trusted
            assert holder.lease.trusted
            assert scene.begin(task_id=SECOND).case == "held"
            for each in (frozen, holder):
                heart.let_go(each.lease)

    def test_a_server_that_is_gone_is_told_and_asked_again(
        self,
        scene: Scene,
        server: RedisServer,
        heart: Heartbeat,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        holder = Holder(scene, scene.key)
        server.kill()

        heart.hold(holder.lease)

        eventually(lambda: "1 leases could not be extended" in caplog.text)
        assert not holder.losses
        server.restart()
        eventually(lambda: holder.losses == 1)  # it came back empty


FORK = """
import os, sys, time
from celery_idempotent.lease.heartbeat import heartbeat
from tests.store.record_harness import Scene, store_at
from tests.waiting import eventually
from tests.store.test_heartbeat import Holder, deadline, keys
import redis
from celery_idempotent.store import commands

url = sys.argv[1]
scene = Scene(store_at(url), redis.Redis.from_url(url))
mine, childs = keys(2)
holder = Holder(scene, mine)
heartbeat.hold(holder.lease)
eventually(lambda: deadline(scene, mine) > holder.begun.at_ms)
child = os.fork()
if child == 0:
    assert heartbeat.held() == ()
    own = Holder(scene, childs)
    heartbeat.hold(own.lease)
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
def test_a_forked_child_has_a_heartbeat_of_its_own(server: RedisServer, scene: Scene) -> None:
    parent = subprocess.run(
        # Newer Pythons warn of a fork beside threads, which is what this is about.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, server.url],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert parent.stdout == "both beat\n", parent.stderr
