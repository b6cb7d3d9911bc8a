"""The checks: what they look at, and what they have to say."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_idempotent import TASK_ID, IdempotentTask
from celery_idempotent.doctor import Finding, broker, server, tasks, versions
from celery_idempotent.store.server_info import ServerInfo

#: Nothing to find.
SOUND = ServerInfo(
    flavour="redis",
    version=(7, 2, 4),
    maxmemory_policy="noeviction",
    maxmemory=0,
    append_only=True,
    snapshots="3600 1",
    replicas=None,
    clock_ahead=0.2,
)


def names(findings: Any) -> set[str]:
    return {finding.name for finding in findings}


def told(findings: Any) -> Finding:
    (finding,) = findings
    assert isinstance(finding, Finding)
    assert "\n" not in finding.line
    return finding


class TestServer:
    def test_that_is_sound(self) -> None:
        assert names(server.check(SOUND, "here")) == {"replicas"}

    @pytest.mark.parametrize(
        ("fact", "name", "severity", "setting"),
        [
            ({"version": (6, 0, 16)}, "server-version", "error", "6.2"),
            ({"maxmemory_policy": "allkeys-lru"}, "eviction", "warning", "noeviction"),
            ({"maxmemory_policy": "volatile-ttl"}, "eviction", "warning", "noeviction"),
            ({"maxmemory_policy": None}, "eviction", "note", "INFO"),
            ({"append_only": False, "snapshots": ""}, "persistence", "warning", "appendonly"),
            ({"append_only": False}, "persistence", "note", "appendonly"),
            ({"append_only": False, "snapshots": None}, "persistence", "note", "CONFIG"),
            ({"clock_ahead": 1.5}, "clocks", "warning", "NTP"),
            ({"clock_ahead": -1.5}, "clocks", "warning", "NTP"),
        ],
    )
    def test_that_is_not(
        self, fact: dict[str, Any], name: str, severity: str, setting: str
    ) -> None:
        findings = server.check(replace(SOUND, **fact), "here")

        found = told(one for one in findings if one.name == name)

        assert str(found.severity) == severity
        assert setting in found.setting

    def test_any_valkey_is_new_enough(self) -> None:
        valkey = replace(SOUND, flavour="valkey", version=(7, 2, 5))

        assert "server-version" not in names(server.check(valkey, "here"))

    @pytest.mark.parametrize("replicas", [0, 2])
    def test_replicas(self, replicas: int) -> None:
        (found,) = server.check(replace(SOUND, replicas=replicas), "here")
        assert str(replicas or "no replica") in found.what

    def test_replicas_that_are_waited_for(self) -> None:
        assert names(server.check(replace(SOUND, replicas=2), "here", waits_for=2)) == set()
        found = told(server.check(replace(SOUND, replicas=1), "here", waits_for=2))
        assert (found.name, str(found.severity)) == ("replicas", "error")


def shop(broker_url: str = "redis://localhost:1/0", **settings: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.finalized = True  # else it would have the shared tasks of all other tests as well
    app.conf.update(broker_url=broker_url, result_backend="redis://localhost:1/0", **settings)
    return app


def add(app: Celery, function: Any = None, *, name: str = "shop.charge", **options: Any) -> None:
    def charge(order_id: int, amount: int = 0) -> None: ...

    app.task(
        function or charge, base=IdempotentTask, name=name, lazy=False, shared=False, **options
    )


class TestBroker:
    def test_a_visibility_timeout_below_the_longest_lease(self) -> None:
        app = shop(broker_transport_options={"visibility_timeout": 30})
        add(app, idempotency_lease=29)
        assert list(broker.visibility(app)) == []

        add(app, name="shop.ship", idempotency_lease=31)
        found = told(broker.visibility(app))
        assert "shop.ship" in found.what
        assert "visibility_timeout" in found.setting

    def test_the_sweep(self) -> None:
        slow = shop(broker_transport_options={"visibility_timeout": 70})
        quick = shop(
            broker_transport_options={"visibility_timeout": 70, "unacked_restore_throttle": 1}
        )
        add(slow)
        add(quick)

        assert names(broker.check(slow)) == {"recovery", "sweep"}
        assert names(broker.check(quick)) == {"recovery"}

    def test_how_long_a_recovery_takes(self) -> None:
        app = shop()
        add(app)

        assert "within 3700 s" in told(broker.check(app)).what

    def test_how_long_it_takes_where_a_worker_dies_amid_the_sweep(self) -> None:
        careless = shop()
        careful = shop(broker_transport_options={"unacked_mutex_expire": 20})
        add(careless)
        add(careful)

        assert "none for 300 s" in told(broker.check(careless)).why
        assert "none for 20 s" in told(broker.check(careful)).why
        assert "unacked_mutex_expire" in told(broker.check(careful)).setting

    def test_a_broker_without_a_visibility_timeout(self) -> None:
        app = shop("amqp://guest:secret@localhost//")
        add(app)

        assert list(broker.check(app)) == []

    def test_queues_of_sqs_that_kombu_has_not_made(self) -> None:
        url, options = "sqs://key:secret@", {"predefined_queues": {"celery": {"url": "https://…"}}}
        told_of = shop(url, broker_transport_options={**options, "visibility_timeout": 90})
        untold = shop(url, broker_transport_options=options)
        add(told_of)
        add(untold)

        assert list(broker.visibility(told_of)) == []
        assert "predefined_queues" in told(broker.visibility(untold)).setting

    @pytest.mark.parametrize(
        ("exchange_type", "arguments", "found"),
        [
            ("topic", {}, {"delivery-limit"}),
            ("topic", {"x-delivery-limit": -1}, set()),
            ("direct", {"x-delivery-limit": -1}, {"delayed-delivery"}),
        ],
    )
    def test_quorum_queues(
        self, exchange_type: str, arguments: dict[str, int], found: set[str]
    ) -> None:
        queue = Queue(
            "orders",
            Exchange("orders", type=exchange_type),
            "orders",
            queue_arguments={"x-queue-type": "quorum", **arguments},
        )
        app = shop("amqp://guest:secret@localhost//", task_queues=[queue])
        add(app)

        assert names(broker.check(app)) == found


class TestTasks:
    def found(self, function: Any = None, **options: Any) -> set[str]:
        app = shop()
        add(app, function, **options)
        return names(tasks.check(app))

    def test_that_are_sound(self) -> None:
        assert self.found() == set()

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"acks_late": False}, "acks-late"),
            ({"reject_on_worker_lost": False}, "reject-on-worker-lost"),
            ({"ignore_result": True}, "ignore-result"),
            ({"idempotency_store_result": False}, "store-result"),
            ({"idempotency_on_store_error": "run"}, "fail-open"),
            ({"idempotency_enabled": False}, "disabled"),
        ],
    )
    def test_by_their_options(self, options: dict[str, Any], name: str) -> None:
        assert self.found(**options) == {name}

    def test_an_argument_without_canonical_form_and_no_key_rule(self) -> None:
        class Basket: ...

        def by_hint(basket: Basket) -> None: ...

        by_hint.__annotations__ = {"basket": Basket}

        def by_default(basket: Any = Basket()) -> None: ...  # noqa: B008

        assert self.found(by_hint) == {"not-canonical"}
        assert self.found(by_default) == {"not-canonical"}
        assert self.found(by_hint, idempotency_key=lambda basket: "one") == set()
        assert self.found(by_hint, idempotency_key=TASK_ID) == set()

    def test_a_periodic_task_that_goes_by_its_arguments(self) -> None:
        app = shop(beat_schedule={"nightly": {"task": "shop.tidy", "schedule": 60}})
        add(app, name="shop.tidy")
        add(app)

        found = told(tasks.check(app))

        assert (found.name, found.subject) == ("periodic-key", "shop.tidy")
        assert "TASK_ID" in found.setting

    def test_an_eager_app(self) -> None:
        app = shop(task_always_eager=True)
        add(app)

        assert names(tasks.check(app)) == {"eager"}


def test_versions_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(versions.check()) == []
    monkeypatch.setattr(versions, "installed", lambda: {"celery": "5.2.7", "redis": "5.0.1"})

    assert "celery 5.2.7 is too old" in told(versions.check()).what


def test_a_finding_is_one_line() -> None:
    error = SimpleNamespace(__str__=lambda: "away")

    assert "idempotency_redis_url" in server.away("here", error).line  # type: ignore[arg-type]
