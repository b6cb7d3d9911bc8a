"""Where an outage happens, and how it begins and ends."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from labs.rig.processes import with_children
from labs.rig.site import DURABLE, Site
from tests.faults.proxy import Proxy
from tests.servers.groups import ClusterServers, SentinelServers
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis_server import RedisServer

URL = "idempotency_redis_url"
USER, PASSWORD = "shop", "secret"


class OutageSite(Site):
    """The servers of one run."""

    store: RedisServer
    #: The broker or the result backend, if that has the outage.
    other: RedisServer
    proxy: Proxy
    sentinels: SentinelServers
    cluster: ClusterServers


# Sites: each function starts servers and returns the app's settings for them.


def one_server(
    site: OutageSite, config: Mapping[str, str] = DURABLE, **options: Any
) -> dict[str, Any]:
    site.store = site.server(config=config, **options)
    return {URL: site.store.url}


def behind_proxy(site: OutageSite) -> dict[str, Any]:
    site.proxy = site.enter_context(Proxy(one_server(site)[URL]))
    return {URL: site.proxy.url}


def with_rights(site: OutageSite) -> dict[str, Any]:
    one_server(site, users={USER: f"on >{PASSWORD} ~* &* +@all"})
    return {URL: site.store.url_as(USER, PASSWORD)}


def slow_to_load(site: OutageSite) -> dict[str, Any]:
    # One record after the other, with a reply to its clients after each.
    slow = {"key-load-delay": "25000", "loading-process-events-interval-bytes": "1024"}
    return one_server(site, {**DURABLE, **slow})


def with_rabbitmq(site: OutageSite) -> dict[str, Any]:
    return {**one_server(site), "broker_url": site.enter_context(RabbitMQ.start()).url}


def other_server(site: OutageSite, setting: str) -> dict[str, Any]:
    site.other = site.server(config=DURABLE)
    return {**one_server(site), setting: site.other.url}


def one_for_all(site: OutageSite) -> dict[str, Any]:
    """Broker, results and records are on one server."""
    url = one_server(site)[URL]
    # Unacknowledged messages of the outage are redelivered soon.
    redelivery = {"unacked_restore_interval": 1, "unacked_restore_throttle": 1}
    options = {"visibility_timeout": 6, **redelivery}
    return {
        URL: url,
        "broker_url": url,
        "result_backend": url,
        "broker_transport_options": options,
    }


def with_sentinels(site: OutageSite) -> dict[str, Any]:
    site.sentinels = site.enter_context(SentinelServers.start())
    options = {"master_name": site.sentinels.master_name}
    return {URL: site.sentinels.url, "idempotency_redis_options": options}


def in_cluster(site: OutageSite, config: Mapping[str, str] | None = None) -> dict[str, Any]:
    site.cluster = site.enter_context(ClusterServers.start(config=config))
    return {URL: site.cluster.url}


# Outages: each begins one, yields, and ends it when the store replies again.


@contextmanager
def killed(site: OutageSite) -> Iterator[None]:
    site.store.kill()
    yield
    site.store.restart()


@contextmanager
def other_killed(site: OutageSite) -> Iterator[None]:
    site.other.kill()
    yield
    site.other.restart()


@contextmanager
def frozen(site: OutageSite) -> Iterator[None]:
    site.store.pause()
    yield
    site.store.resume()


@contextmanager
def black_hole(site: OutageSite) -> Iterator[None]:
    site.proxy.black_hole()
    yield
    site.proxy.heal()


@contextmanager
def connections_cut(site: OutageSite) -> Iterator[None]:
    with _repeated(site.proxy.reset, 0.05):
        yield


@contextmanager
def scripts_flushed(site: OutageSite) -> Iterator[None]:
    with site.store.client() as client, _repeated(client.script_flush, 0.01):
        yield


@contextmanager
def out_of_memory(site: OutageSite) -> Iterator[None]:
    with site.store.client() as client:
        client.config_set("maxmemory", "1")
        yield
        client.config_set("maxmemory", "0")


@contextmanager
def disk_full(site: OutageSite) -> Iterator[None]:
    """No file of the server can grow: like a full disk, but for this server only."""
    with site.store.client() as client:
        pid = client.info("server")["process_id"]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        yield
        assert client.info("persistence")["aof_last_write_status"] == "err"
        no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, no_limit)


@contextmanager
def read_only(site: OutageSite) -> Iterator[None]:
    """The server becomes a replica, as after a failover that its clients do not notice."""
    with site.store.client() as client:
        client.replicaof("127.0.0.1", "1")  # which does not exist, so the records stay
        yield
        client.replicaof("NO", "ONE")


@contextmanager
def busy(site: OutageSite) -> Iterator[None]:
    """Another client runs a script that does not end."""

    def run(client: Redis) -> None:
        with suppress(RedisError):  # it is killed
            client.eval("while true do end", 0)

    with site.store.client(socket_timeout=None) as client, site.store.client() as other:
        client.config_set("lua-time-limit", "100")
        script = threading.Thread(target=run, args=(client,), daemon=True)
        script.start()
        yield
        other.script_kill()
        script.join()


@contextmanager
def rights_revoked(site: OutageSite) -> Iterator[None]:
    with site.store.client() as client:
        client.execute_command("ACL", "SETUSER", USER, "-@all")
        yield
        client.execute_command("ACL", "SETUSER", USER, "+@all")


@contextmanager
def no_more_clients(site: OutageSite) -> Iterator[None]:
    """All connections are closed, and no new ones are accepted."""
    with site.store.client() as client:
        limit = client.config_get("maxclients")["maxclients"]
        client.config_set("maxclients", 1)
        client.client_kill_filter(_type="normal", skipme=True)
        yield
        client.config_set("maxclients", limit)


@contextmanager
def no_descriptors(site: OutageSite) -> Iterator[None]:
    """The worker loses its connections, and has no descriptor for new ones."""
    pids = [pid for each in site.workers.values() for pid in with_children(each.process.pid)]
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids}
    for pid, (_, most) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, most))
    with site.store.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    yield
    for pid, limit in limits.items():
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)


@contextmanager
def loading(site: OutageSite) -> Iterator[None]:
    """The restarted server takes long to load its records."""
    with site.store.client() as client:
        client.bgrewriteaof()  # the delay applies to snapshots
        while client.info("persistence")["aof_rewrite_in_progress"]:
            time.sleep(0.01)
    with killed(site):
        yield
    with site.store.client() as client:
        scripts = client.info("commandstats").get("cmdstat_evalsha", {"rejected_calls": 0})
    assert scripts["rejected_calls"], "no script got the reply LOADING"


@contextmanager
def restored(site: OutageSite) -> Iterator[None]:
    """The server is restored from a snapshot that lacks the last seconds."""
    with site.store.client() as client:
        client.save()
    yield
    site.store.kill()
    site.store.restart()


@contextmanager
def failed_over(site: OutageSite) -> Iterator[None]:
    site.sentinels.failover()
    yield
    site.sentinels.rejoin()


@contextmanager
def master_killed(site: OutageSite) -> Iterator[None]:
    site.cluster.kill_master_of("any")
    yield


@contextmanager
def cluster_down(site: OutageSite) -> Iterator[None]:
    """A master is killed, and its replica does not take over."""
    master, replica = site.cluster.master_of("any"), site.cluster.replica_of("any")
    with replica.client() as client:
        client.config_set("cluster-replica-no-failover", "yes")
    master.kill()
    yield
    master.restart()


@contextmanager
def _repeated(action: Callable[[], object], interval: float) -> Iterator[None]:
    """Calls `action` every `interval` seconds during the block."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(interval):
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
