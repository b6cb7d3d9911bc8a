"""A Django project whose tasks of ``django.tasks`` run on Celery; for processes of their own."""

from __future__ import annotations

import importlib.util
import os
from typing import Any
from uuid import uuid4

import django
from celery import Celery, current_task
from celery.result import AsyncResult
from django.conf import settings

BACKEND, URL = os.environ["TASKS_BACKEND"], os.environ["TASKS_REDIS"]
#: Of the tasks' names in Celery.
PREFIX = "django_tasks:" if BACKEND == "django_tasks_fennel" else ""

settings.configure(
    INSTALLED_APPS=[BACKEND] if PREFIX else [],
    USE_TZ=True,
    TASKS={"default": {"BACKEND": f"{BACKEND}.CeleryBackend"}},
    CELERY_BROKER_URL=URL,
    CELERY_RESULT_BACKEND=URL,
    CELERY_TASK_DEFAULT_QUEUE="default",
    CELERY_TASK_ANNOTATIONS={f"{PREFIX}{__name__}.charge": {"idempotency_key": "order:{order_id}"}},
)
app = Celery("project", task_cls="celery_idempotent:IdempotentTask")
app.config_from_object("django.conf:settings", namespace="CELERY")
django.setup()

task: Any
if importlib.util.find_spec("django.tasks"):
    from django.tasks import task
else:
    from django_tasks import task


@task
def charge(order_id: int, amount: int, note: str = "") -> list[Any]:
    return [order_id, amount, current_task.idempotency.token]


@task(takes_context=True)
def mail(context: Any, to: str, text: str = "") -> list[Any]:
    return [to, text, context.task_result.id]


@task
async def count(n: int) -> list[Any]:
    return [n, uuid4().hex]


def parameters_of_tasks_that_enqueue(other: Any) -> list[str]:
    """Returns the parameters of tasks of Celery's own that refer to one of Django's."""

    @app.task(name="enqueue", shared=False)
    def enqueue(customer: str) -> str:
        return str(other.enqueue(1).id)

    @app.task(name="enqueue_all", shared=False)
    def enqueue_all() -> str:
        return str(other.enqueue(1).id)

    tasks = enqueue, enqueue_all
    return [n for task in tasks for n in task.idempotency_configuration.rule.signature.parameters]


assert parameters_of_tasks_that_enqueue(count) == ["customer"]


def publish() -> None:
    """Publishes calls, and prints what each has returned or raised."""
    calls = [
        *(charge.enqueue(1, 5), charge.enqueue(1, amount=5)),
        *(charge.enqueue(amount=5, order_id=1, note=""), charge.enqueue(1, 6)),
        *(charge.enqueue(2, 5), mail.enqueue("a", "b"), mail.enqueue(to="a", text="b")),
        *(count.enqueue(3), count.enqueue(n=3)),
    ]
    for call in calls:
        print(repr(AsyncResult(call.id, app=app).get(timeout=30, propagate=False)))
