"""What the transports to a server and to a cluster share: blocking, or for event loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

import redis
import redis.asyncio

from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.scripts import Script
from celery_idempotent.store.transport.connection import result_of
from celery_idempotent.store.transport.per_loop import PerLoop, PerProcess

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

#: A script; and how many keys it has, the keys and the arguments, in the order of its head. The
#: first key is the record's name.
Call = tuple[Script, Sequence[Any]]


class BaseTransport:
    """What both transports share. A transport sends commands to Redis and returns the replies.

    The methods of a blocking transport never suspend, so `run_sync` can run them. A command may
    reach the server more than once: every script replies to a command that is resent as it did the
    first time.

    Args:
        timeout: seconds that a command may take, resends included; the config's by default.
        is_async: for event loops: it has connections of its own in each loop.
        retry: resend a command whose reply does not arrive in half of that time.
    """

    def __init__(
        self,
        config: StoreConfig,
        timeout: float | None = None,
        *,
        is_async: bool = False,
        retry: bool = True,
    ) -> None:
        self.config = config
        self.is_async = is_async
        self._timeout = config.timeout if timeout is None else timeout
        self._retry = retry
        self._library: Any = redis.asyncio if is_async else redis
        #: Of pings and batches on an event loop; the transport has the connections of another one.
        self._limit: float | None = None

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        if self.is_async:
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)

    def with_timeout(self, timeout: float, *, retry: bool = True) -> Self:
        """Returns a transport to the same Redis whose commands take `timeout` seconds at most.

        It limits pings and batches, and shares the connections of this one, on an event loop.
        """
        if not self.is_async:
            return type(self)(self.config, timeout, retry=retry)
        limited = copy(self)
        limited._limit = timeout  # noqa: SLF001
        return limited

    async def _limited(self, sending: Coroutine[Any, Any, T]) -> T:
        value: T = await (sending if self._limit is None else result_of(sending, self._limit))
        return value

    def scoped(
        self, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None
    ) -> PerLoop[T]:
        """Returns a scope whose values may hold connections of this transport."""
        return PerLoop(make, close) if self.is_async else PerProcess(make, close)
