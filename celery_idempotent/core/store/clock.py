"""The server's clock, and the deadlines of commands by it.

A command that the server executes after its sender has given up, or was answered through a resend,
could undo what has happened since. Therefore each copy of a command carries a deadline.
"""

from __future__ import annotations

from celery_idempotent.core.clock import monotonic

#: Seconds after which a copy of a command does nothing, and before which the next is not sent; less
#: if the whole command may take less than `COPIES` times as long.
LATE_AFTER, COPIES = 0.5, 5


class ServerClock:
    """The clock of a server, estimated from its replies.

    A reply is as old as its way, so the time is never later than the server's, unless its clock is
    set back.
    """

    def __init__(self) -> None:
        #: Seconds by which the server's clock is ahead of this process's; None if unknown.
        self._ahead: float | None = None

    def read(self, now_ms: int) -> None:
        """Takes the server's time in milliseconds from a reply that has just arrived."""
        self._ahead = now_ms / 1000 - monotonic()

    def now_ms(self) -> int:
        """Returns the server's time in milliseconds; 0 if unknown."""
        return 0 if self._ahead is None else int((self._ahead + monotonic()) * 1000)


class Deadline:
    """The deadline of a command, which begins anew with each copy that is packed.

    While the server's time is unknown, a copy does nothing, and its reply has the time.

    Args:
        timeout: seconds that the command may take, all copies included.
    """

    def __init__(self, clock: ServerClock, timeout: float) -> None:
        self._clock = clock
        #: Of a copy; more if the server has answered that one was late.
        self.seconds = min(LATE_AFTER, timeout / COPIES)
        self._ends_at = 0.0

    def __str__(self) -> str:
        """Returns the deadline of a new copy in milliseconds, by the server's clock."""
        self._ends_at = monotonic() + self.seconds
        now_ms = self._clock.now_ms()
        return str(now_ms + int(self.seconds * 1000)) if now_ms else "0"

    def left(self) -> float:
        """Returns the seconds until the last copy does nothing; 0 if none has been packed."""
        return max(0.0, self._ends_at - monotonic())
