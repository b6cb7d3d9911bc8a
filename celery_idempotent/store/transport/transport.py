"""The interface between the store and redis-py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from celery_idempotent.store.scripts import Script

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ScriptCall(NamedTuple):
    """One script and the record that it is called on."""

    script: Script
    #: The record's name in Redis.
    name: str
    #: In the order of the script's head, after the other keys.
    arguments: Sequence[Any]
    #: How many keys it has: the record's name, and the first ones of the arguments.
    keys: int = 1


class Scope(Protocol[T_co]):
    """A value for each event loop (`PerLoop`) or for each process (`PerProcess`)."""

    def get(self) -> T_co:
        """Returns the value of the running loop, or of this process."""

    async def aclose(self) -> None:
        """Closes that value."""


class ServerConnection(Protocol):
    """One connection to one server, for what CLIENT TRACKING needs.

    Every method raises RedisError or OSError if the server does not reply.
    """

    async def connect(self) -> None:
        """Opens the connection."""

    async def request(self, *command: Any) -> Any:
        """Sends one command and returns its reply."""

    async def read(self, timeout: float) -> Any:
        """Returns the next message, or None if none arrives within `timeout` seconds."""

    async def aclose(self) -> None:
        """Closes the connection."""


class Transport(Protocol):
    """Sends commands to Redis and returns the replies.

    All methods are coroutines. Those of a blocking transport never suspend, so `run_sync` can run
    them. A command may reach the server more than once: every script replies to a command that is
    resent as it did the first time.
    """

    @property
    def shares_connections(self) -> bool:
        """Whether the transports that `with_timeout` returns use the connections of this one."""

    async def call(self, call: ScriptCall, followup: Sequence[Any] = ()) -> list[Any]:
        """Calls a script, and returns its reply and that of the command `followup` if there is one.

        Both are sent on the same connection in one round trip; it takes a second round trip where
        the server has not loaded the script.

        Raises:
            ResponseError: if the server replies with an error.
            RedisError, OSError: if the server does not reply.
        """

    async def call_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Returns the reply to each of `calls`; an error that the server replies with is a value.

        All are sent in one round trip; to a cluster, in one for each node that has a record. If
        some of these nodes do not reply, the errors of their calls are values, too.

        Raises:
            RedisError, OSError: if no server replies.
        """

    async def ping(self) -> None:
        """Checks that the server replies.

        Raises:
            RedisError, OSError: if it does not.
        """

    async def sleep(self, seconds: float) -> None:
        """Waits."""

    def with_timeout(self, timeout: float, *, retry: bool = True) -> Transport:
        """Returns a transport to the same Redis whose commands take `timeout` seconds at most.

        Args:
            retry: resend a command whose reply does not arrive in half of that time.
        """

    def scoped(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]]) -> Scope[T]:
        """Returns a scope whose values may hold connections of this transport."""

    def server_of(self, name: str) -> str:
        """Returns the address of the server that has the record of this name; empty if only one."""

    def connection_to(self, name: str) -> ServerConnection:
        """Returns a new connection to the server that has the record of this name."""

    async def aclose(self) -> None:
        """Closes the connections; the next command opens others."""
