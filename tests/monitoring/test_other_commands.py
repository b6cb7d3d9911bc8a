"""The commands forget, stats, explain and doctor, and errors of all commands."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from celery_idempotent import IdempotentTask, signals
from tests.monitoring.conftest import Shop, list_json, received
from tests.monitoring.shop import URL_VARIABLE
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON

ROOT = Path(__file__).parents[2]


class TestForget:
    def test_asks_for_confirmation(self, shop: Shop) -> None:
        shop.charge.apply((42, 999))
        command = ("forget", "shop.charge", "[42, 999]")

        assert "Forget shop.charge:" in shop.celery(*command, answer="n\n", code=1)
        assert shop.charge.idempotency_record(42, 999) is not None
        assert "forgotten" in shop.celery(*command, answer="y\n")
        assert shop.charge.idempotency_record(42, 999) is None

    def test_is_logged_and_signalled(self, shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
        shop.charge.apply((42, 999))
        record = shop.charge.idempotency_record(42, 999)
        caplog.set_level("INFO", "celery_idempotent")

        with received(signals.forgotten) as sent:
            shop.celery("forget", record.key, "--yes")
            shop.celery("forget", record.key, code=1)

        (details,) = sent
        user = getpass.getuser()
        assert (details["sender"], details["user"]) == (shop.charge, user)
        assert (details["key"], details["task_id"]) == (record.key, record.task_id)
        (line,) = [line for line in caplog.messages if "forgotten" in line]
        assert line == (
            f"{record.key}: task {record.task_id} (attempt 1) is forgotten by {user!r} (COMPLETED)"
        )

    def test_keeps_a_running_record_unless_forced(self, shop: Shop) -> None:
        key = str(shop.begin(shop.charge, 42, 999))

        assert shop.json("forget", key, "--yes", code=1) == [{"key": key, "case": "running"}]
        assert shop.charge.idempotency_record(42, 999) is not None
        assert shop.json("forget", key, "--yes", "--force") == [{"key": key, "case": "forgotten"}]
        assert shop.charge.idempotency_record(42, 999) is None
        shop.begin(shop.charge, 42, 999, lease_ms=0)
        assert "forgotten" in shop.celery("forget", "shop.charge", "[42, 999]", "--yes")

    def test_forgets_all_records_that_a_filter_selects(self, shop: Shop) -> None:
        for number in range(3):
            shop.charge.apply((number, 13))
        shop.charge.apply((9, 999))

        output = shop.celery("forget", "--state", "FAILED", answer="y\n")

        assert "Forget 3 records?" in output
        assert [record["state"] for record in list_json(shop)] == ["COMPLETED"]

    def test_keeps_a_record_that_has_changed_meanwhile(self, shop: Shop) -> None:
        shop.charge.apply((42, 999))

        def run_again(*_: object, **__: object) -> None:
            shop.charge.idempotency_forget(42, 999)
            shop.charge.apply((42, 999))

        with patch("click.confirm", run_again):
            output = shop.celery("forget", "shop.charge", "[42, 999]", code=1)

        assert "has changed since" in output
        assert shop.charge.idempotency_record(42, 999) is not None

    def test_forgets_an_unreadable_record_by_its_key(self, shop: Shop) -> None:
        key = "shop.charge:" + "x" * 22
        shop.client.set(f"idem:{key}", "Znewer")

        assert "forgotten" in shop.celery("forget", key, "--yes")
        assert not shop.client.exists(f"idem:{key}")

    def test_requires_names_or_filters(self, shop: Shop) -> None:
        assert "name records, or select" in shop.celery("forget", code=2)


class TestStats:
    def test_counts_by_task_and_state(self, shop: Shop) -> None:
        for number in range(3):
            shop.charge.apply((number, 999))
        shop.charge.apply((3, 13))
        shop.begin(shop.charge, 4, 999, attempt=2)
        shop.begin(shop.pack, 1, lease_ms=0)

        tasks = shop.json("stats", "--timeout", "0")["tasks"]

        charge, pack = tasks["shop.charge"], tasks["shop.pack"]
        states = {"RESERVED": 0, "STARTED": 1, "COMPLETED": 3, "FAILED": 1, "CORRUPT": 0}
        assert charge["states"] == states
        assert (charge["takeovers"], charge["lease_expired"]) == (1, 0)
        assert (pack["takeovers"], pack["lease_expired"]) == (0, 1)

    def test_measures_a_sample_and_projects_the_size(self, shop: Shop) -> None:
        for number in range(10):
            shop.charge.apply((number, 999))
        names = list(shop.client.scan_iter("idem:*"))
        measured = sum(shop.client.memory_usage(name) or 0 for name in names)

        charge = shop.json("stats", "--timeout", "0")["tasks"]["shop.charge"]

        assert charge["bytes_total"] == pytest.approx(measured)
        assert charge["retention"] == 86400
        assert charge["bytes_projected"] == pytest.approx(
            charge["per_second"] * charge["retention"] * charge["bytes_per_record"]
        )
        assert 0 < charge["per_second"] <= 10, "an age below a second counts as a second"

    def test_reports_that_no_worker_replied(self, shop: Shop) -> None:
        shop.charge.apply((1, 999))

        assert "No worker replied" in shop.celery("stats", "--timeout", "0.1")

    @pytest.mark.timeout(30)
    def test_does_not_wait_for_a_broker_that_never_replies(self, shop: Shop) -> None:
        shop.charge.apply((1, 999))
        shop.app.conf.broker_transport_options = {"socket_timeout": 60}
        with socket.create_server(("127.0.0.1", 0)) as silent:
            shop.app.conf.broker_url = f"redis://127.0.0.1:{silent.getsockname()[1]}"

            assert "does not reply" in shop.celery("stats", "--timeout", "0.1")

    def test_names_a_broker_that_cannot_be_reached(self, shop: Shop) -> None:
        with RedisServer.start() as stopped:
            shop.app.conf.broker_url = stopped.url.replace("://", "://:secret@")

        output = shop.celery("stats", "--timeout", "0.1")
        what = findings(shop, *DOCTOR)["broker-unreachable"]["what"]

        assert f"{stopped.url.replace('://', '://:**@')}" in output
        for text in (output, what):
            assert "cannot be reached" in text
            assert "secret" not in text


class TestExplain:
    def test_shows_how_the_key_is_derived(self, shop: Shop) -> None:
        document = shop.json("explain", "shop.charge", "[42]", '{"amount": 999}')

        key = shop.charge.idempotency_key_of(42, 999)
        assert document["rule"] == "the template 'order:{order_id}'"
        assert document["arguments"] == [
            {"name": "order_id", "canonical": "i2a;", "at_default": False, "in_key": True},
            {"name": "amount", "canonical": "i3e7;", "at_default": False, "in_key": False},
            {"name": "currency", "canonical": "s3:EUR", "at_default": True, "in_key": False},
        ]
        assert (document["key"], document["fingerprint"]) == (str(key), key.fingerprint.hex())
        assert document["redis_name"] == f"idem:{key}"
        assert shop.celery("explain", "shop.charge", "[42, 999]").count("order:42") == 1

    def test_predicts_what_happens_to_the_call(self, shop: Shop) -> None:
        shop.charge.apply((42, 999))
        shop.begin(shop.charge, 43, 999)
        shop.begin(shop.charge, 44, 999, lease_ms=0)
        shop.begin(shop.charge, 45, 999, lease_ms=0, attempt=5)
        shop.client.set(f"idem:{shop.charge.idempotency_key_of(46, 999)}", "Znewer")

        for arguments, case in (
            *(("[41, 999]", "run"), ("[42, 999]", "replay"), ("[42, 1000]", "reused")),
            *(("[43, 999]", "conflict"), ("[44, 999]", "taken over")),
            *(("[45, 999]", "poisoned"), ("[46, 999]", "corrupt")),
        ):
            explained = shop.json("explain", "shop.charge", arguments)
            assert explained["prediction"]["case"] == case, arguments

    def test_quotes_the_error_of_a_rule_to_who_gave_the_arguments(self, shop: Shop) -> None:
        def rule(order: dict[str, str]) -> str:
            return order["tenant"]

        def ship(order: dict[str, str]) -> None: ...

        shop.add_task(ship, "shop.ship", key=rule)
        shop.add_task(ship, "shop.load", key="{order[tenant]}")
        for task, where in (
            ("shop.ship", "idempotency_key raised KeyError; it gets the arguments"),
            ("shop.load", "cannot fill {order[tenant]}: KeyError ('order' is of type dict)"),
        ):
            for command in ("explain", "show"):
                output = shop.celery(command, task, '[{"id": "4711"}]', code=1)
                assert where in output
                assert "(KeyError: 'tenant')" in output

    def test_describes_each_kind_of_rule(self, shop: Shop) -> None:
        assert shop.json("explain", "shop.pack", "[1]")["rule"] == "all arguments"
        assert "id of the message" in shop.json("explain", "shop.tidy", "--task-id", "x")["rule"]
        assert "give --task-id" in shop.celery("explain", "shop.tidy", code=2)


def findings(shop: Shop, *command: str, code: int = 1) -> dict[str, dict[str, str]]:
    """Returns what a command has found, by name."""
    return {each["name"]: each for each in shop.json(*command, code=code)["findings"]}


class TestDoctor:
    def test_prints_findings_about_the_server(self, shop: Shop) -> None:
        document = shop.json(*DOCTOR, code=1)

        assert [finding["name"] for finding in document["findings"]].count("persistence") == 1
        assert len(document["stores"]) == 1, "one server, although there are two prefixes"
        assert all(set(finding) == FINDING for finding in document["findings"])
        assert document["versions"]["celery"]
        assert "appendonly yes" in shop.celery(*DOCTOR, "--fail-on", "never")

    def test_finds_a_full_server(self, shop: Shop) -> None:
        before = shop.client.config_get("maxmemory")
        shop.client.config_set("maxmemory", 1_000_000)
        try:
            found = shop.json(*HEALTH, code=1)["findings"]
            configuration = findings(shop, *DOCTOR)
        finally:
            shop.client.config_set("maxmemory", before["maxmemory"])

        (refused,) = [finding for finding in found if finding["name"] == "writes-refused"]
        assert "maxmemory" in refused["what"]
        # Nothing runs with this configuration.
        assert configuration["writes-refused"] == refused
        assert "memory" in {finding["name"] for finding in found} - configuration.keys()
        assert shop.json(*HEALTH) == {"workers_answered": False, "findings": []}

    def test_notes_what_a_server_without_info_and_config_does_not_report(self, shop: Shop) -> None:
        with shop.limited("-info", "-config") as limited:
            limited.app.conf.task_always_eager = False
            found = findings(limited, *DOCTOR, code=0)

        assert {finding["severity"] for finding in found.values()} == {"note"}
        not_reported = {name for name in found if "does not report" in found[name]["what"]}
        assert not_reported == {"server-version", "eviction", "persistence", "replicas"}

    @pytest.mark.parametrize("right", ["-evalsha", "-set", "resetkeys"])
    def test_finds_a_user_without_a_right(self, shop: Shop, right: str) -> None:
        with shop.limited(right) as limited:
            assert "writes-refused" in findings(limited, *DOCTOR)

    def test_the_exit_code_depends_on_fail_on(self, shop: Shop) -> None:
        shop.app.conf.task_always_eager = False

        shop.celery(*DOCTOR, "--fail-on", "error")
        shop.celery(*DOCTOR, "--fail-on", "warning", code=1)

    def test_offline_it_connects_to_no_server(self, shop: Shop) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            url = f"redis://127.0.0.1:{listening.getsockname()[1]}"
            shop.app.conf.update(broker_url=url, result_backend=url, idempotency_redis_url=url)
            shop.app.conf.task_always_eager = False

            shop.celery("doctor", "--offline")
            with pytest.raises(BlockingIOError):
                listening.accept()

    def test_ignored_findings_have_a_name_that_exists(self, shop: Shop) -> None:
        output = shop.celery(*DOCTOR, "--ignore", "persistence", "--ignore", "eager:worker")
        assert "Ignored: persistence, eager:worker" in output
        shop.celery(*DOCTOR, "--ignore", "persistence", "--ignore", "eager:queue", code=1)
        for command in (DOCTOR, HEALTH):
            output = shop.celery(*command, "--ignore", "key-resused:shop.charge", code=1)
            assert "--ignore: no finding is named 'key-resused'; did you mean key-reused?" in output


def test_health_finds_that_no_worker_replied(shop: Shop) -> None:
    assert "No worker replied" in shop.celery("health", "--timeout", "0.1", code=1)
    assert "replied" in shop.celery("health", "--timeout", "0.1", "--ignore", "no-reply")


class TestKeys:
    @pytest.mark.exhaustive
    def test_a_snapshot_is_compared_with_other_code(self, shop: Shop, tmp_path: Path) -> None:
        file = tmp_path / "keys.json"
        celery = [sys.executable, "-m", "celery", "-A", "tests.monitoring.shop", "idempotency"]
        env = os.environ | {URL_VARIABLE: shop.url}
        command: dict[str, Any] = {"args": [*celery, "keys"], "cwd": ROOT, "env": env}
        file.write_bytes(subprocess.check_output(**command, timeout=SOON))

        assert file.read_text("utf-8") == shop.celery("keys"), "the same in another process"
        against = (*DOCTOR, "--against", str(file))
        assert CHANGES.isdisjoint(findings(shop, *against, "--fail-on", "never", code=0))

        shop.app.tasks.pop("shop.charge")

        @shop.app.task(base=IdempotentTask, name="shop.charge", shared=False, lazy=False)
        def charge(order_id: int, amount: int, currency: str = "EUR") -> None: ...

        shop.app.tasks.pop("shop.tidy")
        found = shop.json(*against, code=1)["findings"]
        changed = {f["name"]: f["subject"] for f in found if f["name"] in CHANGES}
        assert changed == {"keys-changed": "shop.charge", "task-removed": "shop.tidy"}
        assert "keys-changed: its keys differ" in shop.celery(*against, code=1)

    def test_another_file_is_refused_in_one_line(self, shop: Shop, tmp_path: Path) -> None:
        file = tmp_path / "keys.json"
        file.write_text('{"orders": []}')

        output = shop.celery(*DOCTOR, "--against", str(file), code=2)

        assert "was not written by 'celery idempotency keys'" in output.splitlines()[-1]
        assert "No such file" in shop.celery(*DOCTOR, "--against", str(tmp_path / "none"), code=2)


CHANGES = {"keys-changed", "keys-unknown", "task-removed"}

DOCTOR = ("doctor",)
#: Without waiting for workers.
HEALTH = ("health", "--timeout", "0")

FINDING = {"name", "severity", "subject", "what", "setting", "why"}


def test_an_unreachable_redis_is_reported_in_one_line(shop: Shop) -> None:
    with RedisServer.start() as stopped:
        shop.app.conf.idempotency_redis_url = url = stopped.url.replace("://", "://:secret@")
    for command in (("list",), ("stats",), ("show", "shop.charge", "[1, 2]")):
        output = shop.celery(*command, code=1)
        assert len(output.splitlines()) == 1
        assert "cannot be reached" in output
        assert "secret" not in output
    assert "store-unreachable" in shop.celery(*DOCTOR, "--json", code=1)
    assert url not in shop.celery(*DOCTOR, code=1)


def test_an_app_without_tasks_is_reported_in_one_line(shop: Shop) -> None:
    shop.app.tasks.clear()

    assert "has no idempotent task" in shop.celery("list", code=1)


@patch.dict(sys.modules, humanize=None)
def test_a_missing_library_is_reported_in_one_line(shop: Shop) -> None:
    shop.charge.apply((1, 999))

    assert "pip install 'celery-idempotent[cli]'" in shop.celery("list", code=1)
    assert len(list_json(shop)) == 1
