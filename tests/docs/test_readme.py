"""The modes that pages list are options of a task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import TASK_ID, IdempotentTask
from celery_idempotent.settings import PREFIX
from tests.docs.pages import README, ROOT, prose, section


@pytest.mark.parametrize(
    ("page", "title", "number", "others"),
    [
        (README, "Choosing a mode", 4, {}),
        (ROOT / "docs/modes.md", "One at a time", 3, {"idempotency_until": "finished"}),
    ],
)
def test_modes_are_options(page: Path, title: str, number: int, others: dict[str, Any]) -> None:
    modes = re.findall(r"^\| .* \| `(idempotency_[^`]+)`", section(prose(page), title), re.M)
    assert len(modes) == number
    for mode in modes:
        app = Celery("shop", backend="redis://", set_as_current=False)
        options = others | eval(f"dict({mode})", {"TASK_ID": TASK_ID})

        def task(order_id: int) -> None: ...

        made = app.task(task, base=IdempotentTask, shared=False, name="shop.task", **options)
        chosen = made.idempotency_configuration.settings
        assert {name: getattr(chosen, name.removeprefix(PREFIX)) for name in options} == options
