"""The checks of `doctor` and their findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from celery import Celery, Task
from cryptography.fernet import Fernet
from kombu import Exchange, Queue
from sqlalchemy import create_engine

from celery_idempotent import TASK_ID
from celery_idempotent.core.configuration.broker import describe_redelivery
from celery_idempotent.errors import SettingsError
from celery_idempotent.operations import doctor
from celery_idempotent.operations.doctor import broker, server, tasks, versions
from tests.unit.conftest import charge, shop, task_in

#: A server without findings but for its replicas, which are not reported.
SOUND: dict[str, Any] = {
    "redis_version": "7.2.4",
    "maxmemory_policy": "noeviction",
    "maxmemory": 0,
    "used_memory": 1_000_000,
    "evicted_keys": 0,
    "write_error": "",
    "aof_enabled": 1,
    "save": "3600 1",
    "clock_ahead": 0.2,
}

#: No worker renews the visibility timeout.
BY_THE_BROKER: dict[str, Any] = {"idempotency_redeliver_after": None}

#: Of kombu, which looks for messages of dead workers often.
QUICK = {"visibility_timeout": 70, "unacked_restore_throttle": 1, "socket_timeout": 10}


def names(findings: Any) -> set[str]:
    return {finding.name for finding in findings}


def recovery(app: Celery) -> doctor.Finding:
    (finding,) = (each for each in broker.check(app) if each.name == "recovery")
    return finding


def only(findings: Any) -> doctor.Finding:
    (finding,) = findings
    assert isinstance(finding, doctor.Finding)
    assert "\n" not in finding.line
    return finding


class TestServer:
    def test_a_sound_server_has_no_findings(self) -> None:
        assert names(server.check(SOUND, "here")) == {"replicas"}

    @pytest.mark.parametrize(
        ("info", "name", "severity", "setting"),
        [
            ({"redis_version": "6.0.16"}, "server-version", "error", "6.2"),
            ({"maxmemory_policy": "allkeys-lru"}, "eviction", "warning", "noeviction"),
            ({"maxmemory_policy": "volatile-ttl"}, "eviction", "warning", "noeviction"),
            ({"maxmemory_policy": None}, "eviction", "note", "INFO"),
            ({"write_error": "OOM command not allowed"}, "writes-refused", "error", "maxmemory"),
            ({"maxmemory": 1_050_000}, "memory", "warning", "idempotency_result_ttl"),
            ({"evicted_keys": 1}, "evicted", "warning", "noeviction"),
            ({"aof_enabled": 0, "save": ""}, "persistence", "warning", "appendonly"),
            ({"aof_enabled": 0}, "persistence", "note", "appendonly"),
            ({"aof_enabled": 0, "save": None}, "persistence", "note", "provider"),
            ({"clock_ahead": 1.5}, "clocks", "warning", "NTP"),
            ({"clock_ahead": -1.5}, "clocks", "warning", "NTP"),
        ],
    )
    def test_weaknesses(self, info: dict[str, Any], name: str, severity: str, setting: str) -> None:
        findings = server.check(SOUND | info, "here")

        finding = only(f for f in findings if f.name == name)

        assert str(finding.severity) == severity
        assert setting in finding.setting

    def test_every_version_of_valkey_is_supported(self) -> None:
        valkey = SOUND | {"redis_version": "6.0.0", "valkey_version": "7.2.5"}

        assert "server-version" not in names(server.check(valkey, "here"))

    @pytest.mark.parametrize(
        ("replicas", "required", "severity", "what"),
        [(0, 0, "note", "no replica"), (2, 0, "note", "2"), (1, 2, "error", "1")],
    )
    def test_finds_replicas(self, replicas: int, required: int, severity: str, what: str) -> None:
        info = SOUND | {"connected_slaves": replicas}
        finding = only(server.check(info, "here", required_replicas=required))

        assert (finding.name, str(finding.severity)) == ("replicas", severity)
        assert what in finding.what

    def test_as_many_replicas_as_required_are_no_finding(self) -> None:
        info = SOUND | {"connected_slaves": 2}
        assert list(server.check(info, "here", required_replicas=2)) == []


class TestBroker:
    def test_a_visibility_timeout_below_the_longest_lease_is_found(self) -> None:
        app = shop(broker_transport_options={"visibility_timeout": 30}, **BY_THE_BROKER)
        task_in(app, idempotency_lease=29)
        assert list(broker.check_visibility_timeout(app)) == []

        task_in(app, name="shop.ship", idempotency_lease=31)
        finding = only(broker.check_visibility_timeout(app))
        assert "shop.ship" in finding.what
        assert "visibility_timeout" in finding.setting

    def test_the_recovery_time_and_the_expiry_of_the_sweeps_mutex_are_reported(self) -> None:
        default = shop(**BY_THE_BROKER)
        tuned = shop(broker_transport_options={"unacked_mutex_expire": 20}, **BY_THE_BROKER)
        task_in(default)
        task_in(tuned)

        assert "within 3700 s" in recovery(default).what
        assert "none for 300 s" in recovery(default).why
        assert "none for 20 s" in recovery(tuned).why
        assert "unacked_mutex_expire" in recovery(tuned).setting

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"result_ttl": 4000}, None),
            ({"result_ttl": 3600}, "idempotency_result_ttl (3600 s) is shorter than the broker's"),
            ({"result_ttl": 4000, "lease": 5000}, None),
            ({"result_ttl": 4000, "error_ttl": 60}, None),
            ({"error_ttl": 60, "replay_errors": (OSError,)}, "idempotency_error_ttl (60 s)"),
        ],
    )
    def test_a_short_retention_is_found(self, options: dict[str, Any], what: str | None) -> None:
        app = shop(**BY_THE_BROKER)
        task_in(app, **{f"idempotency_{name}": value for name, value in options.items()})

        found = [finding for finding in broker.check(app) if finding.name == "result-ttl"]

        assert [what in finding.what for finding in found if what] == [True] * bool(what)
        assert bool(found) == bool(what)

    @pytest.mark.parametrize(
        ("after", "lease", "timeout", "within"),
        [(60, 60, 3600, 62), (5, 60, 3600, 60), (5, 2, 3600, 7), (60, 2, 30, 32)],
    )
    def test_a_worker_that_renews_its_messages_recovers_sooner(
        self, after: float, lease: float, timeout: float, within: float
    ) -> None:
        app = shop(
            broker_transport_options={"visibility_timeout": timeout},
            idempotency_redeliver_after=after,
        )
        task_in(app, idempotency_lease=lease, idempotency_result_ttl=70)

        assert f"within {within} s" in recovery(app).what

    def test_without_a_visibility_timeout_no_time_is_reported(self) -> None:
        app = shop("amqp://guest:secret@localhost//")
        task_in(app, idempotency_result_ttl=1)

        finding = only(broker.check(app))
        assert finding.name == "publishers"
        assert "headers={'idempotency_key': …}" in finding.setting

    @pytest.mark.parametrize(
        ("url", "settings", "expected"),
        [
            ("redis://", {}, "60 s after its death (idempotency_redeliver_after)"),
            ("redis://", BY_THE_BROKER, "3600 s after their delivery (visibility_timeout)"),
            ("redis://", {"broker_transport_options": {"ack_emulation": False}}, "never"),
            ("redis://", {"broker_transport": "kombu.transport.memory:Transport"}, "as the trans"),
            ("sqs://", {}, "60 s after its death (idempotency_redeliver_after)"),
            ("amqp://", {}, "when the broker notices that its connection is lost"),
            ("filesystem://", {}, "as the transport 'filesystem' decides"),
        ],
    )
    def test_what_redelivers(self, url: str, settings: dict[str, Any], expected: str) -> None:
        app = shop(url, **settings)
        task_in(app)
        assert describe_redelivery(app).startswith(expected)
        assert "recovery" not in names(broker.check_redelivery(app))

        app.conf.idempotency_redeliver_after = 5
        has_effect = expected.startswith(("60 s", "3600 s"))
        assert ("recovery" in names(broker.check_redelivery(app))) is not has_effect

    def test_a_start_method_that_stalls_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert list(tasks.check_start_method()) == []

        monkeypatch.setattr("billiard.get_start_method", lambda **_: "forkserver")
        assert "start-method" in names(doctor.check_at_start(shop()))

    def test_messages_that_are_not_acknowledged_are_found(self) -> None:
        app = shop(task_queues=[Queue("orders"), Queue("mails", no_ack=True)])
        assert "no-ack" not in names(doctor.check_at_start(app))
        task_in(app)

        finding = only(each for each in doctor.check_at_start(app) if each.name == "no-ack")
        assert finding.subject == "queue mails"
        app.conf.broker_transport_options = {"ack_emulation": False}
        subjects = [each.subject for each in broker.check_redelivery(app)]
        assert subjects == ["queue orders", "queue mails"]

    def test_predefined_queues_of_sqs_need_the_option(self) -> None:
        url, options = "sqs://key:secret@", {"predefined_queues": {"celery": {"url": "https://…"}}}
        tuned = {**options, "visibility_timeout": 90}
        configured = shop(url, broker_transport_options=tuned, **BY_THE_BROKER)
        unconfigured = shop(url, broker_transport_options=options, **BY_THE_BROKER)
        task_in(configured)
        task_in(unconfigured)

        assert list(broker.check_visibility_timeout(configured)) == []
        assert "predefined_queues" in only(broker.check_visibility_timeout(unconfigured)).setting

    @pytest.mark.parametrize(
        ("url", "settings", "expected"),
        [
            ("redis://", {}, {"recovery", "socket-timeout"}),
            ("redis://", {"broker_transport_options": {"visibility_timeout": 70}},
             {"recovery", "sweep", "socket-timeout"}),
            ("redis://", {"broker_transport_options": QUICK}, {"recovery"}),
            ("amqp://", {}, {"publishers", "consumer-timeout"}),
            ("amqp://", {"broker_heartbeat": 0}, {"publishers", "heartbeat", "consumer-timeout"}),
        ],
    )  # fmt: skip
    def test_weaknesses(self, url: str, settings: dict[str, Any], expected: set[str]) -> None:
        app = shop(url, **settings, **BY_THE_BROKER)
        assert list(broker.check(app)) == [], "without tasks"
        task_in(app, time_limit=3600 if url == "amqp://" else None)

        assert names(broker.check(app)) == expected

    @pytest.mark.parametrize(
        ("exchange", "limit", "low"),
        [("topic", None, True), ("topic", -1, False), ("topic", 4, True), ("topic", 5, False),
         ("direct", -1, False)],
    )  # fmt: skip
    def test_quorum_queues_are_checked(self, exchange: str, limit: int | None, low: bool) -> None:
        arguments = {"x-queue-type": "quorum"}
        arguments |= {} if limit is None else {"x-delivery-limit": limit}
        bound_to = Exchange("orders", type=exchange)
        queue = Queue("orders", bound_to, "orders", queue_arguments=arguments)
        app = shop("amqp://guest:secret@localhost//", task_queues=[queue])
        task_in(app)

        found = {"delivery-limit"} if low else set()
        assert names(broker.check(app)) == {"publishers", "delayed-delivery", *found}


class Basket:
    """Has no canonical form."""


def by_hint(basket: Basket) -> None: ...
def of_any(a: Any, b: object, c: Sequence, d: Iterable = ()) -> None: ...  # type: ignore[type-arg]
def by_default(basket: Basket | None = Basket()) -> None: ...  # noqa: B008
def with_a_key(order_id: int, idempotency_key: str = "") -> None: ...


LABEL = {"idempotency_label": "order {order_id}"}
ENCRYPTED = {"idempotency_encryption_keys": (Fernet.generate_key(),)}


class TestTasks:
    def findings_of(self, function: Any = None, **options: Any) -> set[str]:
        app = shop()
        task_in(app, function, **options)
        return names(tasks.check(app))

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"acks_late": False}, "acks-late"),
            ({"reject_on_worker_lost": False}, "reject-on-worker-lost"),
            ({"ignore_result": True}, "ignore-result"),
            ({"idempotency_store_result": False}, "store-result"),
            ({"idempotency_fused_completion": False}, "fused-completion"),
            ({"idempotency_redis_url": "redis://localhost:1/7"}, "fused-completion"),
            ({"idempotency_on_store_error": "run"}, "fail-open"),
            ({"idempotency_enabled": False}, "disabled"),
            ({"idempotency_shadow": True}, "shadow"),
            ({**LABEL, **ENCRYPTED}, "label-in-clear"),
            ({"function": by_hint}, "not-canonical"),
            ({"function": by_default}, "not-canonical"),
            ({"function": with_a_key}, "key-argument"),
        ],
    )
    def test_a_weakening_option_is_found(self, options: dict[str, Any], name: str) -> None:
        assert self.findings_of(**options) == {name}

    @pytest.mark.parametrize(
        "options",
        [
            *({}, LABEL, ENCRYPTED, {"function": of_any}),
            {"function": by_hint, "idempotency_key": TASK_ID},
            {"function": by_hint, "idempotency_key": lambda basket: "one"},
        ],
    )
    def test_other_options_have_no_findings(self, options: dict[str, Any]) -> None:
        assert self.findings_of(**options) == set()

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({}, {"result-retry"}),
            ({"result_backend_always_retry": True}, set()),
            # These backends repeat nothing, whatever the setting is.
            ({"result_backend": None}, {"fused-completion"}),
            ({"result_backend": "cache+memory://"}, {"fused-completion"}),
        ],
    )
    def test_a_result_written_once(self, settings: dict[str, Any], expected: set[str]) -> None:
        app = shop()
        app.conf.update(settings)
        task_in(app, idempotency_transaction=create_engine("sqlite:///never-opened"))

        assert names(tasks.check(app)) == expected

    def test_a_periodic_task_needs_the_key_task_id(self) -> None:
        app = shop(beat_schedule={"nightly": {"task": "shop.tidy", "schedule": 60}})
        task_in(app, name="shop.tidy")
        task_in(app)

        finding = only(tasks.check(app))

        assert (finding.name, finding.subject) == ("periodic-key", "shop.tidy")
        assert "TASK_ID" in finding.setting

    def test_settings_of_the_worker_are_found(self) -> None:
        app = shop(task_always_eager=True, worker_deduplicate_successful_tasks=True)
        task_in(app)

        assert names(tasks.check(app)) == {"eager", "successful-tasks"}


def test_plain_tasks_with_options_are_found_and_reported_by_a_starting_worker() -> None:
    annotated = {"idempotency_until": "finished"}
    app = shop(task_annotations={"*": {"idempotency_lease": 5.0}, "shop.annotated": annotated})

    class Registered(Task):
        name = "shop.registered"
        idempotency_key = "order:{order_id}"

        def run(self, order_id: int) -> None: ...

    app.register_task(Registered())
    app.task(charge, name="shop.decorated", lazy=False, idempotency_key="order")
    app.task(charge, name="shop.annotated", lazy=False)
    app.task(charge, name="shop.plain", lazy=False)
    task_in(app)

    found = [each for each in doctor.check_at_start(app) if each.name == "no-base"]

    assert "no-base" in names(tasks.check(app))
    assert {str(each.severity) for each in found} == {"error"}
    assert {each.subject: each.what.partition(",")[0] for each in found} == {
        "shop.annotated": "it has idempotency_until",
        "shop.decorated, shop.registered": "it has idempotency_key",
    }
    assert all("base=IdempotentTask" in each.setting for each in found)


class TestReport:
    @pytest.fixture
    def app(self) -> Celery:
        app = shop()
        for name in ("shop.charge", "shop.index", "shop.ship"):
            task_in(app, name=name, ignore_result=True)
        task_in(app, name="shop.tidy", acks_late=False)
        return app

    def reported(self, app: Celery) -> dict[str, str]:
        about_tasks = {"ignore-result", "acks-late"}
        return {f.name: f.subject for f in doctor.check_configuration(app) if f.name in about_tasks}

    def test_a_finding_of_several_tasks_is_one_behind_more_severe_ones(self, app: Celery) -> None:
        found = self.reported(app)

        assert list(found) == ["acks-late", "ignore-result"]
        assert found["ignore-result"] == "shop.charge, shop.index, shop.ship"

    def test_an_ignored_finding_is_left_out(self, app: Celery) -> None:
        app.conf.idempotency_doctor_ignore = ["ignore-result:shop.index", "acks-late"]
        assert self.reported(app) == {"ignore-result": "shop.charge, shop.ship"}

        app.conf.idempotency_doctor_ignore = ["ignore-result"]
        assert self.reported(app) == {"acks-late": "shop.tidy"}

    def test_a_worker_does_not_warn_of_an_ignored_one(self, app: Celery) -> None:
        app.conf.broker_transport_options = {"visibility_timeout": 30}
        app.conf.idempotency_redeliver_after = None
        assert "visibility-timeout" in names(doctor.check_at_start(app))

        app.conf.idempotency_doctor_ignore = ["visibility-timeout:broker"]
        assert "visibility-timeout" not in names(doctor.check_at_start(app))

    @pytest.mark.parametrize("value", ["acks-late", [1]])
    def test_a_setting_that_is_no_list_of_names_is_refused(self, app: Celery, value: Any) -> None:
        app.conf.idempotency_doctor_ignore = value

        with pytest.raises(SettingsError, match="idempotency_doctor_ignore must be a list"):
            doctor.check_configuration(app)


def test_what_the_workers_have_counted_is_checked() -> None:
    found = tasks.check_counts(
        {
            "shop.charge": {"run": 7, "refused": 3, "refused_key_rule": 2, "refused_reused": 1},
            "shop.ship": {"would_refuse_key_rule": 1},
            "shop.tidy": {"run": 1, "refused_poisoned": 1},
        }
    )

    assert [(f.name, f.subject, str(f.severity)) for f in found] == [
        ("rule-raised", "shop.charge", "error"),
        ("key-reused", "shop.charge", "warning"),
        ("rule-raised", "shop.ship", "warning"),
        ("poisoned", "shop.tidy", "error"),
    ]


def test_old_versions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(versions.check()) == []
    monkeypatch.setattr(versions, "installed", lambda: {"celery": "5.2.7", "redis": "5.0.1"})

    assert "celery 5.2.7 is too old" in only(versions.check()).what


def test_threads_that_inherit_a_context_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "THREADS_INHERIT_CONTEXT", True)

    assert only(versions.check()).setting == "PYTHON_THREAD_INHERIT_CONTEXT=0"


@pytest.mark.parametrize(
    ("kombu", "redis", "refused"),
    [
        ("5.6.2", "4.6.0", False),
        ("5.6.2", "8.0.1", False),
        ("5.7.0", "5.2.1", True),
        ("5.7.0", "6.4.0", False),
        ("5.10.0", "5.2.1", True),
    ],
)
def test_a_redis_that_kombu_refuses_is_found(
    monkeypatch: pytest.MonkeyPatch, kombu: str, redis: str, refused: bool
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: {"kombu": kombu, "redis": redis})

    found = [(finding.setting, finding.why) for finding in versions.check()]

    assert found == [("pip install 'redis>=6.4'", f"kombu {kombu} cannot use it")] * refused


def test_an_unreachable_server_is_one_line() -> None:
    app = shop(idempotency_redis_url="redis://127.0.0.1:1/0")
    task_in(app)

    found = [each for each in doctor.check_at_start(app) if each.name == "store-unreachable"]

    assert "idempotency_redis_url" in only(found).line


def test_an_execution_under_an_expired_lease_is_found() -> None:
    lease = {"task": "shop.ship", "pid": 7, "worker": "celery@here/7"}
    leases = [lease | {"heartbeat": heartbeat} for heartbeat in ("healthy", "late")]
    assert list(tasks.check_leases(leases)) == []

    finding = only(tasks.check_leases([*leases, lease | {"heartbeat": "expired"}]))
    assert (finding.name, finding.subject) == ("lease-expired", "shop.ship")
    assert "1 execution under an expired lease: celery@here/7" in finding.what
