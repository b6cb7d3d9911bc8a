"""The key of a call in a canvas of a task that has replaced itself."""

from __future__ import annotations

import pytest
from celery.app.task import Context

from celery_idempotent.core.task.message.canvas import REPLACED_HEADER
from celery_idempotent.core.task.message.continuation import generation_of
from celery_idempotent.core.task.message.key_resolution import resolve_key
from tests.unit.conftest import celery, task_in

ID = "8416e7e8-c045-46d0-9617-5bdf6316b681"


@pytest.mark.parametrize(("successor", "is_part"), [(ID, False), ("another.id", True)])
def test_in_a_replacement_only_the_successor_has_the_key(successor: str, is_part: bool) -> None:
    task = task_in(celery(), idempotency_key="order:{order_id}")
    key = task.idempotency_key_of(1)
    headers = {REPLACED_HEADER: {str(key): f"{key.fingerprint.hex()}.{successor}"}}
    request = Context(id=ID, headers=headers, replaced_task_nesting=1)

    configuration = task.idempotency_configuration
    resolved, _ = resolve_key(configuration, ID, headers, (1,), {}, request=request)

    assert resolved == (key.part(ID) if is_part else key)
    assert generation_of(request) == 10**9
