"""The interface between payloads and the app's result backend."""

from __future__ import annotations

from typing import Any, Protocol


class ResultCodec(Protocol):
    """Prepares values and errors for a serializer, as the app's result backend does."""

    def prepare_value(self, value: Any, serializer: str) -> Any:
        """Returns what the backend would pass to `serializer` for `value`."""

    def prepare_error(self, error: BaseException) -> dict[str, Any]:
        """Returns the type, module and arguments of `error`."""

    def result_of(self, task_id: str, seconds: float) -> Any:
        """Returns the result of a task that replaced this one `seconds` ago. May block.

        Raises:
            NotReadyError: if the task has not finished.
            ResultNotStoredError: if the result no longer exists, never will, or is an error that
                would act upon the worker.
            Exception: what the task raised.
        """

    def restore_error(self, prepared: dict[str, Any]) -> BaseException:
        """Returns the exception that ``AsyncResult.get()`` would raise.

        Raises:
            Exception: of any kind, if `prepared` is no stored error.
        """
