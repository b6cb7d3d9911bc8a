"""Options read from a real Celery app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task
from celery.exceptions import Ignore, ImproperlyConfigured, Reject, Retry
from kombu import serialization

from celery_idempotent import TASK_ID, IdempotentTask
from celery_idempotent.settings import Settings
from tests.unit.conftest import celery, charge, error_of, settings_of, task_in


async def coroutine(order_id: Any) -> None: ...


def generator(order_id: Any) -> Iterator[Any]:
    yield order_id


async def async_generator(order_id: Any) -> AsyncIterator[Any]:
    yield order_id


def django(namespace: str | None = "CELERY", **settings: Any) -> Celery:
    """Returns an app that reads its settings from those of a Django project."""
    app = Celery("shop", set_as_current=False)
    app.config_from_object(SimpleNamespace(**settings), namespace=namespace)
    return app


class TestSourcesOfOptions:
    def test_defaults(self) -> None:
        assert settings_of(celery()) == Settings(serializer="json")

    def test_django_settings(self) -> None:
        options = {"CELERY_IDEMPOTENCY_LEASE": 7, "CELERY_IDEMPOTENCY_ON_CONFLICT": "raise"}
        others = {"CELERY_TASK_SERIALIZER": "json", "SECRET_KEY": "secret", "INSTALLED_APPS": []}

        settings = settings_of(django(**options, **others))

        assert (settings.lease, settings.on_conflict) == (7, "raise")

    def test_attributes_that_are_not_none_override_settings(self) -> None:
        given = {"lease": 7, "store_result": True, "result_ttl": 9, "transaction": "default"}
        app = celery(**{f"idempotency_{name}": given[name] for name in given})
        given |= {"lease": 8, "store_result": False, "redis_timeout": 1, "result_ttl": None}
        given["transaction"] = False

        used = settings_of(app, **{f"idempotency_{name}": given[name] for name in given})

        found = used.lease, used.store_result, used.redis_timeout, used.result_ttl
        assert found == (8, False, 1, 9)
        assert used.extensions == ()

    def test_a_custom_base_class(self) -> None:
        class Careful(IdempotentTask):
            abstract = True
            idempotency_lease = 8
            idempotency_key = TASK_ID

        settings = settings_of(celery(idempotency_lease=7), base=Careful)

        assert (settings.lease, settings.key) == (8, TASK_ID)

    def test_a_duplicate_message_waits_in_no_process(self) -> None:
        error = error_of(celery(), idempotency_wait_timeout=1)
        assert error.startswith("shop.charge: idempotency_wait_timeout applies outside tasks only")


class TestInvalidOptions:
    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"debounce": 5}, "set idempotency_until = 'started'"),
            ({"debounce": 5, "until": "finished"}, "set idempotency_until = 'started'"),
            (
                {"debounce": 5, "until": "started", "dedupe_publish": "raise"},
                "leave idempotency_dedupe_publish on",
            ),
            ({"debounce_max_wait": 5, "until": "started"}, "set both"),
            ({"debounce": 5, "debounce_max_wait": 4, "until": "started"}, "(4 s) is shorter"),
            ({"on_conflict": "replace"}, "set idempotency_until to 'finished' or 'started'"),
            (
                {"on_conflict": "replace", "until": "finished", "dedupe_publish": True},
                "from being published: remove it",
            ),
            (
                {"on_conflict": "replace", "until": "finished", "transaction": "default"},
                "cannot end a call with idempotency_transaction",
            ),
            ({"lease": "60"}, "shop.charge: idempotency_lease must be seconds or a timedelta"),
            ({"replay_errors": (OSError, Retry)}, "has no effect on Retry; remove it"),
            ({"replay_errors": [type("Skip", (Ignore,), {})]}, "has no effect on Skip; remove it"),
            ({"replay_errors": (Reject,)}, "replay_errors has no effect on Reject; remove it"),
            ({"max_attempts": 0}, "shop.charge: idempotency_max_attempts must be a whole number"),
            ({"redis_url": "http://:secret@x"}, "idempotency_redis_url has the scheme 'http'; it"),
            ({"serializer": "jason"}, "idempotency_serializer: kombu has no serializer 'jason'"),
            ({"compression": "zip"}, "must be gzip, bzip2, lzma or zstd, and installed, not 'zip'"),
            ({"serializer": "pickle"}, "not in result_accept_content (or accept_content): add it"),
        ],
    )
    def test_of_an_app_or_a_task(self, options: dict[str, Any], error: str) -> None:
        named = {f"idempotency_{name}": value for name, value in options.items()}
        assert error in error_of(celery(**named))
        assert error in error_of(celery(), **named)

    def test_with_a_misspelt_prefix(self) -> None:
        expected = "there is no option idempotent_key; did you mean idempotency_key?"

        assert error_of(celery(), idempotent_key="order:{order_id}") == f"shop.charge: {expected}"
        assert error_of(celery(idempotent_key=5)) == f"the Celery configuration: {expected}"

    @pytest.mark.parametrize(
        "options", [{"key": "order:{order_id}"}, {"until": "started"}, {"lease": 5}, {"label": "a"}]
    )
    def test_the_spelling_of_functions(self, options: dict[str, Any]) -> None:
        (name,) = options
        why = "has no effect on a task, whose option is"
        expected = f"shop.charge: {name} {why} idempotency_{name}"

        assert error_of(celery(), **options).startswith(expected)
        annotated = celery(task_annotations={"shop.charge": options})
        assert error_of(annotated).startswith(expected)
        if name != "label":
            base = type("Orders", (IdempotentTask,), {"abstract": True, **options})
            assert error_of(celery(), base=base).startswith(expected)

    def test_attributes_of_the_user_and_of_celery_are_no_options(self) -> None:
        class Mine:
            key = lease = None

        class Named(Mine, IdempotentTask):
            abstract = True
            label, redis_client = "orders", object()

            def until(self) -> None: ...

        options = {"key": "a", "label": "b", "serializer": "json", "compression": "gzip"}
        task = task_in(celery(), base=Named, **options)

        assert (task.key, task.label) == ("a", "b")

    @pytest.mark.parametrize(
        ("setting", "namespace", "expected"),
        [
            ("CELERY_IDEMPOTENCY_LEESE", "CELERY", "idempotency_leese; did you mean idempotency_l"),
            ("CELERY_IDEMPOTENT_LEASE", "CELERY", "idempotent_lease; did you mean idempotency_le"),
            ("CELERY_IDEMPOTENCY_LEASE", None, "its name here is idempotency_lease"),
            ("IDEMPOTENCY_LEASE", None, "IDEMPOTENCY_LEASE has no effect; its name here is idem"),
            ("IDEMPOTENCY_LEASE", "CELERY", "its name here is CELERY_IDEMPOTENCY_LEASE"),
        ],
    )
    def test_a_django_setting(self, setting: str, namespace: str | None, expected: str) -> None:
        assert expected in error_of(django(namespace, **{setting: 7}))

    def test_a_django_setting_of_another_library_is_accepted(self) -> None:
        others = {"HEADER_NAME": "Idempotency-Key", "KEY": {}, "REDIS_URL": "redis://"}
        settings = {f"IDEMPOTENCY_{name}": value for name, value in others.items()}

        assert settings_of(django(**settings, CELERY_IDEMPOTENCY_LEASE=7)).lease == 7

    def test_a_template_with_self(self) -> None:
        def bound(self: Any, order_id: Any) -> None: ...

        with pytest.raises(ImproperlyConfigured, match=r"names 'self'.*takes: order_id\)"):
            task_in(celery(), bound, bind=True, idempotency_key="{self.name}")

    @pytest.mark.parametrize("compression", ["gzip", "zlib", "bzip2", "application/x-gzip"])
    def test_every_name_of_a_compression_is_accepted(self, compression: str) -> None:
        settings = settings_of(celery(idempotency_compression=compression))

        assert settings.compression == compression

    def test_a_serializer_whose_package_is_missing(self) -> None:
        def not_installed(*_: Any) -> None:
            raise ImportError("no module named broken")

        serialization.register("broken", not_installed, not_installed, "application/x-broken")
        try:
            message = error_of(celery(), idempotency_serializer="broken")
        finally:
            serialization.unregister("broken")
        assert "idempotency_serializer 'broken' cannot be used here" in message
        assert "no module named broken" in message

    def test_an_offload_backend_that_cannot_be_used(self) -> None:
        for url in ("rpc://:secret@a", "nonesuch://:secret@a", "secret", "redis://:secret#1@a"):
            message = error_of(celery(), idempotency_offload_backend=url)
            assert "idempotency_offload_backend" in message
            assert "secret" not in message

    @pytest.mark.parametrize("body", [coroutine, generator, async_generator])
    def test_a_body_that_returns_before_it_has_run(self, body: Callable[..., Any]) -> None:
        assert error_of(celery(), function=body).startswith("shop.charge is a")

        settings_of(celery(idempotency_enabled=False), function=body)

    @pytest.mark.parametrize("first", [True, False])
    def test_a_class_whose_messages_may_not_reach_the_task(self, first: bool) -> None:
        class Batches(Task):
            abstract = True

            def Strategy(self, task: Any, app: Any, consumer: Any) -> Any: ...  # noqa: N802

        bases = (Batches, IdempotentTask) if first else (IdempotentTask, Batches)
        base: Any = type("Base", bases, {"abstract": True})

        assert error_of(celery(), base=base).startswith("shop.charge: Batches has a Strategy of")
        settings_of(celery(idempotency_enabled=False), base=base)

    def test_are_rejected_when_the_app_is_finalised(self) -> None:
        app = celery(idempotency_lease=-1)
        app.task(charge, base=IdempotentTask, name="shop.charge", shared=False)

        with pytest.raises(ImproperlyConfigured, match="idempotency_lease"):
            app.finalize()


class TestSerializer:
    def test_is_the_result_serializer_of_the_app_by_default(self) -> None:
        pickling = {"result_serializer": "pickle", "accept_content": ["pickle"]}

        assert settings_of(celery(**pickling)).serializer == "pickle"
        with pytest.raises(ImproperlyConfigured, match="'json' writes a content type"):
            settings_of(celery(**pickling), idempotency_serializer="json")

    def test_has_to_be_in_result_accept_content(self) -> None:
        app = celery(result_accept_content=["json", "pickle"], accept_content=["json"])

        assert settings_of(app, idempotency_serializer="pickle").serializer == "pickle"


def test_the_task_survives_crashes_by_default() -> None:
    task = task_in(celery())
    plain = task_in(celery(), acks_late=False)

    assert task.acks_late
    assert task.reject_on_worker_lost
    assert not plain.acks_late


class TestShadow:
    def test_its_records_meet_no_others_and_hold_no_values(self) -> None:
        app = celery(idempotency_shadow=True, idempotency_wait_replicas=1)
        settings = settings_of(app)

        assert settings.key_prefix == "idem-shadow"
        assert not settings.store_result
        assert (settings.wait_replicas, settings.redis_timeout) == (0, 0.5)

    def test_is_off_where_nothing_is_protected(self) -> None:
        app = celery(idempotency_shadow=True, idempotency_enabled=False)

        assert settings_of(app).key_prefix == "idem"

    def test_cannot_be_used_with_a_transaction(self) -> None:
        message = error_of(celery(idempotency_shadow=True, idempotency_transaction="default"))

        assert "set idempotency_shadow = False on this task" in message
