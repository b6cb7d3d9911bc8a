"""The outcome of a body, as a value: the flow passes errors on without raising them."""

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
            # The error's traceback refers to this frame, which would refer to the error.
            del self


Outcome = Result | Failure

#: Raised between any two bytecodes: a database driver may have sent a statement and not read the
#: reply.
_ASYNCHRONOUS_ERRORS = (LeaseLostError, SoftTimeLimitExceeded)


def is_asynchronous(error: BaseException) -> bool:
    """Returns whether `error` may have been raised in the middle of a statement."""
    return isinstance(error, _ASYNCHRONOUS_ERRORS) or not isinstance(error, Exception)
