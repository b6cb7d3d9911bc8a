"""The key of a call, resolved from its message."""

from __future__ import annotations

from typing import Any

import pytest
from celery.app.task import Context

from celery_idempotent import IdempotentTask
from celery_idempotent.core.key import Key
from celery_idempotent.core.task.message.canvas import REPLACED_HEADER
from celery_idempotent.core.task.message.continuation import generation_of
from celery_idempotent.core.task.message.key_resolution import resolve_key
from celery_idempotent.core.task.message.message_headers import MessageHeaders
from celery_idempotent.core.task.publish import put_back
from tests.unit.conftest import celery, task_in

KEY = Key("shop.charge", "PN0MlSPt3FmEwTzQ5dHvBQ", b"8 bytes!")
ID = "8416e7e8-c045-46d0-9617-5bdf6316b681"


def key_of(
    task: IdempotentTask, *args: Any, headers: dict[str, Any] | None = None, **options: Any
) -> Key | None:
    key, _ = resolve_key(task.idempotency_configuration, ID, headers, args, {}, **options)
    return key


def test_without_headers_the_rule_derives_the_key() -> None:
    task = task_in(celery(), idempotency_key="order:{order_id}")

    assert key_of(task, 1) == task.idempotency_key_of(1)
    assert key_of(task, 1) != key_of(task, 2)


def test_the_key_in_the_message_wins_over_the_rule() -> None:
    headers = put_back.with_derived_key(None, KEY, ID, put_back_count=3)

    key, parsed = resolve_key(task_in(celery()).idempotency_configuration, ID, headers, (1,), {})

    assert key == KEY
    assert parsed.put_back_count == 3


def test_an_explicit_key_wins_over_the_rule() -> None:
    headers = MessageHeaders("req-7").write("shop.charge", ID)
    task = task_in(celery(), idempotency_key="order:{order_id}")

    key = key_of(task, 1, headers=headers)

    assert key.digest == task.idempotency_key_of(idempotency_key="req-7").digest


def test_the_key_of_another_message_is_ignored() -> None:
    headers = put_back.with_derived_key(None, KEY, "another id")

    assert key_of(task_in(celery()), 1, headers=headers) == key_of(task_in(celery()), 1)


@pytest.mark.parametrize("headers", [None, put_back.with_derived_key(None, KEY, ID)])
def test_a_disabled_task_has_no_key(headers: dict[str, Any] | None) -> None:
    assert key_of(task_in(celery(), idempotency_enabled=False), 1, headers=headers) is None


def test_an_unprotected_call_has_no_key() -> None:
    headers = MessageHeaders(explicit_key=False).write("shop.charge", ID)

    key, parsed = resolve_key(task_in(celery()).idempotency_configuration, ID, headers, (1,), {})

    assert key is None
    assert parsed.explicit_key is False


@pytest.mark.parametrize(("successor_id", "is_part"), [(ID, False), ("another.id", True)])
def test_in_a_replacement_only_the_successor_continues_under_the_key(
    successor_id: str, is_part: bool
) -> None:
    task = task_in(celery(), idempotency_key="order:{order_id}")
    key = task.idempotency_key_of(1)
    headers = {REPLACED_HEADER: {str(key): f"{key.fingerprint.hex()}.{successor_id}"}}
    request = Context(id=ID, headers=headers, replaced_task_nesting=1)

    resolved = key_of(task, 1, headers=headers, request=request)

    assert resolved is not None
    assert resolved == (key.part(ID) if is_part else key)
    assert generation_of(request) == 10**9
