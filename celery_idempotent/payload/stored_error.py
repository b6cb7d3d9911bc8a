"""Errors as records hold them: their type, module and arguments, as Celery's backends encode them.

A client that can write to Redis must not be able to choose what is executed, or to stop a worker.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from billiard.exceptions import Terminated
from celery.exceptions import TaskPredicate
from celery.utils.serialization import ensure_serializable
from kombu.utils.json import dumps

#: Exceptions by which code controls Celery or its pool. A MemoryError ends a worker of prefork; a
#: WorkerLostError is stored for copies of a lost message, and Celery requeues one for it only once.
_CONTROL_FLOW = (TaskPredicate, Terminated, MemoryError)


def is_storable(cls: object) -> bool:
    """Whether `cls` is a class of errors that a body ends with, and that nothing acts upon."""
    if not (isinstance(cls, type) and issubclass(cls, Exception)):
        return False
    return not issubclass(cls, _CONTROL_FLOW)


def error_as_json(error: BaseException) -> dict[str, Any]:
    """Returns type, module and arguments; arguments that are not JSON become their repr."""
    cls = type(error)
    return {
        "exc_type": cls.__qualname__,
        "exc_message": ensure_serializable(error.args, dumps),
        "exc_module": cls.__module__,
    }


def class_of(prepared: Mapping[str, Any]) -> type[Exception] | None:
    """Returns the class of a stored error; None if this process has not loaded it.

    Imports no module, and executes no code of one.

    Raises:
        KeyError, TypeError: if `prepared` is no stored error, or its class is not storable.
    """
    module, name, arguments = (
        prepared[field] for field in ("exc_module", "exc_type", "exc_message")
    )
    if not (isinstance(module, str) and isinstance(name, str) and isinstance(arguments, list)):
        raise TypeError("not a stored error")
    found: Any = sys.modules.get(module)
    for attribute in name.split("."):
        # Not getattr: a module may import others for it.
        found = vars(found).get(attribute) if isinstance(found, (ModuleType, type)) else None
    if found is None:
        return None
    if not is_storable(found):
        raise TypeError(f"{module}.{name} is not an error that is stored")
    cls: type[Exception] = found
    return cls


def set_arguments(error: BaseException, arguments: Sequence[Any]) -> None:
    """Gives a restored `error` the arguments that it was stored with.

    A constructor may build a message from its arguments: called again with that message, it would
    build a longer one each time the error is stored and restored.
    """
    BaseException.__init__(error, *arguments)
