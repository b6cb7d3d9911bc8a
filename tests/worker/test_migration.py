"""The two deployments of the guides: processes of the old, the middle and the new version."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from celery import shared_task

from celery_idempotent import IdempotentTask
from tests.docs.pages import ROOT
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.harness import OpenShop, Shop
from tests.worker.ledger import Ledger, recorded_run
from tests.worker.shop import make_app
from tests.worker.tasks import handle

pytestmark = pytest.mark.exhaustive

OLD_CLASSES = {"once": "QueueOnce", "singleton": "Singleton"}
ONE_AT_A_TIME = {"idempotency_until": "finished", "idempotency_dedupe_publish": True}
#: A queue that no worker consumes: messages stay in it.
NO_WORKER = "no-worker"


#: The options of a task for each library; IdempotentTask ignores them.
OPTIONS: dict[str, dict[str, Any]] = {
    "once": {"once": {"keys": ["order"], "timeout": 60}},
    "singleton": {"unique_on": ["order"]},
}


def retry_once(self: Any, order: str, countdown: float) -> str:
    """Retries in the first execution."""
    with recorded_run(self, order) as ledger:
        if len(ledger.runs(order)) == 1:
            raise self.retry(countdown=countdown)
        return "retried"


def _base_class(library: str) -> Any:
    example = ROOT / f"docs/examples/from_celery_{library}.py"
    names: dict[str, Any] = {"__name__": __name__}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's, of escape sequences in celery-once
            exec(example.read_text("utf-8"), names)
    except ModuleNotFoundError:
        return None
    return names["TransitionalTask"]


for _library, _options in OPTIONS.items():
    if _base := _base_class(_library):
        for _name, _body in (("handle", handle), ("retry", retry_once)):
            _task = {"base": _base, "name": f"shop.{_library}_{_name}", **_options}
            shared_task(_body, bind=True, idempotency_key=("order",), **_task)


@pytest.fixture(scope="module")
def shared_shop(open_shop: OpenShop, server: RedisServer) -> Iterator[Shop]:
    once = {"backend": "celery_once.backends.Redis", "settings": {"url": server.url}}
    with open_shop(ONCE=once, imports=[__name__]) as shop:
        shop.start_worker(concurrency=3)
        yield shop


@pytest.fixture(autouse=True)
def _without_locks_and_messages(shop: Shop) -> None:
    shop.redis.delete(NO_WORKER, *shop.redis.scan_iter("SINGLETONLOCK_*"))


@pytest.fixture(params=OPTIONS)
def library(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(f"celery_{request.param}", reason="dependency group peers")
    return str(request.param)


@pytest.fixture
def in_transition(shop: Shop, library: str) -> Any:
    """The task as processes of the first step have it, the worker included."""
    return shop.app.tasks[f"shop.{library}_handle"]


@pytest.fixture
def old(shop: Shop, library: str) -> Any:
    """The task as old processes have it."""
    base = getattr(importlib.import_module(f"celery_{library}"), OLD_CLASSES[library])
    return _in_another_process(shop, library, base, **OPTIONS[library])


@pytest.fixture
def new(shop: Shop, library: str) -> Any:
    """The task as processes of the second step have it."""
    options = {"idempotency_key": ("order",), **ONE_AT_A_TIME}
    return _in_another_process(shop, library, IdempotentTask, **options)


def _in_another_process(shop: Shop, library: str, base: Any, **options: Any) -> Any:
    def task(self: Any, order: str, amount: int = 1) -> None: ...

    name = f"shop.{library}_handle"
    app = make_app(shop.settings)
    del app.tasks[name]
    return app.task(bind=True, lazy=False, shared=False, base=base, name=name, **options)(task)


def is_refused(task: Any, first: Any, order: str) -> bool:
    """Returns whether a call is not published, in the way of either library."""
    try:
        return bool(task.apply_async((order,), queue=NO_WORKER).id == first.id)
    except Exception as error:
        return type(error).__name__ == "AlreadyQueued"


def is_locked(shop: Shop, server: RedisServer, order: str) -> bool:
    """Returns whether either library holds a lock; those of celery-once are in database 0."""
    with server.client() as client:
        once = [*client.scan_iter(f"qo_*{order}")]
    return bool(once or [*shop.redis.scan_iter("SINGLETONLOCK_*")])


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("published_by", "others"),
    [
        ("old", ["old", "in_transition"]),
        ("in_transition", ["old", "in_transition", "new"]),
        ("new", ["in_transition", "new"]),
    ],
)
def test_a_queued_call_is_not_queued_by_a_process_that_runs_at_the_same_time(
    request: pytest.FixtureRequest, shop: Shop, order: str, published_by: str, others: list[str]
) -> None:
    first = request.getfixturevalue(published_by).apply_async((order,), queue=NO_WORKER)

    for version in others:
        assert is_refused(request.getfixturevalue(version), first, order), version
    assert shop.redis.llen(NO_WORKER) == 1


def test_a_call_that_an_old_process_has_queued_leaves_no_reservation(
    in_transition: Any, old: Any, new: Any, order: str
) -> None:
    assert is_refused(in_transition, old.apply_async((order,), queue=NO_WORKER), order)
    assert new.idempotency_record(order) is None


@pytest.mark.usefixtures("library")
def test_after_its_end_every_version_can_queue_it_again(
    request: pytest.FixtureRequest, shop: Shop, server: RedisServer, order: str
) -> None:
    for name in ("old", "in_transition", "new", "in_transition", "old"):
        version = request.getfixturevalue(name)
        version.delay(order).get(SOON)
        # The older libraries release their locks after the result is stored.
        eventually(lambda: not is_locked(shop, server, order), "no lock is left")
    assert len(shop.ledger.runs(order)) == 5


def test_a_copy_of_the_running_message_is_put_back_in_spite_of_its_lock(
    shop: Shop, in_transition: Any, ledger: Ledger, order: str
) -> None:
    ledger.hold(order)
    first = in_transition.apply_async((order,), queue="kept")
    message = shop.deliver_kept(first.id)
    ledger.wait_for_run(order)

    shop.redis.lpush("celery", message)
    ledger.wait_for_signal(first.id, "conflicted")
    ledger.release(order)

    ledger.wait_for_signal(first.id, "replayed")
    assert len(ledger.runs(order)) == 1


def test_a_retry_is_published_in_spite_of_its_lock(shop: Shop, library: str, order: str) -> None:
    task = shop.app.tasks[f"shop.{library}_retry"]
    assert task.delay(order, 0).get(SOON) == "retried"
    assert len(shop.ledger.runs(order)) == 2
