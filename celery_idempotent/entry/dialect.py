"""How the app's result backend hands results and errors over."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.result import ResultBase


class BackendDialect:
    """The result backend's own encoding, so that a replay is what the first caller got."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def prepare_value(self, value: Any) -> Any:
        """A result object becomes what ``result_from_tuple`` reads; all else stays."""
        return value.as_tuple() if isinstance(value, ResultBase) else value

    def prepare_error(self, error: BaseException) -> dict[str, Any]:
        """Type, module and arguments; arguments that JSON cannot write become their repr."""
        prepared: dict[str, Any] = self._app.backend.prepare_exception(error, serializer="json")
        return prepared

    def restore_error(self, prepared: dict[str, Any]) -> BaseException:
        """The exception that ``AsyncResult.get()`` would raise."""
        error: BaseException = self._app.backend.exception_to_python(prepared)
        return error
