"""The payments demo, with a real server, a real worker and a real kill."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent import KeyReusedError
from celery_idempotent.testing.server import RedisServer, RedisServerError
from examples.payments import cli, make_events
from examples.payments.events import EVENTS_FILE, Deliveries, Delivery, Payment
from examples.payments.kill import Kill
from examples.payments.ledger import Charge
from examples.payments.publisher import Reply
from examples.payments.tasks import LEASE_SECONDS
from examples.payments.verdict import Evidence, differences

pytestmark = pytest.mark.exhaustive

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_SECONDS = 60


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.payments", *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )


@pytest.mark.worker
@pytest.mark.slow
@pytest.mark.xdist_group
class TestRun:
    def test_charges_each_event_exactly_once(self) -> None:
        run = run_demo("--json")

        report: dict[str, Any] = json.loads(run.stdout)
        assert report["differences"] == []
        assert run.returncode == 0, run.stderr
        assert report["charges"] == report["events"] == 200
        assert report["rejected_reuse"] == report["expected_rejections"] >= 1
        assert report["kills"] == {"during_charge": 1, "after_commit": 1}
        assert report["takeovers"] == 2
        assert report["charges_of_message_killed_after_commit"] == 1
        assert report["recovery_seconds"] < LEASE_SECONDS
        assert report["conflicts"] >= 1
        # The message whose charge was committed before the kill has charged, and replayed.
        assert (
            report["charges"] + report["replays"] + report["rejected_reuse"]
            == report["deliveries"] + 1
        )
        assert all(total["ledger"] == total["expected"] for total in report["totals"].values())
        assert run.stderr == ""

    def test_shows_the_double_charges_of_a_plain_task(self) -> None:
        run = run_demo("--plain")

        assert run.returncode == 1
        assert "with a plain celery.Task" in run.stdout
        assert "events were charged more than once" in run.stdout
        assert "right after the COMMIT of a charge, charged again" in run.stdout
        assert "This is what plain Celery does" in run.stdout
        assert "Traceback" not in run.stdout + run.stderr

    def test_counts_in_shadow_the_double_charges_that_the_ledger_has(self) -> None:
        run = run_demo("--shadow", "--json")

        report: dict[str, Any] = json.loads(run.stdout)
        assert report["differences"] == []
        assert run.returncode == 0, run.stderr
        assert report["would_have_prevented"] == report["double_charges"] == 228
        assert report["would_refuse"] == 1
        assert report["kills"] == {"during_charge": 1, "after_commit": 0}
        assert report["charges"] == report["deliveries"] == 428
        assert report["signals"]["would_take_over"] == 1
        assert report["replays"] == report["conflicts"] == report["takeovers"] == 0
        assert run.stderr == ""


class TestErrors:
    """An error is one sentence on stderr and exit code 2."""

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "holds no events"),
            ("{}\n", "line 1: an event needs id"),
            ("\nnot json\n", "line 2: not JSON"),
        ],
    )
    def test_an_invalid_events_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
    ) -> None:
        file = tmp_path / "events.jsonl"
        file.write_text(content)

        assert cli.main(["--events", str(file)]) == cli.COULD_NOT_RUN
        assert message in capsys.readouterr().err

    def test_a_missing_events_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["--events", str(tmp_path / "none")]) == cli.COULD_NOT_RUN
        assert "cannot be read" in capsys.readouterr().err

    def test_a_server_that_cannot_be_started(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def start(_: RedisServer) -> None:
            raise RedisServerError("No server here [none].")

        monkeypatch.setattr(RedisServer, "__init__", start)

        assert cli.main([]) == cli.COULD_NOT_RUN
        assert capsys.readouterr().err == "No server here [none].\n"

    def test_ctrl_c(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def start(_: RedisServer) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(RedisServer, "__init__", start)

        assert cli.main([]) == cli.INTERRUPTED
        assert capsys.readouterr().err.startswith("Interrupted")


class TestEvents:
    def test_the_file_is_what_the_generator_makes(self) -> None:
        made = list(make_events.Provider(make_events.SEED).history())

        assert [json.loads(line) for line in EVENTS_FILE.read_text().splitlines()] == made


class TestVerdict:
    """Checks made-up evidence, because a successful run has no differences."""

    book = Payment("evt_book", "cus_1", 1_500, "eur")
    lamp = Payment("evt_lamp", "cus_2", 4_000, "usd")
    forged_lamp = replace(lamp, amount=9_999)

    @pytest.fixture
    def good(self) -> Evidence:
        payments = (self.book, self.lamp, self.book, self.forged_lamp)
        deliveries = Deliveries([Delivery(line, paid) for line, paid in enumerate(payments, 1)])
        receipts: dict[str, dict[str, Any]] = {
            "evt_book": {"charge": "ch_1"},
            "evt_lamp": {"charge": "ch_2"},
        }
        return Evidence(
            deliveries=deliveries,
            replies=[
                *(Reply(sent, receipts[sent.payment.event_id]) for sent in deliveries[:3]),
                Reply(deliveries[3], KeyReusedError("rejected")),
            ],
            charges=[charge("ch_1", self.book), charge("ch_2", self.lamp)],
            signals=Counter(),
            kill=Kill("evt_book", 1, 0.0),
            recovery_seconds=0.1,
            seconds=1.0,
        )

    def test_a_correct_run_has_no_differences(self, good: Evidence) -> None:
        assert differences(good) == []

    def test_finds_a_double_charge_that_shadow_has_not_counted(self, good: Evidence) -> None:
        again = replace(charge("ch_3", self.book), task_id="t-3")
        shadow = replace(good, charges=[*good.charges, again], preventable=["t-3"])

        assert differences(shadow) == []
        assert differences(replace(shadow, preventable=[])) == [
            "0 charges would have been prevented, but the ledger has 1 double ones.",
            "Without those: 1 event was charged more than once: evt_book 2 times.",
            "Without those: The ledger holds 15.00 EUR too much.",
        ]

    @pytest.mark.parametrize(
        ("charges", "found"),
        [
            (
                [("ch_1", book), ("ch_2", lamp), ("ch_3", book)],
                [
                    "1 event was charged more than once: evt_book 2 times.",
                    "The ledger holds 15.00 EUR too much.",
                ],
            ),
            (
                [("ch_1", book)],
                ["1 event was never charged: evt_lamp.", "The ledger holds 40.00 USD too little."],
            ),
            (
                [("ch_1", book), ("ch_2", forged_lamp)],
                [
                    "evt_lamp was not charged as in its first delivery.",
                    "The ledger holds 59.99 USD too much.",
                ],
            ),
        ],
        ids=["a double charge", "a missing charge", "the forged amount"],
    )
    def test_finds_a_wrong_ledger(self, good: Evidence, charges: Any, found: list[str]) -> None:
        ledger = [charge(*each) for each in charges]

        assert differences(replace(good, charges=ledger)) == found

    @pytest.mark.parametrize(
        ("number", "outcome", "found"),
        [
            (
                2,
                {"charge": "ch_9"},
                "1 caller was given another receipt than the first caller: line 3, evt_book.",
            ),
            (
                0,
                TimeoutError("none"),
                "1 caller was left without a receipt: line 1, evt_book got TimeoutError('none').",
            ),
            (
                3,
                {"charge": "ch_2"},
                "1 delivery was accepted with a known id and other arguments: line 4, evt_lamp.",
            ),
        ],
        ids=["another receipt", "no receipt", "an accepted reuse"],
    )
    def test_finds_a_wrong_reply(
        self, good: Evidence, number: int, outcome: Any, found: str
    ) -> None:
        replies = [*good.replies]
        replies[number] = replace(replies[number], outcome=outcome)

        assert differences(replace(good, replies=replies)) == [found]


def charge(charge_id: str, payment: Payment) -> Charge:
    return Charge(charge_id, payment, token=None, attempt=None, task_id="t-1", pid=1)
