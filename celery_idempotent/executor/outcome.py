"""How a body ended, as a value that the flow can pass on without raising it."""

from __future__ import annotations

from typing import Any, NamedTuple


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
