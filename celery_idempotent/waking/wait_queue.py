"""The queue of the messages that wait for one key, and the reading of that key's state."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Record, State, layout
from celery_idempotent.core.store import reference, run_sync
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.tracking import InvalidationListener
from celery_idempotent.core.task.message.message_headers import Waits
from celery_idempotent.errors import CorruptRecordError

#: Seconds for which a message that was woken keeps others from being woken, in all workers.
CLAIM_SECONDS = 1.0
#: Bytes that hold a turn, or a record without its body.
_SIZE = layout.HEAD_BYTES
_OUTCOMES, _SENDING = (b"V", b"T", b"t", b"E", b"D", b"X"), (b"T", b"t")


class WaitingMessage:
    """A message that starts once: when it is woken, or at its ETA, whichever is first.

    Args:
        remove: receives this message when it starts.
        function: what Celery's timer would call with `args`.
    """

    #: For the text of the timer's entry.
    __name__ = "wait"

    def __init__(
        self,
        request: Any,
        waits: Waits,
        remove: Callable[[WaitingMessage], None],
        function: Callable[..., Any],
        args: Sequence[Any],
    ) -> None:
        self.request, self.waits = request, waits
        #: Of the timer.
        self.entry: Any = None
        self.queue: WaitQueue | None = None
        self._remove = remove
        # Emptied by the first of two threads.
        self._calls = [(function, args)]

    def __call__(self, *_: Any) -> None:
        """Starts the message; the timer passes the arguments that `celery inspect` shows."""
        with suppress(IndexError):
            function, args = self._calls.pop()
            self._remove(self)
            function(*args)

    @property
    def is_copy(self) -> bool:
        """Whether it waits for the execution of another copy of itself."""
        return bool(self.waits.task_id == self.request.text_id[:255])

    def continues(self, holder: Record) -> bool:
        """Returns whether `holder` reserves the key for this message, which is a retry."""
        is_own = holder.state is State.RESERVED and holder.task_id == self.request.text_id
        return is_own and bool(holder.awaited <= self.request.identity[1])

    @property
    def is_queued(self) -> bool:
        """Whether it has started, and no process of the pool has taken it yet."""
        return self.request.time_start is None and not self.request.acknowledged

    @property
    def is_discarded(self) -> bool:
        """Whether it has expired or was revoked."""
        return self.request.time_start is None and self.request.acknowledged


class WaitQueue:
    """The messages that wait for one key, longest wait first.

    Args:
        changed: called when the key may have changed.
    """

    def __init__(
        self,
        store: RecordStore,
        key: Key,
        listener: InvalidationListener,
        changed: Callable[[WaitQueue], None],
    ) -> None:
        self.store, self.key = store, key
        #: Of the key or, if it may run again, of its turn, which names the current record.
        self.name = store.config.turn_name(key) if key.message else store.name(key)
        self.messages: list[WaitingMessage] = []
        #: When to read the key.
        self.due = math.inf
        #: Whether an execution, or a reservation, held the key at the last read.
        self.is_held = False
        self._listener, self._on_change = listener, partial(changed, self)
        self._names: set[str] = set()
        #: The record that held the key at the last read, if it can be read.
        self.holder: Record | None = None
        self._token = 0
        self._woken: WaitingMessage | None = None
        self._woken_at = 0.0
        self._claim = ""

    def add(self, message: WaitingMessage) -> None:
        """Adds `message` at its place."""
        message.queue = self
        self._token = max(self._token, message.waits.token)
        insort(self.messages, message, key=lambda each: each.waits.since_ms)

    def read(self) -> tuple[layout.Head, bool]:
        """Returns the head of the current record, and whether changes of it are announced.

        Raises:
            IdempotencyError: if Redis does not reply.
        """
        previous, self._names, before = self._names, set(), self._token
        raw, is_tracked = self._read(self.name)
        holder = layout.turn_holder(raw)
        if holder is not None:
            self._token = max(self._token, layout.turn_token(raw))
            raw, is_tracked = self._read(holder)
        self._untrack(previous - self._names)
        head, self.holder = layout.read_head(raw), None
        if head.letter in layout.UNFINISHED:
            with suppress(CorruptRecordError):
                self.holder = self.store.record(self.key, raw)
        self._token = max(self._token, head.token)
        self.is_held = head.letter in layout.UNFINISHED and self.seconds_left(head) > 0
        if self.is_held or self._token > before:  # it may have run between two reads
            self._woken = None
        return head, is_tracked

    def _read(self, name: str) -> tuple[bytes, bool]:
        self._names.add(name)
        raw = run_sync(self._listener.track(name, _SIZE, self._on_change))
        if raw is not None:
            return raw, True
        return self.store.query("GETRANGE", name, 0, _SIZE - 1), False

    def untrack(self) -> None:
        """Ends the announcements."""
        self._untrack(self._names)

    def _untrack(self, names: set[str]) -> None:
        for name in names:
            self._listener.untrack(name)

    def seconds_left(self, head: layout.Head) -> float:
        """Returns the seconds until the time in `head`."""
        return (head.at_ms - self.store.now_ms()) / 1000

    def is_answered(self, head: layout.Head) -> bool:
        """Returns whether `head` is that of an outcome that answers all messages."""
        return not self.key.message and head.letter in _OUTCOMES

    def ready(self, head: layout.Head) -> list[WaitingMessage]:
        """Returns the messages that may begin, or are answered; of a key that is held, its retry.

        A copy of a message whose continuation is being sent is not: that takes up to a lease.
        """
        if self.is_held:
            holder = self.holder
            return [message for message in self.messages if holder and message.continues(holder)]
        if head.letter not in _SENDING or self.seconds_left(head) <= 0:
            return list(self.messages)
        return [message for message in self.messages if not message.is_copy]

    def pause(self) -> float:
        """Returns the seconds until the next message may be woken; 0: now."""
        if self._woken is None or self._woken.is_discarded:
            return 0.0
        left = self._woken_at + CLAIM_SECONDS - monotonic()
        # Another one would also wait for a process of this worker; other workers may go on.
        return CLAIM_SECONDS if left <= 0 and self._woken.is_queued else max(left, 0.0)

    def claim(self, message: WaitingMessage, head: layout.Head) -> bool:
        """Returns whether `message` may be woken; if so, no other worker wakes one for now.

        A claim is bound to the execution that has ended, and to the mark that its lease has.

        Raises:
            IdempotencyError: if Redis does not reply.
        """
        claim = f"wake {self.name} {self._token} {head.letter!r}"
        if claim != self._claim or monotonic() >= self._woken_at + CLAIM_SECONDS:
            name, lifetime = reference.name(self.store.config.prefix, claim), CLAIM_SECONDS * 1000
            if not self.store.query("SET", name, "", "PX", round(lifetime), "NX"):
                return False
            self._claim, self._woken_at = claim, monotonic()
        self._woken = message
        return True
