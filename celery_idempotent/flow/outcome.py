"""How a body ended, as a value that the flow can pass on without raising it."""

from __future__ import annotations

from typing import Any, NamedTuple

from billiard.exceptions import SoftTimeLimitExceeded

from celery_idempotent.errors import LeaseLostError


class Result(NamedTuple):
    """The body returned."""

    value: Any

    def get(self) -> Any:
        """Returns the value."""
        return self.value


class Failure(NamedTuple):
    """The body raised."""

    error: BaseException

    def get(self) -> Any:
        """Raises the error."""
        try:
            raise self.error
        finally:
            # The traceback of the error refers to this frame: a cycle without this.
            del self


Outcome = Result | Failure

#: Raised between any two bytecodes, so that a driver may have sent a statement and not read the
#: reply.
_ASYNCHRONOUS_ERRORS = (LeaseLostError, SoftTimeLimitExceeded)


def is_asynchronous(error: BaseException) -> bool:
    """Whether `error` may have been raised in the middle of a statement."""
    return isinstance(error, _ASYNCHRONOUS_ERRORS) or not isinstance(error, Exception)
