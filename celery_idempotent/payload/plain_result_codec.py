"""Prepares and restores results and errors where there is no result backend."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from celery.utils.serialization import create_exception_cls, ensure_serializable
from kombu.utils.json import dumps

from celery_idempotent.errors import NotReadyError


class PlainResultCodec:
    """Leaves values unchanged; encodes errors as Celery's backends do."""

    def prepare_value(self, value: Any, serializer: str) -> Any:
        """Returns `value`."""
        return value

    def prepare_error(self, error: BaseException) -> dict[str, Any]:
        """Returns type, module and arguments; arguments that are not JSON become their repr."""
        return error_as_json(error)

    def result_of(self, task_id: str, seconds: float) -> Any:
        """Raises NotReadyError: only tasks are replaced, and their apps have a backend."""
        raise NotReadyError(task_id)

    def restore_error(self, prepared: dict[str, Any]) -> BaseException:
        """Returns the exception, or one of the same name if its class is not loaded.

        Imports no module, and calls only exception classes: a client that can write to Redis must
        not be able to choose what is executed.
        """
        module, name = prepared["exc_module"], prepared["exc_type"]
        try:
            cls: Any = sys.modules[module]
            for attribute in name.split("."):
                cls = getattr(cls, attribute)
        except (KeyError, AttributeError):
            cls = create_exception_cls(name, module)
        if not (isinstance(cls, type) and issubclass(cls, BaseException)):
            raise TypeError(f"{module}.{name} is not an exception")
        arguments = prepared["exc_message"]
        error: BaseException
        try:
            error = cls(*arguments)
        except Exception:
            # Its constructor takes other arguments than those in `args`.
            error = cls.__new__(cls)
        set_arguments(error, arguments)
        return error


def error_as_json(error: BaseException) -> dict[str, Any]:
    """Returns type, module and arguments; arguments that are not JSON become their repr."""
    cls = type(error)
    return {
        "exc_type": cls.__qualname__,
        "exc_message": ensure_serializable(error.args, dumps),
        "exc_module": cls.__module__,
    }


def set_arguments(error: BaseException, arguments: Sequence[Any]) -> None:
    """Gives a restored `error` the arguments that it was stored with.

    A constructor may build a message from its arguments: called again with that message, it would
    build a longer one each time the error is stored and restored.
    """
    BaseException.__init__(error, *arguments)
