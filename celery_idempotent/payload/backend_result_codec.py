"""How the app's result backend hands results and errors over."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.result import ResultBase
from celery.states import EXCEPTION_STATES, PENDING, READY_STATES
from celery.utils.serialization import get_pickleable_exception

from celery_idempotent.errors import NotReadyError, ResultNotStoredError
from celery_idempotent.payload.plain_result_codec import keep_arguments, written_as_json


class BackendResultCodec:
    """The result backend's own encoding, so that a replay is what the first caller got."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def prepare_value(self, value: Any, serializer: str) -> Any:
        """A result object becomes what ``result_from_tuple`` reads; pickle takes it as it is."""
        told = serializer != "pickle" and isinstance(value, ResultBase)
        return value.as_tuple() if told else value

    def prepare_error(self, error: BaseException) -> dict[str, Any]:
        """Type, module and arguments; arguments that JSON cannot write become their repr.

        What cannot be pickled is what Celery's tracer makes of it, before any backend sees it.
        """
        # The backend asks its own serializer what can be written, and that may be another one.
        return written_as_json(get_pickleable_exception(error))

    def result_of(self, task_id: str, seconds: float) -> Any:
        """The result of the task that has taken this one's place `seconds` ago.

        Raises:
            NotReadyError: while there is none.
            ResultNotStoredError: if the backend cannot tell, or may have forgotten it.
            BaseException: what that task raised.
        """
        result = self._app.AsyncResult(task_id)
        try:
            state, value = result.state, result.result
        except Exception as error:
            raise ResultNotStoredError(
                f"task {task_id} was replaced, and the result backend cannot tell its result"
            ) from error
        forgets = self._app.backend.expires
        if state == PENDING and forgets and seconds > forgets:
            # Nobody who waits for it would ever get it, and in the end he would run.
            raise ResultNotStoredError(
                f"task {task_id} was replaced, and the result backend has no result of it (any "
                "more): result_expires should be as long as idempotency_result_ttl"
            )
        if state not in READY_STATES:
            raise NotReadyError(task_id)
        if state in EXCEPTION_STATES:
            raise value
        return value

    def restore_error(self, prepared: dict[str, Any]) -> BaseException:
        """The exception that ``AsyncResult.get()`` would raise, with the stored arguments."""
        error: BaseException = self._app.backend.exception_to_python(prepared)
        if type(error).__qualname__ == prepared["exc_type"]:
            keep_arguments(error, prepared["exc_message"])
        return error
