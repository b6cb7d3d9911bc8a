"""Encryption keys: where they may come from, and what is rejected."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import ImproperlyConfigured

from celery_idempotent import IdempotentTask
from celery_idempotent.core.store import run_sync
from tests.unit.conftest import celery, error_of, task_in

KEY = "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IHNlY3I="

key_requests: list[None] = []


def keys() -> tuple[str, ...]:
    key_requests.append(None)
    return (KEY,)


def keys_of_an_unavailable_vault() -> tuple[str, ...]:
    raise OSError("secret vault is not available")


def executor_of(task: IdempotentTask) -> Any:
    return task.idempotency_configuration.executor


class TestEncryptionKeys:
    """Results are encrypted with them, and no error message shows them."""

    @pytest.mark.parametrize(
        "given",
        [(KEY,), [KEY.encode()], keys, f"{__name__}.keys", f"{__name__}:keys", f"{__name__}:GIVEN"],
        ids=["tuple", "list", "function", "dotted", "colon", "value"],
    )
    def test_may_be_given_in_several_ways(self, given: Any) -> None:
        for task in (
            task_in(celery(idempotency_encryption_keys=given)),
            task_in(celery(), idempotency_encryption_keys=given),
        ):
            codec, settings = executor_of(task).codec, task.idempotency_configuration.settings
            payload = run_sync(codec.encode_result("a card number", settings, key="k", token=1))
            assert payload.format == "!json"
            assert KEY not in repr(settings)

    def test_of_a_function_are_requested_at_first_use(self) -> None:
        key_requests.clear()
        task = task_in(celery(idempotency_encryption_keys=keys))
        assert key_requests == []

        assert executor_of(task) is executor_of(task)
        assert len(key_requests) == 1

    def test_of_several_tasks_may_differ(self) -> None:
        app = celery()
        executors = [
            executor_of(task_in(app, name=f"shop.{n}", idempotency_encryption_keys=given))
            for n, given in enumerate([None, (KEY,), [KEY], keys])
        ]

        assert executors[1] is executors[2]
        assert len(set(map(id, executors))) == 3

    @pytest.mark.parametrize(
        "given",
        [("secret",), (KEY, "secret"), [b"secret secret"], "secret", (), KEY],
        ids=["short", "second", "bytes", "no-path", "empty", "not-in-a-tuple"],
    )
    def test_that_are_invalid_are_rejected_at_once(self, given: Any) -> None:
        for message in (
            error_of(celery(idempotency_encryption_keys=given)),
            error_of(celery(), idempotency_encryption_keys=given),
        ):
            assert "idempotency_encryption_keys" in message
            assert KEY not in message

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (f"{__name__}.nothing", f"'{__name__}.nothing' raised"),
            ("no.such.module", "'no.such.module' raised ModuleNotFoundError"),
            (keys_of_an_unavailable_vault, "its function raised OSError instead of returning keys"),
            (lambda: KEY, "its function must return a tuple of Fernet keys, not str"),
            (lambda: None, "its function must return a tuple of Fernet keys, not NoneType"),
            (lambda: (), "is empty; set at least one key"),
            (lambda: ["secret"], "key 1 of 1 is not a Fernet key"),
        ],
        ids=["no-name", "no-module", "raises", "text", "none", "empty", "no-key"],
    )
    def test_that_are_unavailable_are_rejected_at_first_use(self, given: Any, message: str) -> None:
        task = task_in(celery(idempotency_encryption_keys=given))

        with pytest.raises(ImproperlyConfigured, match="idempotency_encryption_keys") as caught:
            executor_of(task)
        assert message in str(caught.value)
        assert "secret" not in str(caught.value)
        assert KEY not in str(caught.value)


GIVEN = [KEY]
