"""How work ended, as a value: so that the flow can carry an error without raising it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Result(NamedTuple):
    """It returned."""

    value: Any

    def get(self) -> Any:
        """What it returned."""
        return self.value


class Failure(NamedTuple):
    """It raised."""

    error: BaseException

    def get(self) -> Any:
        """Raise what it raised."""
        try:
            raise self.error
        finally:
            # The error holds this frame by its traceback: a circle that only a collection frees.
            del self


Outcome = Result | Failure
