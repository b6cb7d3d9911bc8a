"""Code of the user that runs while connecting to Redis: its errors are outages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
from redis import CredentialProvider

from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.core.store.commands import LeaseExtension
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.server_info import evictions
from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.operations.records.reader import RecordReader
from tests.servers.groups import ClusterServers
from tests.store import deployments
from tests.store.deployments import Site
from tests.store.record_harness import KEY, LEASE_MS, RETENTION_MS

pytestmark = deployments.on(deployments.PLAIN[0], deployments.CLUSTER)

#: Seconds: longer than a busy machine takes to connect.
TIMEOUT = 30.0


class Credentials(CredentialProvider):
    """Raises while `fails`."""

    fails = True

    def get_credentials(self) -> tuple[str, str]:
        if self.fails:
            raise LookupError("no token")
        return "default", "any password will do"

    def connect(self, connection: Any) -> Any:
        self.get_credentials()
        return connection.on_connect()  # for asyncio, a coroutine


def fields(site: Site, credentials: Credentials, kind: str, library: Any) -> dict[str, Any]:
    """Returns the fields of a `StoreConfig` that run the user's code."""
    url, is_cluster = site.behind.url, isinstance(site.behind, ClusterServers)
    if kind == "provider":
        return {"url": url, "options": {"credential_provider": credentials}}
    if kind == "connect function":
        if is_cluster and library is redis.asyncio:
            pytest.skip("it has no such option")
        return {"url": url, "options": {"redis_connect_func": credentials.connect}}
    cls = library.RedisCluster if is_cluster else library.Redis

    def client() -> Any:
        first = url.partition(";")[0].replace("+cluster", "")
        return cls.from_url(first, credential_provider=credentials)

    return {"client": client}


COMMANDS: dict[str, Callable[[RecordStore], Any]] = {
    "execute": lambda store: store.execute(commands.give_back(KEY, "task")),
    "execute_all": lambda store: store.execute_all([commands.give_back(KEY, "task")] * 2),
    "extend": lambda store: store.extend([LeaseExtension(KEY, 1, LEASE_MS, RETENTION_MS)] * 2),
    "ping": lambda store: store.ping(),
}

each_kind = pytest.mark.parametrize("kind", ["provider", "connect function", "own client"])


@each_kind
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])
def test_an_error_is_an_outage(site: Site, kind: str, command: Any, is_async: bool) -> None:
    credentials = Credentials()
    library = redis.asyncio if is_async else redis
    config = StoreConfig(**fields(site, credentials, kind, library), timeout=TIMEOUT)

    async def run() -> None:
        store = RecordStore(config, repr, is_async=is_async)
        try:
            with pytest.raises(StoreUnavailableError, match="no token"):
                await command(store)
            credentials.fails = False
            await command(store)
            if kind == "own client":
                return  # redis-py then uses connections without credentials
            credentials.fails = True
            for node in getattr(site.behind, "nodes", (site.behind,)):
                with node.client() as client:
                    client.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(StoreUnavailableError):
                await command(store)
        finally:
            await store.aclose()

    asyncio.run(run()) if is_async else run_sync(run())


@pytest.mark.parametrize("kind", ["provider", "connect function"])
def test_tools_report_an_outage(site: Site, kind: str) -> None:
    config = StoreConfig(**fields(site, Credentials(), kind, redis), timeout=TIMEOUT)
    store = RecordStore(config, repr)

    def read() -> None:
        with RecordReader.open(store) as reader:
            list(reader.scan())

    for ask in (read, lambda: store.reference("task")):
        with pytest.raises(StoreUnavailableError, match="no token"):
            ask()
    assert evictions(store) == ""
