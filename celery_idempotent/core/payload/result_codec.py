"""Prepares and restores results and errors as the app's result backend does.

Records hold the type, module and arguments of an error, as Celery's backends encode it. A client
that can write to Redis must not be able to choose what is executed, or to stop a worker.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import celery.exceptions
from billiard.exceptions import Terminated
from celery import Celery
from celery.exceptions import TaskPredicate
from celery.utils.serialization import (
    create_exception_cls,
    ensure_serializable,
    get_pickleable_exception,
)
from kombu.utils.json import dumps

#: Exceptions that control Celery or its pool, so a replay must not raise them: a MemoryError ends a
#: prefork worker. WorkerLostError is not among them: Celery requeues a lost message only once, and
#: other copies of it get that error.
_CONTROL_FLOW = (TaskPredicate, Terminated, MemoryError)


def is_storable(cls: object) -> bool:
    """Whether `cls` is a class of ordinary errors, which do not control Celery or its pool."""
    if not (isinstance(cls, type) and issubclass(cls, Exception)):
        return False
    return not issubclass(cls, _CONTROL_FLOW)


def class_of(prepared: Mapping[str, Any]) -> type[Exception] | None:
    """Returns the class of a stored error; None if this process has not loaded it.

    Neither imports a module nor executes its code.

    Raises:
        KeyError, TypeError: if `prepared` is not a stored error, or its class not storable.
    """
    module, name, arguments = (
        prepared[field] for field in ("exc_module", "exc_type", "exc_message")
    )
    if not (isinstance(module, str) and isinstance(name, str) and isinstance(arguments, list)):
        raise TypeError("not a stored error")
    found: Any = sys.modules.get(module)
    for attribute in name.split("."):
        # Not getattr: the ``__getattr__`` of a module may import others.
        found = vars(found).get(attribute) if isinstance(found, (ModuleType, type)) else None
    if found is None:
        return None
    if not is_storable(found):
        raise TypeError(f"{module}.{name} is not an error that is stored")
    cls: type[Exception] = found
    return cls


class ResultCodec:
    """Encodes as the result backend does, so that a replay equals what the first caller got.

    Args:
        app: has the result backend; without an app, values are unchanged, and errors are encoded
            as in Celery's backends.
    """

    def __init__(self, app: Celery | None = None) -> None:
        self.app = app

    def prepare_error(self, error: BaseException) -> dict[str, Any]:
        """Returns type, module and arguments; non-JSON arguments become their repr.

        Celery's tracer replaces unpicklable exceptions before any backend gets them.
        """
        if self.app:
            error = get_pickleable_exception(error)
        # The backend's own method would encode the arguments for its serializer, which may not be
        # JSON.
        return {
            "exc_type": type(error).__qualname__,
            "exc_message": ensure_serializable(error.args, dumps),
            "exc_module": type(error).__module__,
        }

    def restore_error(self, prepared: dict[str, Any]) -> BaseException:
        """Returns the exception that ``AsyncResult.get()`` would raise, with its arguments.

        If this process has not loaded its class, a class of the same name is created.

        Raises:
            Exception: any, if `prepared` is not a stored error.
        """
        name, arguments = prepared["exc_type"], prepared["exc_message"]
        cls = class_of(prepared)
        error: BaseException
        if self.app and cls:
            error = self.app.backend.exception_to_python(prepared)
            if type(error).__qualname__ != name:
                return error
        else:
            module = celery.exceptions.__name__ if self.app else prepared["exc_module"]
            cls = cls or create_exception_cls(name, module)
            try:
                error = cls(*arguments)
            except Exception:
                # The constructor of the class takes other arguments than those in ``args``.
                error = cls.__new__(cls)
        # A constructor may build a message from its arguments. Called with that message, it would
        # build a longer one each time that the error is stored and restored.
        BaseException.__init__(error, *arguments)
        return error
