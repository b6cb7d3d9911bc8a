"""The broker, as the thread of `Renewal` uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

from celery_idempotent.redelivery.held import HeldMessage


class OwnConnection(ABC):
    """A connection beside that of the worker's consumer, which another thread must not use.

    Args:
        connection: the consumer's, or a copy of it.
    """

    def __init__(self, connection: Any) -> None:
        # Not connected. A copy of it is, since kombu does not open a connection again.
        self._template = connection.clone()
        self._connection: Any = None

    @cached_property
    def channel(self) -> Any:
        """A channel, which is opened at the first use and after :meth:`close`."""
        self._connection = self._template.clone()
        return self._connection.channel()

    @abstractmethod
    def renew(self, messages: list[HeldMessage], seconds: float) -> None:
        """Hides `messages` from other workers for `seconds` from now on."""

    @abstractmethod
    def restore(self) -> None:
        """Delivers messages again whose time is over, if the broker does not do so itself."""

    def close(self) -> None:
        """Closes the connection; the next call opens another one."""
        self.__dict__.pop("channel", None)
        if self._connection is not None:
            self._connection.close()
