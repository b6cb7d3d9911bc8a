"""Waiting until a record changes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from celery_idempotent.store.async_record_store import AsyncRecordStore
from celery_idempotent.store.config import Place
from celery_idempotent.store.tracking import LOOK_EVERY
from celery_idempotent.testing.server import RedisServer
from tests.store import deployments as sites
from tests.store.record_harness import Scene, calls, store_at
from tests.waiting import eventually

#: Seconds; whoever hears nothing for so long fails a test.
FOR_EVER = 100.0

CHANGES: dict[str, Callable[[Scene, int], object]] = {
    "complete": lambda scene, token: scene.complete(token),
    "fail": lambda scene, token: scene.fail(token),
    "release": lambda scene, token: scene.release(token),
    "extend": lambda scene, token: scene.extend(token, lease_ms=120_000),
    "forget": lambda scene, token: scene.forget(),
    "a flush": lambda scene, token: scene.client.flushall(),
}


@contextmanager
def waiting(scene: Scene) -> Iterator[None]:
    """Somebody waits for a change, and has it by the end."""
    seen, asked = scene.raw, calls(scene.client, "getrange")
    assert seen is not None
    waiter = threading.Thread(
        target=scene.store.until_changed, args=(scene.key, seen, FOR_EVER), daemon=True
    )
    waiter.start()
    eventually(lambda: calls(scene.client, "getrange") > asked)
    yield
    waiter.join(FOR_EVER / 2)
    assert not waiter.is_alive()


@pytest.mark.core
class TestHearing:
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_of(self, scene: Scene, change: Callable[[Scene, int], object]) -> None:
        token = scene.started().token

        with waiting(scene):
            change(scene, token)

        assert calls(scene.client, "getrange") == 1

    def test_of_what_has_changed_already(self, scene: Scene) -> None:
        before = scene.started()
        seen = scene.raw
        assert seen is not None
        scene.complete(before.token)
        began_at = time.monotonic()

        scene.store.until_changed(scene.key, seen, FOR_EVER)

        assert time.monotonic() - began_at < FOR_EVER / 2

    def test_again_by_the_same_ear(self, scene: Scene) -> None:
        token = scene.started().token
        for lease_ms in (70_000, 80_000, 90_000):
            with waiting(scene):
                scene.extend(token, lease_ms=lease_ms)

        assert calls(scene.client, "subscribe") == 1

    def test_nothing(self, scene: Scene) -> None:
        scene.started()
        began_at = time.monotonic()

        scene.store.until_changed(scene.key, scene.raw or b"", 0.3)

        assert time.monotonic() - began_at >= 0.3


class TestDeafness:
    """Whoever is not told must look: the wait ends early, as if something had changed."""

    @pytest.fixture
    def own(self) -> Iterator[RedisServer]:
        rules = "on nopass ~* &* +@all -subscribe"
        with RedisServer.start(config={}, users={"deaf": rules}) as server:
            yield server

    def test_of_a_user_who_may_not_subscribe(self, own: RedisServer) -> None:
        scene = Scene(store_at(own.url_as("deaf", "any")), own.client())
        scene.started()
        began_at = time.monotonic()

        for _ in range(2):
            scene.store.until_changed(scene.key, scene.raw or b"", FOR_EVER)

        assert 2 * LOOK_EVERY <= time.monotonic() - began_at < FOR_EVER / 2
        assert calls(scene.client, "getrange") == 0

    def test_of_one_whose_server_dies(self, own: RedisServer) -> None:
        scene = Scene(store_at(own.url), own.client())
        scene.started()

        with waiting(scene):
            own.kill()

    def test_ends_when_the_ear_was_cut_off(self, own: RedisServer) -> None:
        scene = Scene(store_at(own.url), own.client())
        token = scene.started().token
        with waiting(scene):
            scene.extend(token, lease_ms=70_000)
        for kind in ("pubsub", "normal"):
            scene.client.client_kill_filter(_type=kind, skipme=True)

        scene.store.until_changed(scene.key, scene.raw or b"", FOR_EVER)

        with waiting(scene):
            scene.complete(token)


@pytest.mark.parametrize(
    "site", sites.params(sites.PLAIN[0], sites.SENTINEL, sites.CLUSTER), indirect=True
)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_hearing_on_an_event_loop(
    site: sites.Site, scene: Scene, change: Callable[[Scene, int], object]
) -> None:
    token = scene.started().token

    async def story() -> None:
        store = AsyncRecordStore(Place(**site.how), lambda record: record.body)
        await store.ping()
        waiter = asyncio.create_task(store.until_changed(scene.key, scene.raw or b"", FOR_EVER))
        while calls(scene.client, "getrange") == 0:
            assert not waiter.done()
            await asyncio.sleep(0.01)
        change(scene, token)
        await asyncio.wait_for(waiter, FOR_EVER / 2)
        began_at = time.monotonic()
        await store.until_changed(scene.key, scene.raw or bytes(16), 0.3)
        assert time.monotonic() - began_at < FOR_EVER / 2
        await store.aclose()

    asyncio.run(story())
