"""What `explain`, `show` and `doctor` make of keys that run again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery
from redis import Redis

from celery_idempotent import IdempotentTask
from celery_idempotent.operations.calls.prediction import Prediction, predict
from celery_idempotent.operations.doctor import tasks as doctor
from celery_idempotent.operations.records.query import read_view
from celery_idempotent.operations.records.reader import RecordView
from tests.apps import close
from tests.monitoring.conftest import Shop, list_json
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import FIRST, SECOND, SHORT_MS, Harness, Turn
from tests.waiting import eventually


@pytest.fixture
def app(server: RedisServer, client: Redis) -> Iterator[Celery]:
    app = Celery("turns", broker="memory://", backend=server.url, set_as_current=False)

    for name, options in OPTIONS.items():
        app.task(base=IdempotentTask, name=name, idempotency_key="{feed}", **options)(import_feed)
    yield app
    close(app)


def import_feed(feed: str, full: bool = False) -> None:
    """Does nothing."""


OPTIONS = {
    "in_turn": {"idempotency_until": "finished"},
    "skipping": {"idempotency_until": "finished", "idempotency_on_conflict": "ignore"},
    "published_once": {"idempotency_until": "finished", "idempotency_dedupe_publish": True},
    "collapsed": {"idempotency_until": "started", "idempotency_dedupe_publish": True},
    "not_collapsed": {"idempotency_until": "started", "idempotency_dedupe_publish": False},
}
NOT_PUBLISHED = "no message is published, and the caller gets that task's result"


class Feed:
    """The key of one task, with its messages."""

    def __init__(self, app: Celery, client: Redis, name: str) -> None:
        self.task = app.tasks[name]
        self.key = self.task.idempotency_key_of("news")
        self.store = self.task.idempotency_configuration.executor.store
        self.harness = Harness(self.store, client, self.key)
        self.turn = Turn(self.harness, waits=name == "collapsed")

    def predict(self, *, full: bool = False) -> Prediction:
        key = self.task.idempotency_key_of("news", full=full)
        view: RecordView | None = read_view(self.store, key)
        return predict(key, self.task.idempotency_configuration.settings, view)


def test_of_a_free_key(app: Celery, client: Redis) -> None:
    feed = Feed(app, client, "in_turn")
    assert feed.predict() == ("run", "runs: there is no record")
    feed.turn.first.completed()
    assert feed.predict() == ("run", f"runs: the call before it, task {FIRST}, has ended")
    feed.turn.second.publish(hold_ms=SHORT_MS)
    eventually(lambda: feed.predict().case == "run")
    feed.turn.third.dead()
    assert "the lease of task 33333333" in feed.predict().sentence


@pytest.mark.parametrize(
    ("name", "full", "end"),
    [
        ("in_turn", False, "it waits until that ends"),
        ("in_turn", True, "it waits until that ends"),
        ("skipping", False, "it is ignored"),
        ("published_once", False, NOT_PUBLISHED),
        ("published_once", True, "it waits until that ends"),
    ],
)
def test_while_one_runs(app: Celery, client: Redis, name: str, full: bool, end: str) -> None:
    feed = Feed(app, client, name)
    feed.turn.first.started()

    prediction = feed.predict(full=full)

    assert prediction.case == "conflict"
    assert prediction.sentence.startswith(f"conflicts with task {FIRST}, which runs on ")
    assert prediction.sentence.endswith(f": {end}")


def test_in_a_burst(app: Celery, client: Redis) -> None:
    feed = Feed(app, client, "collapsed")
    feed.turn.first.publish()
    assert f"task {FIRST} is already waiting" in feed.predict().sentence
    assert "waiting, and gets these arguments" in feed.predict(full=True).sentence
    token = feed.turn.first.started().token
    assert feed.predict(full=True) == ("conflict", f"waits for its turn, after task {FIRST}")
    feed.turn.second.publish()
    assert f"task {SECOND} is already waiting" in feed.predict().sentence
    feed.turn.first.complete(token)
    assert f"task {SECOND} is already waiting" in feed.predict().sentence


def test_show_names_the_waiting_message(shop: Shop) -> None:
    key = shop.charge.idempotency_key_of(42, 999)
    turn = Turn(Harness(shop.store, shop.client, key), waits=True)
    turn.first.started()
    assert "next" not in shop.celery("show", "shop.charge", "[42, 999]")

    turn.second.publish()

    assert SECOND in shop.celery("show", "shop.charge", "[42, 999]")
    assert [record["task_id"] for record in list_json(shop)] == [FIRST]


def test_doctor_finds_bursts_that_do_not_collapse(app: Celery) -> None:
    found = [finding.subject for finding in doctor.check(app) if finding.name == "bursts"]

    assert found == ["not_collapsed"]


def test_a_periodic_task_that_runs_again_needs_no_key(app: Celery) -> None:
    app.conf.beat_schedule = {"feed": {"task": "in_turn"}}
    app.task(base=IdempotentTask, name="each", idempotency_until="finished")(import_feed)
    app.conf.beat_schedule["each"] = {"task": "each"}

    assert [finding for finding in doctor.check(app) if finding.name == "periodic-key"] == []
