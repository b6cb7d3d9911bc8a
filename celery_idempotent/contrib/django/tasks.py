"""The idempotent tasks of the Celery app in a process of Django."""

from __future__ import annotations

import inspect
from typing import Any

from celery.app import app_or_default

from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike

#: The current app of the thread that has set up Django. Celery's is one of each thread: in others,
#: it is an app without configuration.
_project_app: Any = None


def remember_app() -> None:
    """Makes the current app of this thread that of all threads without one."""
    global _project_app
    _project_app = app_or_default()


def _current_app() -> Any:
    app = app_or_default()
    return app if app.set_as_current or _project_app is None else _project_app


def idempotent_tasks() -> list[IdempotentTaskLike]:
    """Returns the tasks of the current app; the first call in a process loads their modules.

    Raises:
        ConfigurationError: for the first option that is refused.
    """
    return app_tasks.load(_current_app())


def is_loading() -> bool:
    """Whether Celery is loading the modules of tasks.

    It runs all system checks then, in workers and commands, which report their errors themselves.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "celery.fixups.django":
            return True
        frame = frame.f_back
    return False
