"""A ``__call__`` of the task's class, which runs inside the execution."""

from __future__ import annotations

from typing import Any

import pytest

from celery_idempotent import ConflictError, IdempotentTask
from celery_idempotent.core.task.publish import put_back
from tests.flow.deliveries import Offer, begin_elsewhere, meta_of
from tests.servers.redis_server import RedisServer


class Stubborn(IdempotentTask):
    """Calls the body again if it fails."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception:
            return super().__call__(*args, **kwargs)


class Catching(IdempotentTask):
    """Turns every error of what it calls into a value."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            return {"error": repr(error)}


class Counting(Stubborn):
    """Counts its calls."""

    abstract = True
    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        type(self).calls += 1
        return ["counted", super().__call__(*args, **kwargs)]


def describe(self: Any, order: str) -> Any:
    return [order, self.request.id, self.idempotency.protected]


class TestBody:
    def test_that_is_called_again_is_in_the_same_execution(self, offer: Offer) -> None:
        runs = []

        def fails_once(self: Any, order: str) -> Any:
            runs.append([self.request.id, self.idempotency.token])
            return 1 / (len(runs) - 1)

        deliveries = offer(fails_once, base=Stubborn)
        message = deliveries.publish("order")

        assert deliveries.deliver(message).state == "success"
        assert runs == [[message.id, runs[0][1]]] * 2

    def test_that_calls_the_task_makes_a_plain_call_inside_it(self, offer: Offer) -> None:
        def call_itself(self: Any, order: str) -> Any:
            return [order, self(order[1:])] if order else "end"

        deliveries = offer(call_itself, base=Counting)
        message = deliveries.delivered("ab")

        nested = ["counted", ["ab", ["counted", ["b", ["counted", "end"]]]]]
        assert meta_of(deliveries, message.id)["result"] == nested

    def test_of_a_message_without_idempotency(self, offer: Offer) -> None:
        deliveries = offer(describe, base=Counting)
        message = deliveries.delivered("order", idempotency_key=False)

        result = meta_of(deliveries, message.id)["result"]
        assert result == ["counted", ["order", message.id, False]]

    def test_of_a_subclass_of_a_class_that_is_bound(self, offer: Offer) -> None:
        deliveries = offer(describe, base=Stubborn)
        bound = type(deliveries.task)

        class Subclass(bound):  # type: ignore[misc, valid-type]
            name = "fused.subclass"

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return ["subclass", super().__call__(*args, **kwargs)]

        deliveries.task = deliveries.app.register_task(Subclass())
        deliveries.app.register_task(deliveries.task)  # which binds it again
        message = deliveries.publish("order")

        assert deliveries.deliver(message).state == "success"
        result = meta_of(deliveries, message.id)["result"]
        assert result == ["subclass", ["order", message.id, True]]


class TestOwnCall:
    def test_of_a_duplicate_is_not_called(self, offer: Offer) -> None:
        deliveries = offer(describe, base=Counting)
        first, duplicate = deliveries.publish("order"), deliveries.publish("order")
        before = type(deliveries.task).calls

        for message in (first, duplicate):
            deliveries.deliver(message)

        results = [meta_of(deliveries, message.id)["result"] for message in (first, duplicate)]
        assert results == [["counted", ["order", first.id, True]]] * 2
        assert type(deliveries.task).calls == before + 1

    def test_of_an_eager_call_catches_no_conflict(self, server: RedisServer, offer: Offer) -> None:
        deliveries = offer(
            describe, base=Counting, options={"idempotency_on_conflict": "raise"},
            idempotency_redis_url=server.url,
        )  # fmt: skip
        begin_elsewhere(deliveries.task, "order")

        with pytest.raises(ConflictError):
            deliveries.task.apply(("order",)).get()

    def test_does_not_catch_that_the_task_has_replaced_itself(self, offer: Offer) -> None:
        def replace(self: Any, order: str) -> Any:
            if order == "old":
                self.replace(self.si("new"))
            return order

        deliveries = offer(replace, base=Catching)
        message = deliveries.publish("old")

        assert deliveries.deliver(message).state == "ignored"
        replacement = deliveries.next()
        deliveries.deliver(replacement)
        duplicate = deliveries.publish("old")
        deliveries.deliver(duplicate)
        assert meta_of(deliveries, duplicate.id)["result"] == "new"

    def test_does_not_catch_that_a_retry_is_not_published(
        self, offer: Offer, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(put_back, "REQUEUE_PAUSE", 0.01)

        class Unretryable(Catching):
            abstract = True

            def apply_async(self, *args: Any, **options: Any) -> Any:
                if options.get("retries"):
                    raise ConnectionResetError("the broker accepts no retries")
                return super().apply_async(*args, **options)

        def try_again(self: Any, order: str) -> Any:
            raise self.retry(countdown=0)

        deliveries = offer(try_again, base=Unretryable)
        message = deliveries.publish("order")

        assert deliveries.deliver(message).state == "requeued"
        assert deliveries.task.idempotency_record("order") is None

    def test_of_a_direct_call(self, offer: Offer) -> None:
        deliveries = offer(describe, base=Counting)

        assert deliveries.task("order") == ["counted", ["order", None, False]]
