"""The clock of a server, and the deadlines that commands carry by that clock.

A command is sent again if its reply does not come. A delayed first copy could then be executed
after the sender has the reply to the second one or has given up, and undo what has happened since.
So each copy carries a deadline after which the script does nothing.
"""

from __future__ import annotations

from celery_idempotent.core.clock import monotonic

#: Seconds from sending a copy of a command to its deadline, before which the next is not sent.
LATE_AFTER = 0.5
#: A command with a shorter timeout has a shorter deadline, so that this many copies fit in it.
COPIES = 5


class ServerClock:
    """The clock of a server, estimated from its replies.

    The estimate is the time in the last reply plus the time since it arrived. It ignores how long
    the reply was on its way, so it is never ahead of the server's clock, unless that is set back.
    """

    def __init__(self) -> None:
        #: Seconds by which the server's clock is ahead of `monotonic`; None before the first reply.
        self._ahead: float | None = None

    def read(self, now_ms: int) -> None:
        """Takes the server's time in milliseconds from a reply that has just arrived."""
        self._ahead = now_ms / 1000 - monotonic()

    def now_ms(self) -> int:
        """Returns the server's time in milliseconds; 0 if unknown."""
        return 0 if self._ahead is None else int((self._ahead + monotonic()) * 1000)


class Deadline:
    """The deadline of a command: an argument whose ``str()``, for each copy, is a new deadline.

    While the server's time is unknown, that is "0": the copy does nothing, and its reply contains
    the time.

    Args:
        timeout: seconds that the command may take, all copies included.
    """

    def __init__(self, clock: ServerClock, timeout: float) -> None:
        self._clock = clock
        #: Seconds from sending a copy to its deadline; `RecordStore` doubles them each time that
        #: the server replies that a copy was late.
        self.seconds = min(LATE_AFTER, timeout / COPIES)
        #: When the last copy ends to be valid (seconds of `monotonic`).
        self._ends_at = 0.0

    def __str__(self) -> str:
        """Returns the deadline of a new copy in milliseconds, by the server's clock."""
        self._ends_at = monotonic() + self.seconds
        now_ms = self._clock.now_ms()
        return str(now_ms + int(self.seconds * 1000)) if now_ms else "0"

    def left(self) -> float:
        """Returns the seconds until the last copy is certain to do nothing; 0 without a copy."""
        return max(0.0, self._ends_at - monotonic())
