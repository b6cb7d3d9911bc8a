"""Results and errors where no result backend says how to write them."""

from __future__ import annotations

import sys
from typing import Any

from celery.utils.serialization import create_exception_cls, ensure_serializable
from kombu.utils.json import dumps

from celery_idempotent.errors import NotReadyError


class PlainDialect:
    """Values as they are; errors as type, module and arguments, as Celery's backends do."""

    def prepare_value(self, value: Any) -> Any:
        """The value."""
        return value

    def prepare_error(self, error: BaseException) -> dict[str, Any]:
        """Type, module and arguments; arguments that JSON cannot write become their repr."""
        kind = type(error)
        return {
            "exc_type": kind.__qualname__,
            "exc_message": ensure_serializable(error.args, dumps),
            "exc_module": kind.__module__,
        }

    def result_of(self, task_id: str) -> Any:
        """No task takes another's place here."""
        raise NotReadyError(task_id)

    def restore_error(self, prepared: dict[str, Any]) -> BaseException:
        """The error again; one of the same name where its class cannot be had.

        No module is imported, and nothing but an exception's class is called: what stands in Redis
        must not choose what runs here.
        """
        module, name = prepared["exc_module"], prepared["exc_type"]
        try:
            kind: Any = sys.modules[module]
            for part in name.split("."):
                kind = getattr(kind, part)
        except (KeyError, AttributeError):
            kind = create_exception_cls(name, module)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError(f"{module}.{name} is no exception")
        arguments = prepared["exc_message"]
        error: BaseException
        try:
            error = kind(*arguments)
        except Exception:
            # Its constructor takes something else than what it keeps.
            error = kind.__new__(kind)
            error.args = tuple(arguments)
        return error
