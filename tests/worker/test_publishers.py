"""Keys of calls that another process publishes by name, with Celery alone or with the library."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idempotent import KeyRuleError
from tests.servers.rabbitmq import RabbitMQ
from tests.waiting import SOON
from tests.worker.harness import REPOSITORY, OpenShop, Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import charge

pytestmark = pytest.mark.exhaustive


#: Publishes a call; returns the state of its result, its value or the error's message, and the name
#: of the error's type.
Publish = Callable[..., tuple[str, Any, str | None]]


@pytest.fixture(
    scope="module", params=["redis", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)]
)
def shared_shop(request: pytest.FixtureRequest, open_shop: OpenShop) -> Iterator[Shop]:
    settings = {}
    if request.param == "rabbitmq":
        broker: RabbitMQ = request.getfixturevalue("rabbitmq")
        settings = {"broker_url": broker.url, "task_default_queue": "publishers"}
    with open_shop(**settings) as shop:
        shop.start_worker()
        yield shop


@pytest.fixture
def publish(shop: Shop) -> Publish:
    """Publishes a call of `charge` from a process without the library."""
    names = ("broker_url", "result_backend", "task_default_queue")
    settings = {name: shop.settings[name] for name in names if name in shop.settings}

    def publish(order: str, **options: Any) -> tuple[str, Any, str | None]:
        call = pickle.dumps((settings, "shop.charge", (order,), options))
        args = [sys.executable, "-m", "tests.worker.plain_publisher"]
        run = subprocess.run(args, input=call, stdout=subprocess.PIPE, cwd=REPOSITORY, check=True)
        state, value, error = json.loads(run.stdout)
        return state, value, error

    return publish


@pytest.mark.parametrize("kind", ["text", "integer", "tuple", "list", "mixed list"])
def test_header_is_the_key(publish: Publish, ledger: Ledger, order: str, kind: str) -> None:
    key: Any = {
        "text": f"request {order}",
        "integer": int(order[:12], 16),
        "tuple": ("acme", order),
        "list": ["acme", order],
        "mixed list": ["acme", 7, order],
    }[kind]

    ends = [publish(order, headers={"idempotency_key": key}) for _ in range(2)]
    third = charge.apply_async((order,), idempotency_key=key).get(timeout=SOON)

    assert ends == [("SUCCESS", third, None)] * 2
    assert len(ledger.runs(order)) == 1
    record = charge.idempotency_record(idempotency_key=key)
    assert (record.explicit, record.result) == (True, third)
    assert charge.idempotency_record(order) is None


def test_false_header_runs_without_protection(publish: Publish, ledger: Ledger, order: str) -> None:
    for _ in range(2):
        publish(order, headers={"idempotency_key": False})

    assert [run.protected for run in ledger.runs(order)] == [False, False]


def test_header_with_a_wrong_name_is_refused(publish: Publish, ledger: Ledger, order: str) -> None:
    state, message, error = publish(order, headers={"Idempotency-Key": "req-7"})

    assert (state, error) == ("FAILURE", "KeyRuleError")
    assert "did you mean 'idempotency_key'?" in message
    assert ledger.runs(order) == []


@pytest.mark.parametrize("name", ["idempotency_key", "idempotency_keyy"])
def test_option_of_send_task_is_refused_unless_the_broker_drops_it(
    shop: Shop, publish: Publish, ledger: Ledger, order: str, name: str
) -> None:
    state, value, error = publish(order, **{name: "req-7"})

    if shop.settings["broker_url"].startswith("amqp"):
        # It drops properties that AMQP does not define. Nothing in the message shows it: the
        # finding `publishers` of doctor says so.
        assert state == "SUCCESS"
        assert charge.idempotency_record(order).result == value
        return
    assert (state, error) == ("FAILURE", "KeyRuleError")
    assert "as an option of send_task(), which is not read: pass headers=" in value
    assert ledger.runs(order) == []


@pytest.mark.parametrize("name", ["idempotency_key", "idempotency_keyy"])
def test_option_of_send_task_is_refused_on_any_broker_with_the_library(
    shop: Shop, ledger: Ledger, order: str, name: str
) -> None:
    result = shop.app.send_task("shop.charge", (order,), **{name: "req-7"})

    with pytest.raises(KeyRuleError, match=f"the publisher passed {name} as an option"):
        result.get(timeout=SOON)
    assert ledger.runs(order) == []
