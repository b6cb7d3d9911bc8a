"""The payments demo, with a real server, a real worker and a real kill."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
    command = [sys.executable, "-m", "examples.payments", *options]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": RUN_SECONDS}
    return subprocess.run(command, cwd=REPOSITORY, **how)


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
        ends = [report[name] for name in ("charges", "replays", "rejected_reuse")]
        assert sum(ends) == report["deliveries"] + 1
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

    @pytest.fixture
    def error_of(self, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
        """Runs the demo, which must return `code`; returns what it prints to stderr."""

        def error_of(*options: str, code: int = cli.COULD_NOT_RUN) -> str:
            assert cli.main(options) == code
            return capsys.readouterr().err

        return error_of

    def test_an_invalid_events_file(self, tmp_path: Path, error_of: Callable[..., str]) -> None:
        file = tmp_path / "events.jsonl"
        assert "cannot be read" in error_of("--events", str(file))
        for content, message in {
            "": "holds no events",
            "{}\n": "line 1: an event needs id",
            "\nnot json\n": "line 2: not JSON",
        }.items():
            file.write_text(content)
            assert message in error_of("--events", str(file))

    def test_a_server_that_cannot_be_started(self, error_of: Callable[..., str]) -> None:
        error = RedisServerError("No server here [none].")
        with patch.object(RedisServer, "__init__", side_effect=error):
            assert error_of() == "No server here [none].\n"

    def test_ctrl_c(self, error_of: Callable[..., str]) -> None:
        with patch.object(RedisServer, "__init__", side_effect=KeyboardInterrupt):
            assert error_of(code=cli.INTERRUPTED).startswith("Interrupted")


def test_the_file_of_events_is_what_the_generator_makes() -> None:
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
        receipts = {"evt_book": {"charge": "ch_1"}, "evt_lamp": {"charge": "ch_2"}}
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

    def test_finds_a_wrong_ledger(self, good: Evidence) -> None:
        double = "1 event was charged more than once: evt_book 2 times."
        missing = "1 event was never charged: evt_lamp."
        forged = "evt_lamp was not charged as in its first delivery."
        for payments, event, total in (
            ([self.book, self.lamp, self.book], double, "15.00 EUR too much"),
            ([self.book], missing, "40.00 USD too little"),
            ([self.book, self.forged_lamp], forged, "59.99 USD too much"),
        ):
            ledger = [charge(f"ch_{number}", paid) for number, paid in enumerate(payments, 1)]
            found = differences(replace(good, charges=ledger))
            assert found == [event, f"The ledger holds {total}."]

    def test_finds_a_wrong_reply(self, good: Evidence) -> None:
        none = "1 caller was left without a receipt: line 1, evt_book got TimeoutError('none')."
        another = "1 caller was given another receipt than the first caller: line 3, evt_book."
        reuse = "1 delivery was accepted with a known id and other arguments: line 4, evt_lamp."
        outcomes: list[tuple[int, Any, str]] = [
            *((0, TimeoutError("none"), none), (2, {"charge": "ch_9"}, another)),
            (3, {"charge": "ch_2"}, reuse),
        ]
        for number, outcome, found in outcomes:
            replies = [*good.replies]
            replies[number] = replace(replies[number], outcome=outcome)
            assert differences(replace(good, replies=replies)) == [found]


def charge(charge_id: str, payment: Payment) -> Charge:
    return Charge(charge_id, payment, token=None, attempt=None, task_id="t-1", pid=1)
