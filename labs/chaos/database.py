"""The database of effects and outcomes, and its faults; and the result backend's."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import make_url

from celery_idempotent.contrib.sqlalchemy import metadata
from labs.chaos.schedule import LEASE
from labs.chaos.stores import Single
from tests.faults.proxy import Proxy
from tests.servers.program import ServerError, Stoppable
from tests.servers.redis_server import RedisServer
from tests.servers.sql_server import PostgreSQL

#: What task bodies write: one row for each effect.
effects = sa.Table(
    "effects",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("execution", sa.String(32), nullable=False),
    sa.Column("receipt", sa.String(32), nullable=False),
)

#: Number of replies to commits that one fault drops.
REPLIES = 3
#: Longest wait for the last process of a killed server to end, in seconds.
RESTART_SECONDS = 20.0
#: Shorter than a freeze past the lease, in seconds.
IDLE_SECONDS = LEASE + 1
#: Longest time to connect, in seconds.
CONNECT_TIMEOUT = 5


class Database(Stoppable):
    """PostgreSQL behind a proxy. Every fault returns when the database works again.

    Args:
        idle_timeout: end transactions whose process is frozen past its lease.

    Attributes:
        url: for workers.
    """

    def __init__(self, *, idle_timeout: bool) -> None:
        self._server = PostgreSQL.start()
        self._url = self._server.create_database()
        if idle_timeout:
            name, milliseconds = make_url(self._url).database, round(IDLE_SECONDS * 1000)
            self._server.execute(
                f"ALTER DATABASE {name} SET idle_in_transaction_session_timeout = {milliseconds}"
            )
        self._engine = sa.create_engine(self._url, poolclass=sa.NullPool)
        metadata.create_all(self._engine)
        effects.metadata.create_all(self._engine)
        self._proxy = Proxy(self._url)
        query = {"connect_timeout": str(CONNECT_TIMEOUT)}
        address = make_url(self._url).set(port=self._proxy.port).update_query_dict(query)
        self.url = address.render_as_string(hide_password=False)

    def kill(self, target: float, seconds: float) -> None:
        """Kills the server and restarts it after `seconds`."""
        self._server.kill()
        time.sleep(seconds)
        deadline = time.monotonic() + RESTART_SECONDS
        while True:
            try:
                return self._server.launch()
            except ServerError:  # processes of its connections are still ending
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def cut(self, target: float, seconds: float) -> None:
        """Resets all connections repeatedly."""
        until = time.monotonic() + seconds
        while True:
            self._proxy.reset()
            if time.monotonic() >= until:
                return
            time.sleep(0.05)

    def lose_commit_replies(self, target: float, seconds: float) -> None:
        """Closes connections instead of sending the replies to the next commits."""
        for _ in range(REPLIES):
            self._proxy.lose_reply("COMMIT")

    def effects(self) -> list[dict[str, Any]]:
        """Returns the committed effects."""
        query = sa.select(effects).order_by(effects.c.id)
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def stop(self) -> None:
        self._proxy.stop()
        self._server.stop()


class ResultBackend(Stoppable):
    """The durable server that has the results of callers.

    Attributes:
        url: for workers.
        callers_url: for callers.
    """

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self.url = self.callers_url = server.url

    def kill(self, target: float, seconds: float) -> None:
        """Kills the server and restarts it after `seconds`."""
        self._server.kill()
        time.sleep(seconds)
        self._server.restart()

    def freeze(self, target: float, seconds: float) -> None:
        """Pauses the server."""
        self._server.pause()
        time.sleep(seconds)
        self._server.resume()

    def stop(self) -> None:
        self._server.stop()


class ResultsInStore:
    """The record store as the result backend; callers read it without the store's proxy."""

    def __init__(self, store: Single) -> None:
        self.url, self.callers_url = store.url, store.direct_url
        self.kill, self.freeze = store.kill, store.freeze
