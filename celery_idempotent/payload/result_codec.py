"""Prepares and restores results and errors as the app's result backend does."""

from __future__ import annotations

from typing import Any

import celery.exceptions
from billiard.exceptions import WorkerLostError
from celery import Celery
from celery.result import ResultBase
from celery.states import EXCEPTION_STATES, PENDING, READY_STATES
from celery.utils.serialization import create_exception_cls, get_pickleable_exception

from celery_idempotent.errors import NotReadyError, ResultNotStoredError
from celery_idempotent.payload.stored_error import (
    class_of,
    error_as_json,
    is_storable,
    set_arguments,
)
from celery_idempotent.printable import one_line


class ResultCodec:
    """Encodes as the result backend does, so that a replay equals what the first caller got.

    Args:
        app: has the result backend; without it, values are left unchanged, and errors are encoded
            as Celery's backends do.
    """

    def __init__(self, app: Celery | None = None) -> None:
        self._app = app

    def prepare_value(self, value: Any, serializer: str) -> Any:
        """Returns `value`; for a result object what ``result_from_tuple`` reads, unless pickled."""
        if self._app and isinstance(value, ResultBase) and serializer != "pickle":
            return value.as_tuple()
        return value

    def prepare_error(self, error: BaseException) -> dict[str, Any]:
        """Returns type, module and arguments; arguments that are not JSON become their repr.

        Celery's tracer replaces exceptions that cannot be pickled before any backend gets them.
        """
        # Not by the backend's own method: its serializer may be another one than JSON.
        return error_as_json(get_pickleable_exception(error) if self._app else error)

    def result_of(self, task_id: str, seconds: float) -> Any:
        """Returns the result of a task that replaced this one `seconds` ago. May block.

        Raises:
            NotReadyError: if the task has not finished. Without an app, no task is replaced.
            ResultNotStoredError: if the backend cannot return the result, may have deleted it, or
                has an error that would act upon the worker, such as a WorkerLostError.
            Exception: what the task raised.
        """
        if self._app is None:
            raise NotReadyError(task_id)
        result = self._app.AsyncResult(task_id)
        task = f"task {one_line(task_id)}"
        try:
            state, value = result.state, result.result
        except Exception as error:
            raise ResultNotStoredError(
                f"{task} replaced this one, and the result backend cannot return its result"
            ) from error
        expires = self._app.backend.expires
        if state == PENDING and expires and seconds > expires:
            # The result has most likely expired: waiting for it would never end.
            raise ResultNotStoredError(
                f"{task} replaced this one, and the result backend no longer has its "
                "result: set result_expires to at least idempotency_result_ttl"
            )
        if state not in READY_STATES:
            raise NotReadyError(task_id)
        if state in EXCEPTION_STATES:
            if not is_storable(type(value)) or isinstance(value, WorkerLostError):
                raise ResultNotStoredError(
                    f"{task} replaced this one, and has failed with {type(value).__name__}, which "
                    "is not raised again: it would act upon the worker"
                )
            raise value
        return value

    def restore_error(self, prepared: dict[str, Any]) -> BaseException:
        """Returns the exception that ``AsyncResult.get()`` would raise, with its arguments.

        Its class has the same name if this process has not loaded it.

        Raises:
            Exception: of any kind, if `prepared` is no stored error.
        """
        name, arguments = prepared["exc_type"], prepared["exc_message"]
        cls = class_of(prepared)
        error: BaseException
        if self._app and cls:
            error = self._app.backend.exception_to_python(prepared)
            if type(error).__qualname__ != name:
                return error
        else:
            module = celery.exceptions.__name__ if self._app else prepared["exc_module"]
            cls = cls or create_exception_cls(name, module)
            try:
                error = cls(*arguments)
            except Exception:
                # Its constructor takes other arguments than those in `args`.
                error = cls.__new__(cls)
        set_arguments(error, arguments)
        return error
