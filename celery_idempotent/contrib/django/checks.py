"""System checks for ``manage.py check``; database checks run with ``--database <alias>``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from celery.app import app_or_default
from django.core import checks
from django.core.checks import CheckMessage, Error

from celery_idempotent import sql
from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.core.configuration.configuration import ConfigurationError
from celery_idempotent.errors import SettingsError, StoreUnavailableError

TAG = "celery_idempotent"


def register() -> None:
    """Registers the check."""
    checks.register(check_tasks, TAG)


def check_tasks(*, databases: Sequence[str] | None = None, **_: Any) -> Iterator[CheckMessage]:
    """Reports options without effect, invalid ones, databases and missing tables.

    Args:
        databases: the aliases to connect to. A missing table is a warning, because ``manage.py
            migrate`` runs the checks before it creates the table.
    """
    if is_loading():
        return
    try:
        named = sorted(sql.databases(idempotent_tasks()), key=str)
    except ConfigurationError as error:
        hint = "The worker also refuses it. Correct the task or the setting CELERY_…."
        yield Error(str(error), hint=hint, id=f"{TAG}.E001")
        return
    for name, problem in app_tasks.plain_with_options(current_app()):
        text = f"{name} is a plain task, and every duplicate runs: {problem}."
        yield Error(text, hint=f"Set {app_tasks.ADD_BASE}.", id=f"{TAG}.E005")
    for database in named:
        try:
            engine = database.engine
        except SettingsError as error:
            hint = "Name an alias of DATABASES, or the path of a SQLAlchemy engine."
            yield Error(str(error), hint=hint, id=f"{TAG}.E002")
            continue
        try:
            if database.source in (databases or ()):
                database.check()
        except (SettingsError, StoreUnavailableError) as error:
            hint = f"Run: {engine.create_command}"
            yield checks.Warning(str(error), hint=hint, id=f"{TAG}.W001")


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
