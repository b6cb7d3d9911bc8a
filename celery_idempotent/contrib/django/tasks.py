"""The idempotent tasks of the Celery app in a Django process."""

from __future__ import annotations

import inspect
from typing import Any

from celery.app import app_or_default

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike

#: The current app of the thread that set up Django. Celery's current app is per thread; in other
#: threads, it has no configuration.
_project_app: Any = None


def remember_app() -> None:
    """Makes this thread's current app the app of all threads without one."""
    global _project_app
    _project_app = app_or_default()


def current_app() -> Any:
    """Returns this thread's current app, or the project's if the thread has none."""
    app = app_or_default()
    return app if app.set_as_current or _project_app is None else _project_app


def idempotent_tasks() -> list[IdempotentTaskLike]:
    """Returns the current app's tasks; the first call in a process loads their modules.

    Raises:
        ConfigurationError: for the first invalid option.
    """
    return app_tasks.load(current_app())


def is_loading() -> bool:
    """Returns whether Celery is loading the task modules.

    It then runs all system checks in workers and commands, which report errors themselves.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "celery.fixups.django":
            return True
        frame = frame.f_back
    return False
