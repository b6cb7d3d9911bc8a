"""The connection to the broker that the thread of `Renewal` uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

from celery_idempotent.redelivery.held import HeldMessage


class OwnConnection(ABC):
    """A connection besides that of the worker's consumer, which no other thread may use.

    Args:
        connection: the consumer's, or a copy of it.
    """

    def __init__(self, connection: Any) -> None:
        # Never connected itself: kombu cannot reopen a connection, so each one is a new copy.
        self._template = connection.clone()
        self._connection: Any = None

    @cached_property
    def channel(self) -> Any:
        """A channel, opened at the first use, and again after :meth:`close`."""
        self._connection = self._template.clone()
        return self._connection.channel()

    @abstractmethod
    def renew(self, messages: list[HeldMessage], seconds: float) -> None:
        """Hides `messages` from other workers for the next `seconds`."""

    @abstractmethod
    def restore(self) -> None:
        """Redelivers the messages whose time is over, unless the broker does so itself."""

    def close(self) -> None:
        """Closes the connection; the next call opens another one."""
        self.__dict__.pop("channel", None)
        if self._connection is not None:
            self._connection.close()
