"""The queue of the messages that wait for one key: reads the key, and chooses whom to wake.

`waiting_messages.WaitingMessages` has one for each key, and calls it in its thread.
"""

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

#: Seconds for which no worker wakes another message, once one was woken.
CLAIM_SECONDS = 1.0
#: Bytes to read: a turn, or a record up to its body.
_SIZE = layout.HEAD_BYTES
#: Letters of records with an outcome; those whose continuation is being sent.
_OUTCOMES, _SENDING = (b"V", b"T", b"t", b"E", b"D", b"X"), (b"T", b"t")


class WaitingMessage:
    """A message that starts when it is woken or at its ETA, whichever is first, and only once.

    Celery's timer has it in place of the function that it would call at the ETA.

    Args:
        request: Celery's request of the message.
        waits: the header of the message that names the execution it waits for.
        remove: called with this message when it starts.
        function: what Celery's timer would call with `args` to start the message.
    """

    #: Celery's timer shows the name of each function that it calls, such as in ``inspect``.
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
        #: The timer's entry, by which it is cancelled; set when the timer has it.
        self.entry: Any = None
        #: The queue of its key; None until the thread has added the message to one.
        self.queue: WaitQueue | None = None
        self._remove = remove
        # A list, because ``pop`` is atomic: of two threads that start the message, one gets it.
        self._calls = [(function, args)]

    def __call__(self, *_: Any) -> None:
        """Starts the message; the timer passes the arguments that `celery inspect` shows."""
        with suppress(IndexError):
            function, args = self._calls.pop()
            self._remove(self)
            function(*args)

    @property
    def is_copy(self) -> bool:
        """Whether it waits for the execution of another copy of the same message."""
        return bool(self.waits.task_id == self.request.text_id[:255])

    def continues(self, holder: Record) -> bool:
        """Returns whether `holder` reserves the key for this message: it is the retry."""
        is_own = holder.state is State.RESERVED and holder.task_id == self.request.text_id
        return is_own and bool(holder.awaited <= self.request.key_and_generation[1])

    @property
    def is_queued(self) -> bool:
        """Whether it has started, but no process of the pool has taken it yet."""
        return self.request.time_start is None and not self.request.acknowledged

    @property
    def is_discarded(self) -> bool:
        """Whether it has expired or was revoked."""
        return self.request.time_start is None and self.request.acknowledged


class WaitQueue:
    """The messages that wait for one key, longest wait first.

    Args:
        listener: receives the invalidations of the key.
        changed: called with this queue, in any thread, when the key may have changed.
    """

    def __init__(
        self,
        store: RecordStore,
        key: Key,
        listener: InvalidationListener,
        changed: Callable[[WaitQueue], None],
    ) -> None:
        self.store, self.key = store, key
        #: The name to read in Redis: that of the record or, for a key that may run again, that of
        #: its turn, which names the current record.
        self.name = store.config.turn_name(key) if key.message else store.name(key)
        self.messages: list[WaitingMessage] = []
        #: When to read the key (seconds of `monotonic`); `WaitingMessages` sets it.
        self.due = math.inf
        #: Whether an execution or a reservation held the key at the last read.
        self.is_held = False
        self._listener, self._on_change = listener, partial(changed, self)
        #: The names whose changes are tracked.
        self._names: set[str] = set()
        #: The record of that execution or reservation; None if none held the key, or it is damaged.
        self.holder: Record | None = None
        #: The highest token seen: that of the last execution of the key.
        self._token = 0
        #: The message woken last, until it has run, and when (seconds of `monotonic`).
        self._woken: WaitingMessage | None = None
        self._woken_at = 0.0
        #: The last claim that this worker has got; see `claim`.
        self._claim = ""

    def add(self, message: WaitingMessage) -> None:
        """Adds `message` in the order of the times since which messages wait."""
        message.queue = self
        self._token = max(self._token, message.waits.token)
        insort(self.messages, message, key=lambda each: each.waits.since_ms)

    def read(self) -> tuple[layout.Head, bool]:
        """Reads the key; returns the head of its record, and whether changes of it are tracked.

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
        # The message that was woken has begun: the key is held, or an execution has begun and
        # ended since the last read.
        if self.is_held or self._token > before:
            self._woken = None
        return head, is_tracked

    def _read(self, name: str) -> tuple[bytes, bool]:
        """Returns the beginning of a value, and whether changes of it are tracked from now on."""
        self._names.add(name)
        raw = run_sync(self._listener.track(name, _SIZE, self._on_change))
        if raw is not None:
            return raw, True
        return self.store.query("GETRANGE", name, 0, _SIZE - 1), False

    def untrack(self) -> None:
        """Stops tracking changes of the key."""
        self._untrack(self._names)

    def _untrack(self, names: set[str]) -> None:
        for name in names:
            self._listener.untrack(name)

    def seconds_left(self, head: layout.Head) -> float:
        """Returns the seconds until the time in `head`, such as the end of the lease."""
        return (head.at_ms - self.store.now_ms()) / 1000

    def is_answered(self, head: layout.Head) -> bool:
        """Returns whether `head` is that of an outcome, and all messages may get it at once.

        A key that may run again has none for other messages: they run one after the other.
        """
        return not self.key.message and head.letter in _OUTCOMES

    def ready(self, head: layout.Head) -> list[WaitingMessage]:
        """Returns the messages that may be woken.

        While the key is held, only the message that it is reserved for. While a continuation is
        being sent, all but copies of that message, which must wait for its end.
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
        # If the pool of this worker is busy, the next message would wait too, so it is not woken.
        # The claim has expired meanwhile, so another worker may wake one.
        return CLAIM_SECONDS if left <= 0 and self._woken.is_queued else max(left, 0.0)

    def claim(self, message: WaitingMessage, head: layout.Head) -> bool:
        """Returns whether `message` may be woken; if so, no other worker wakes one for a second.

        The claim is a name in Redis that the first worker sets. It has the token and the letter of
        the ended execution, so each end of an execution, and each mark of an expired lease, has a
        claim of its own.

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
