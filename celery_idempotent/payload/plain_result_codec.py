"""Results and errors where no result backend says how to write them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from celery.utils.serialization import create_exception_cls, ensure_serializable
from kombu.utils.json import dumps

from celery_idempotent.errors import NotReadyError


class PlainResultCodec:
    """Values as they are; errors as type, module and arguments, as Celery's backends do."""

    def prepare_value(self, value: Any, serializer: str) -> Any:
        """The value."""
        return value

    def prepare_error(self, error: BaseException) -> dict[str, Any]:
        """Type, module and arguments; arguments that JSON cannot write become their repr."""
        return written_as_json(error)

    def result_of(self, task_id: str, seconds: float) -> Any:
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
            for field in name.split("."):
                kind = getattr(kind, field)
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
        keep_arguments(error, arguments)
        return error


def written_as_json(error: BaseException) -> dict[str, Any]:
    """Type, module and arguments; arguments that JSON cannot write become their repr."""
    kind = type(error)
    return {
        "exc_type": kind.__qualname__,
        "exc_message": ensure_serializable(error.args, dumps),
        "exc_module": kind.__module__,
    }


def keep_arguments(error: BaseException, arguments: Sequence[Any]) -> None:
    """Give a restored `error` the arguments that it was stored with.

    A constructor that makes its text of them makes a longer one of that text, and each time that
    the error is stored and restored again.
    """
    BaseException.__init__(error, *arguments)
