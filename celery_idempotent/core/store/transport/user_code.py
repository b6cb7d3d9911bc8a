"""Calls the user's code in connections: clients, credential providers, ``redis_connect_func``.

An error of that code becomes an error of the connection, like those of an unavailable store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from redis import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError

from celery_idempotent.core.printable import one_line
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.errors import IdempotencyError, SettingsError


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Raises a ConnectionError of redis-py for an error of the user's code in the block."""
    try:
        yield
    except (RedisError, RedisClusterException, IdempotencyError, SoftTimeLimitExceeded):
        raise
    except Exception as error:
        raised = f"{type(error).__name__}: {one_line(str(error))}"
        raise RedisConnectionError(f"{name} raised {raised}") from error


def of_client(config: StoreConfig) -> AbstractContextManager[None]:
    """Returns a context for calls of a client, which may be the user's."""
    return user_code("idempotency_redis_client") if config.client else nullcontext()


def guarded(
    connect_func: Callable[[Any], Any], result_of: Callable[[Any], Awaitable[Any]] | None
) -> Callable[[Any], Any]:
    """Returns `connect_func`, raising a ConnectionError of redis-py for its errors.

    Args:
        result_of: awaits what `connect_func` returns; None in blocking code.
    """

    def connect(connection: Any) -> None:
        with user_code("redis_connect_func"):
            connect_func(connection)

    async def connect_async(connection: Any) -> None:
        assert result_of is not None
        with user_code("redis_connect_func"):
            await result_of(connect_func(connection))

    return connect if result_of is None else connect_async


class GuardedProvider(CredentialProvider):
    """The user's credential provider, raising a ConnectionError of redis-py for its errors."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_provider"], name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the user's provider: redis-py checks whether it streams credentials."""
        return type(self._provider)

    def get_credentials(self) -> Any:
        with user_code("credential_provider"):
            return self._provider.get_credentials()

    async def get_credentials_async(self) -> Any:
        with user_code("credential_provider"):
            return await self._provider.get_credentials_async()


def client_of(client: Any, library: Any) -> Any:
    """Returns the user's client, or that which the user's function returns.

    Raises:
        SettingsError: if it cannot be used.
    """
    with user_code("idempotency_redis_client"):
        created = client() if callable(client) else client
    if not isinstance(created, (library.Redis, library.RedisCluster)):
        found = f"{type(created).__module__}.{type(created).__qualname__}"
        raise SettingsError(
            f"idempotency_redis_client is a {found}; it must be a "
            f"{library.__name__}.Redis or a {library.__name__}.RedisCluster"
        )
    if created.get_connection_kwargs().get("decode_responses"):
        raise SettingsError(
            "idempotency_redis_client has decode_responses=True, but records are bytes; use a "
            "client without it"
        )
    return created
