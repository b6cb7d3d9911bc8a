"""System checks for ``manage.py check``; database checks run with ``--database <alias>``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from celery.app import app_or_default
from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from celery_idempotent import sql
from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.core.configuration.configuration import ConfigurationError
from celery_idempotent.errors import SettingsError, StoreUnavailableError

TAG = "celery_idempotent"

_PACKAGE = "celery_idempotent.contrib.django"
_MIDDLEWARE = f"{_PACKAGE}.middleware.IdempotencyMiddleware"
#: Middleware that ours must follow.
_AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"


def register() -> None:
    """Registers the checks."""
    checks.register(check_tasks, TAG)
    checks.register(check_middleware, TAG)


def check_tasks(*, databases: Sequence[str] | None = None, **_: Any) -> Iterator[CheckMessage]:
    """Reports options without effect, invalid ones, databases, ATOMIC_REQUESTS, missing tables.

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
        alias = database.source
        if engine.name == alias and connections[alias].settings_dict["ATOMIC_REQUESTS"]:
            text = (
                f"The database {alias!r} of idempotency_transaction has ATOMIC_REQUESTS: a view "
                "that makes a protected call itself, such as apply(), gets TransactionError."
            )
            hint = (
                "Publish with delay_on_commit, or decorate the view with "
                f"transaction.non_atomic_requests(using={alias!r})."
            )
            yield checks.Warning(text, hint=hint, id=f"{TAG}.W002")
        try:
            if alias in (databases or ()):
                database.check()
        except (SettingsError, StoreUnavailableError) as error:
            hint = f"Run: {engine.create_command}"
            yield checks.Warning(str(error), hint=hint, id=f"{TAG}.W001")


def check_middleware(**_: Any) -> Iterator[CheckMessage]:
    """Reports what the middleware refuses, and that it has no user."""
    from celery_idempotent.contrib.django.middleware import SETTING, IdempotencyMiddleware

    names = list(settings.MIDDLEWARE)
    if _MIDDLEWARE not in names:
        return
    try:
        IdempotencyMiddleware(lambda request: None)
    except ImproperlyConfigured as error:
        hint = f"Correct the setting {SETTING}: see the documentation of the middleware."
        yield Error(str(error), hint=hint, id=f"{TAG}.E003")
    options = getattr(settings, SETTING, None)
    by_user = not isinstance(options, dict) or "IDENTITY" not in options
    above = names[: names.index(_MIDDLEWARE)]
    if by_user and _AUTHENTICATION not in above:
        text = (
            "IdempotencyMiddleware needs request.user, and is not below AuthenticationMiddleware."
        )
        hint = f"Put {_MIDDLEWARE} below {_AUTHENTICATION} in MIDDLEWARE."
        yield Error(text, hint=f"{hint} Or set {SETTING}['IDENTITY'].", id=f"{TAG}.E004")


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
