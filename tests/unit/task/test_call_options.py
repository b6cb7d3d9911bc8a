"""Options of a call that are misspelt or in a wrong place."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, chain, group, signature
from celery.app.task import Context
from celery.exceptions import Retry
from celery.utils import uuid

from celery_idempotent import KeyRuleError
from celery_idempotent.core.task.message import call_options, misplaced
from celery_idempotent.errors import SettingsError
from tests.unit.conftest import task_in


class Shop:
    """An app whose messages stay in memory, and its tasks."""

    def __init__(self) -> None:
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        self.app.conf.update(task_default_queue=uuid(), idempotency_redis_url="redis://nowhere:1")

        def charge(order: Any, amount: int = 0) -> None: ...

        def send(order: Any, **options: Any) -> None: ...

        def forward(order: Any, idempotency_key: Any = None) -> None: ...

        def plain(order: Any) -> None: ...

        self.charge, self.send, self.forward = (
            task_in(self.app, body, name=f"orders.{body.__name__}")
            for body in (charge, send, forward)
        )
        self.plain = self.app.task(plain, name="orders.plain", lazy=False, shared=False)

    def published(self) -> list[dict[str, Any]]:
        """Returns the headers of the messages that were published."""
        with self.app.connection_for_read() as connection:
            queue = connection.SimpleQueue(self.app.conf.task_default_queue)
            messages = [queue.get_nowait() for _ in range(queue.qsize())]
            queue.close()
            return [dict(message.headers) for message in messages]


@pytest.fixture
def shop() -> Shop:
    return Shop()


def message(headers: dict[str, Any] | None = None, **properties: Any) -> Context:
    """Returns the request of a message with these headers and properties."""
    return Context(id="an id", task="orders.charge", headers=headers, properties=properties)


MISSPELT = ["idempotency_keyy", "idempotent_key", "Idempotency_Key", "idempotencyKey"]

PUBLISH: dict[str, Callable[[Shop, dict[str, Any]], Any]] = {
    "apply_async": lambda shop, options: shop.charge.apply_async((1,), **options),
    "apply": lambda shop, options: shop.charge.apply((1,), **options),
    "signature": lambda shop, options: shop.charge.s(1).apply_async(**options),
    "clone": lambda shop, options: shop.charge.s(1).clone(**options).apply_async(),
    "set": lambda shop, options: shop.charge.s(1).set(**options).delay(),
    "set by name": lambda shop, options: (
        signature("orders.charge", (1,), app=shop.app).set(**options).delay()
    ),
    "group": lambda shop, options: group(shop.charge.s(n) for n in (1, 2)).apply_async(**options),
    "chain": lambda shop, options: chain(
        shop.charge.si(1).set(**options), shop.plain.si(1)
    ).apply_async(),
}


@pytest.mark.parametrize("publish", PUBLISH)
@pytest.mark.parametrize("name", [*MISSPELT, "key", "result_ttl"])
def test_nothing_is_published_with_a_misspelt_option(shop: Shop, publish: str, name: str) -> None:
    with pytest.raises(TypeError, match=rf"\(\) takes no option '{name}'; did you"):
        PUBLISH[publish](shop, {name: "req-7"})

    assert shop.published() == []


def test_an_invalid_key_of_a_signature_is_rejected_when_it_is_published(shop: Shop) -> None:
    derived = shop.charge.idempotency_key_of(1)
    for key, reason in (("", "must be"), (("acme", None), "must be"), (derived, "is a Key, ")):
        with pytest.raises(KeyRuleError, match=rf"^orders\.charge: idempotency_key {reason}"):
            shop.charge.s(1).set(idempotency_key=key).delay()
    for key in (None, False, 7):
        shop.charge.s(1).set(idempotency_key=key).delay()


@pytest.mark.parametrize("options", [{"idempotency_key": "req-8"}, {"idempotency_keyy": "req-8"}])
def test_a_retry_takes_no_option_of_this_package(shop: Shop, options: dict[str, Any]) -> None:
    shop.charge.push_request(id="an id", args=(1,), kwargs={}, called_directly=False)
    try:
        why = "': a retry keeps the key of its call$"
        with pytest.raises(TypeError, match=rf"^retry\(\) takes no option 'idempotency_keyy?{why}"):
            shop.charge.retry(**options)
    finally:
        shop.charge.pop_request()

    assert shop.published() == []


def test_options_of_celery_and_kombu_are_accepted(shop: Shop) -> None:
    options = {
        "priority": 3, "countdown": 1, "shadow": "x",
        "message_id": "an id", "app_id": "shop", "idle": 5, "identity": "me", "idem": "x",
    }  # fmt: skip

    shop.charge.apply_async((1,), idempotency_key="req-7", **options)
    shop.charge.s(1).set(idempotency_key=("acme", 7)).delay()

    assert [h.get("idempotency_key") for h in shop.published()] == ["req-7", ["acme", "7"]]


class TestArguments:
    """``delay(42, idempotency_key="req-7")`` passes it to the task."""

    @pytest.mark.parametrize("name", ["charge", "send"])
    def test_a_key_among_the_arguments_is_rejected(self, shop: Shop, name: str) -> None:
        task = getattr(shop, name)
        calls: list[Callable[[], Any]] = [
            lambda: task.delay(42, idempotency_key="req-7"),
            lambda: task.apply((42,), {"idempotency_key": "req-7"}),
            lambda: task.s(42, idempotency_key="req-7").delay(),
        ]
        for call in calls:
            with pytest.raises(TypeError) as caught:
                call()
            assert str(caught.value) == (
                f"orders.{name}: idempotency_key was passed as an argument of the task, which has "
                "no such parameter: it is an option of the call, apply_async(args, kwargs, "
                "idempotency_key=…)"
            )
        with pytest.raises(TypeError, match=r"idempotency_result_ttl was passed as an argument"):
            task.delay(1, idempotency_result_ttl=600)
        assert shop.published() == []

    def test_a_parameter_of_that_name_is_an_ordinary_argument(self, shop: Shop) -> None:
        shop.forward.delay(42, idempotency_key="req-7")

        (headers,) = shop.published()
        assert "idempotency_key" not in headers

    def test_a_message_with_a_key_among_its_arguments_is_rejected(self, shop: Shop) -> None:
        rule = shop.send.idempotency_configuration.rule

        with pytest.raises(KeyRuleError, match="was passed as an argument of the task"):
            misplaced.check_message(rule, message(), {"idempotency_key": "req-7"})


class TestHeaders:
    @pytest.mark.parametrize("name", [*MISSPELT, "Idempotency-Key"])
    def test_a_misspelt_header_is_rejected(self, shop: Shop, name: str) -> None:
        expected = (
            f"orders.charge: the header {name!r} of the message is not read; did you mean "
            "'idempotency_key'?"
        )
        with pytest.raises(KeyRuleError) as caught:
            shop.charge.apply_async((1,), headers={name: "req-7"})
        assert str(caught.value) == expected
        assert shop.published() == []

        rule = shop.charge.idempotency_configuration.rule
        with pytest.raises(KeyRuleError) as caught:
            misplaced.check_message(rule, message({name: "req-7"}), {})
        assert str(caught.value) == expected

    @pytest.mark.parametrize(
        "name",
        [
            *("idempotency_key", "idempotency", "idempotency_replaced", "key", "x-death"),
            *("idempotency_id", "idempotency_token", "routing_key", "traceparent", "idem"),
            *("", "idempotency_key" * 100_000),
        ],
        ids=lambda name: name[:40],
    )
    def test_other_headers_are_accepted(self, shop: Shop, name: str) -> None:
        misplaced.check_headers("orders.charge", {name: "x"})


def test_a_disabled_task_lets_every_message_through(shop: Shop) -> None:
    def retry(self: Any, order: Any) -> Any:
        headers.append(self.request.headers)
        return self.request.retries or self.retry(countdown=0)

    headers: list[Any] = []
    task = task_in(shop.app, retry, name="orders.retry", bind=True, idempotency_enabled=False)
    task.push_request(
        id="an id", args=(1,), kwargs={}, called_directly=False, is_eager=True,
        headers={"idempotency_key": {}, "Idempotency-Key": "req-7", "other": 1},
        properties={"idempotency_key": "req-7"},
    )  # fmt: skip
    try:
        with pytest.raises(Retry) as caught:
            task(1)
    finally:
        task.pop_request()

    assert headers == [{"Idempotency-Key": "req-7", "other": 1}]
    assert caught.value.sig.apply(retries=1).get() == 1


class TestProperties:
    """``send_task(…, idempotency_key=…)``, which becomes a property of the message."""

    @pytest.mark.parametrize("name", ["idempotency_key", *MISSPELT])
    def test_a_message_with_a_key_in_properties_is_rejected(self, shop: Shop, name: str) -> None:
        rule = shop.charge.idempotency_configuration.rule

        with pytest.raises(KeyRuleError) as caught:
            misplaced.check_message(rule, message(**{name: "req-7", "app_id": "shop"}), {})

        assert str(caught.value) == (
            f"orders.charge: the publisher passed {name} as an option of send_task(), which is not "
            "read: pass headers={'idempotency_key': …}"
        )

    @pytest.mark.parametrize("name", ["idempotency_key", "idempotency_keyy"])
    def test_a_process_with_the_library_logs_an_error_and_marks_the_message(
        self, shop: Shop, caplog: pytest.LogCaptureFixture, name: str
    ) -> None:
        """Also where the broker drops the property."""
        with caplog.at_level(logging.ERROR):
            shop.app.send_task("orders.charge", (1,), **{name: "secret"})

        (logged,) = caplog.messages
        assert logged == (
            f"orders.charge is published with the option {name}, which is not read: an "
            "idempotent task refuses it (pass headers={'idempotency_key': …}), and a plain task "
            "runs unprotected (base=IdempotentTask)"
        )
        (headers,) = shop.published()
        rule = shop.charge.idempotency_configuration.rule
        marks = {name: headers[name] for name in headers if name.startswith("idempotency")}
        assert "secret" not in str(marks)
        with pytest.raises(KeyRuleError, match=f"the publisher passed {name} as an option of"):
            misplaced.check_message(rule, message(marks), {})

    def test_a_signature_by_name_of_an_unknown_task_is_marked(self, shop: Shop) -> None:
        sig = signature("elsewhere.charge", (1,), app=shop.app)
        sig.set(idempotency_key="req-7").delay()

        (headers,) = shop.published()
        assert headers[call_options.MISPLACED_HEADER] == "idempotency_key"


def test_the_retention_of_a_call_is_checked_before_anything_is_published(shop: Shop) -> None:
    for value in (0, "600", True, float("nan")):
        with pytest.raises(SettingsError, match=r"^orders\.charge: idempotency_result_ttl must"):
            shop.charge.apply_async((1,), idempotency_result_ttl=value)
        with pytest.raises(SettingsError, match=r"^orders\.charge: idempotency_result_ttl must"):
            shop.charge.s(1).set(idempotency_result_ttl=value).delay()

    assert shop.published() == []
    for value in (600, timedelta(minutes=10)):
        shop.charge.apply_async((1,), idempotency_result_ttl=value)
        shop.charge.s(1).set(idempotency_result_ttl=value).delay()
        for headers in shop.published():
            assert float(headers["idempotency_result_ttl"].partition(" ")[0]) == 600


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("idempotency_keyy", "did you mean 'idempotency_key'?"),
        ("idempotency_keys", "did you mean 'idempotency_key'?"),
        ("idempotency_result_tll", "did you mean 'idempotency_result_ttl'?"),
        ("idempotency_lease", "it is an option of tasks, set it on the task"),
    ],
)
def test_the_error_suggests_the_nearest_option(shop: Shop, name: str, hint: str) -> None:
    with pytest.raises(TypeError) as caught:
        shop.charge.apply_async((1,), **{name: 1})
    assert str(caught.value) == f"apply_async() takes no option {name!r}; {hint}"
    if hint.startswith("did"):
        with pytest.raises(KeyRuleError, match=rf"'{name}' .*; {re.escape(hint)}$"):
            misplaced.check_headers("orders.charge", {name: 1})
