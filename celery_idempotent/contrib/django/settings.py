"""The setting IDEMPOTENCY_MIDDLEWARE of Django projects."""

from __future__ import annotations

from inspect import signature
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from celery_idempotent.contrib.http.middleware import MAX_BODY_BYTES, BaseMiddleware
from celery_idempotent.printable import did_you_mean

SETTING = "IDEMPOTENCY_MIDDLEWARE"

#: Each option with the middleware argument that it sets.
OPTIONS = {
    "ENGINE" if name == "idem" else name.upper(): name
    for name in signature(BaseMiddleware).parameters
    if name != "app"
}
#: Options that may be dotted paths of objects.
_PATHS = ("ENGINE", "IDENTITY", "REQUIRED", "STORE_RESPONSE", "AUTHORIZE_REPLAY")


def middleware_options(**changes: Any) -> dict[str, Any]:
    """Returns the arguments of the middleware.

    Args:
        changes: options of one view.

    Raises:
        ImproperlyConfigured: for the first invalid option, in one line.
    """
    options = getattr(settings, SETTING, None)
    if changes:
        options = {**(options or {}), **changes}
    if not isinstance(options, dict) or "ENGINE" not in options:
        raise ImproperlyConfigured(
            f"{SETTING} must be a dictionary whose ENGINE is an Idempotency or the path of one, "
            'such as {"ENGINE": "shop.celery.idem"}'
        )
    for name in options:
        if name not in OPTIONS:
            hint = did_you_mean(str(name), OPTIONS) or f"; it has {', '.join(OPTIONS)}"
            raise ImproperlyConfigured(f"{SETTING} has no option {name!r}{hint}")
    arguments = {OPTIONS[name]: _imported(name, value) for name, value in options.items()}
    readable = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    if readable is not None:
        limit = arguments.setdefault("max_body_bytes", min(MAX_BODY_BYTES, readable))
        if isinstance(limit, int) and limit > readable:
            raise ImproperlyConfigured(
                f"{SETTING}['MAX_BODY_BYTES'] is more than Django reads: raise "
                f"DATA_UPLOAD_MAX_MEMORY_SIZE (now {readable}), too"
            )
    return arguments


def _imported(name: str, value: Any) -> Any:
    if name not in _PATHS or not isinstance(value, str):
        return value
    try:
        return import_string(value)
    except ImportError as error:
        raise ImproperlyConfigured(f"{SETTING}[{name!r}] cannot be imported: {error}") from error
