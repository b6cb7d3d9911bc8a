"""Prepares and restores results and errors where there is no result backend."""

from __future__ import annotations

from typing import Any

from celery.utils.serialization import create_exception_cls

from celery_idempotent.errors import NotReadyError
from celery_idempotent.payload.stored_error import class_of, error_as_json, set_arguments


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
        """Returns the exception, or one of the same name if its class is not loaded."""
        arguments = prepared["exc_message"]
        cls = class_of(prepared)
        if cls is None:
            cls = create_exception_cls(prepared["exc_type"], prepared["exc_module"])
        error: BaseException
        try:
            error = cls(*arguments)
        except Exception:
            # Its constructor takes other arguments than those in `args`.
            error = cls.__new__(cls)
        set_arguments(error, arguments)
        return error
