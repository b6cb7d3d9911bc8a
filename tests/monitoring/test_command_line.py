"""The commands ``celery -A shop idempotency …``, run on real records."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.core.record import steps
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.core.store.commands import LeaseExtension
from celery_idempotent.operations.cli import listing
from tests.monitoring.conftest import Shop, copy, list_json
from tests.monitoring.shop import URL_VARIABLE

ROOT = Path(__file__).parents[2]
LIST = [sys.executable, "-m", "celery", "-A", "tests.monitoring.shop", "idempotency", "list"]


class TestList:
    def test_prints_a_line_for_each_record(self, shop: Shop) -> None:
        shop.charge.apply((1, 999))
        shop.charge.apply((2, 13))
        shop.begin(shop.pack, 1)

        header, *lines = shop.celery("list").splitlines()

        assert header.split() == ["STATE", "ATTEMPT", "SINCE", "UNTIL", "TASK", "ID", "KEY"]
        assert sorted(line.split()[0] for line in lines) == ["COMPLETED", "FAILED", "STARTED"]
        (running,) = (line for line in lines if "STARTED" in line)
        assert "lease" in running
        assert str(shop.pack.idempotency_key_of(1)) in running

    def test_draws_a_table_as_fast_as_json(self, shop: Shop) -> None:
        copy(shop, 3_000)
        shop.celery("list", "--limit", "1")  # imports

        seconds = []
        for options in ((), ("--json",)):
            began_at = time.process_time()
            assert shop.celery("list", *options).count("COMPLETED") == 3_001
            seconds.append(time.process_time() - began_at)

        assert seconds[0] < 2 * seconds[1], seconds

    def test_applies_filters(self, shop: Shop) -> None:
        shop.charge.apply((1, 999))
        shop.charge.apply((2, 13))

        assert [record["state"] for record in list_json(shop, "--state", "failed")] == ["FAILED"]
        assert len(list_json(shop, "--task", "shop.charge", "--limit", "1")) == 1
        assert list_json(shop, "--older-than", "2h") == []
        for option in ("--task", "--label", "--text"):
            for absent in ("shop.nothing", "\udcff"):
                assert "No matching records" in shop.celery("list", option, absent)
        assert "write 90s, 10m, 2h or 1d" in shop.celery("list", "--older-than", "soon", code=2)
        assert "is too long" in shop.celery("list", "--older-than", "9999999999d", code=2)

    def test_watch_prints_the_newest_records_until_it_is_interrupted(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refreshes = 0

        def sleep(seconds: float) -> None:
            nonlocal refreshes
            refreshes += 1
            if refreshes == 3:
                raise KeyboardInterrupt
            shop.charge.apply((refreshes, 999))

        monkeypatch.setattr(listing, "sleep", sleep)
        output = shop.celery("list", "--watch", "0.5", "--limit", "1")

        assert "no records" in output
        assert "1 COMPLETED" in output
        assert "2 COMPLETED" in output
        *_, last, caption = (line for line in output.splitlines() if line.strip())
        assert str(shop.charge.idempotency_key_of(2, 999)) in last
        assert "2 COMPLETED" in caption
        assert "cannot be combined" in shop.celery("list", "--watch", "1", "--json", code=2)

    @pytest.mark.exhaustive
    def test_watch_refreshes_a_terminal_until_it_is_interrupted(self, shop: Shop) -> None:
        controller, terminal = pty.openpty()
        command = [*LIST, "--watch", "0.1"]
        env = os.environ | {URL_VARIABLE: shop.url, "TERM": "xterm", "COLUMNS": "150"}
        screen = b""

        def read_until(text: bytes) -> None:
            """Reads until `text` appears; the timeout of the test is the limit."""
            nonlocal screen
            while text not in screen:
                screen += os.read(controller, 4096)

        with subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=terminal, stdout=terminal,
            # A shell ignores SIGINT for what it runs in the background, and so do the children.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        ) as process:  # fmt: skip
            try:
                read_until(b"no records")
                shop.charge.apply((1, 999))
                read_until(b"1 COMPLETED")
                process.send_signal(signal.SIGINT)
                assert process.wait() == 0
            finally:
                process.kill()
        os.close(controller)
        os.close(terminal)

    @pytest.mark.parametrize("body", ["Znewer", ""])
    def test_shows_an_unreadable_record_as_corrupt(self, shop: Shop, body: str) -> None:
        shop.client.set("idem:shop.charge:" + "x" * 22, body)

        key = {"key": f"shop.charge:{'x' * 22}", "explicit": False, "task": "shop.charge"}
        assert list_json(shop) == list_json(shop, "--state", "corrupt")
        assert list_json(shop) == [{**key, "state": "CORRUPT"}]
        assert "CORRUPT" in shop.celery("list")
        assert "CORRUPT" not in shop.celery("list", "--state", "COMPLETED")

    @pytest.mark.parametrize("command", ["scan", "getrange", "pttl", "time"])
    def test_a_refused_command_is_not_a_corrupt_record(self, shop: Shop, command: str) -> None:
        shop.charge.apply((1, 999))

        with shop.limited(f"-{command}") as limited:
            output = limited.celery("list", code=1)

        assert output.startswith("Error: Redis replied with an error: ")
        assert f"'{command}'" in output

    @pytest.mark.exhaustive
    def test_a_closed_pipe_ends_it_without_an_error(self, shop: Shop) -> None:
        copy(shop, 3_000)
        shop.client.config_resetstat()

        command, env = f"{shlex.join(LIST)} | head -2", os.environ | {URL_VARIABLE: shop.url}
        captured: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
        result = subprocess.run(command, shell=True, cwd=ROOT, env=env, **captured)

        assert len(result.stdout.splitlines()) == 2
        assert result.stderr == ""
        assert "\x1b" not in result.stdout


class CodeError(Exception):
    """Does not pass its code to its base class, so that a decoded one has no code."""

    def __init__(self, code: str | None = None) -> None:
        super().__init__()
        self.code = code

    def __str__(self) -> str:
        assert self.code is not None
        return self.code


class TestShow:
    @pytest.mark.parametrize(
        "names",
        [
            *(("shop.charge", "[42]", '{"amount": 999}'), ("shop.charge", "[42, 999]")),
            *(("KEY",), ("idem:KEY",), ("[é] task id",)),
        ],
    )
    def test_finds_a_record_by_any_of_its_names(self, shop: Shop, names: tuple[str, ...]) -> None:
        shop.charge.apply((42, 999), task_id="[é] task id")
        key = str(shop.charge.idempotency_key_of(42, 999))

        shown = shop.json("show", *(name.replace("KEY", key) for name in names))

        assert (shown["key"], shown["task_id"]) == (key, "[é] task id")
        assert shown["result"] == {"order": 42, "amount": 999}

    @pytest.mark.parametrize("name", ["KEY", "pack:KEY"])
    def test_finds_a_record_whose_task_is_named_as_the_prefix(self, shop: Shop, name: str) -> None:
        def pack(size: int) -> str:
            return "x" * size

        shop.add_task(pack, "pack", key_prefix="pack").apply((2_000,))
        shop.client.set("pack:" + "x" * 22, "not a record")

        (listed,) = list_json(shop, "--task", "pack")
        shown = shop.json("show", name.replace("KEY", listed["key"]))

        assert shown["result"] == "x" * 2_000

    @pytest.mark.parametrize("name", ["KEY", "task-of-DIGEST"])
    def test_shows_all_steps_of_a_long_record(self, shop: Shop, name: str) -> None:
        key = shop.begin(shop.charge, 42, 999)
        lease = LeaseExtension(key, run_sync(shop.store.get(key)).token, 60_000, 0)
        for number in range(20):
            entry = steps.write(f"step-{number}", "json", b"x" * 100)
            assert run_sync(shop.store.execute(commands.extend(lease, entry))).case == "ok"

        output = shop.celery("show", name.replace("KEY", str(key)).replace("DIGEST", key.digest))

        assert all(f"step-{number}" in output for number in range(20))

    def test_shows_the_error_and_relative_times(self, shop: Shop) -> None:
        shop.charge.apply((42, 13))

        output = shop.celery("show", "shop.charge", "[42, 13]")

        assert "DeclinedError: order 42" in output
        assert " UTC, " in output
        assert re.search(r"kept until +.* UTC, in (1 d|23 h 59 min)", output)
        error = {"type": "DeclinedError", "message": "order 42"}
        assert shop.json("show", "shop.charge", "[42, 13]")["error"] == error

    @pytest.mark.parametrize(
        ("serializer", "result", "shown"),
        [
            ("json", [math.inf], "[inf]"),
            ("json", "half \ud800", "half \ud800"),
            ("msgpack", {"1": b"x"}, {"1": "b'x'"}),
        ],
        ids=["infinite", "lone-surrogate", "bytes"],
    )
    def test_prints_json_whatever_the_task_returned(
        self, shop: Shop, serializer: str, result: Any, shown: Any
    ) -> None:
        shop.app.conf.accept_content = ["json", "msgpack"]

        def give() -> Any:
            return result

        shop.add_task(give, "shop.give", serializer=serializer).apply()

        output = shop.celery("show", "shop.give", "--json")
        assert json.loads(output, parse_constant=pytest.fail)["result"] == shown
        assert shop.celery("show", "shop.give")

    @pytest.mark.parametrize("serializer", ["pickle", "yaml"])
    def test_decodes_only_json_and_msgpack(self, shop: Shop, serializer: str) -> None:
        shop.app.conf.accept_content = ["json", serializer]

        def give() -> str:
            return "decoded"

        task = shop.add_task(give, "shop.give", serializer=serializer)
        task.apply()

        text = shop.celery("show", "shop.give")

        assert "tools decode only JSON and msgpack, not application/x-" in text
        assert "decoded" not in shop.celery("show", "shop.give", "--json")
        assert task.idempotency_record().result == "decoded"

    def test_shows_the_type_of_an_error_whose_str_fails(self, shop: Shop) -> None:
        def lose() -> None:
            raise CodeError("code")

        shop.add_task(lose, "shop.lose", replay_errors=(CodeError,)).apply()

        assert "CodeError" in shop.celery("show", "shop.lose")
        assert shop.json("show", "shop.lose")["error"]["type"] == "CodeError"

    def test_shows_why_a_result_is_not_stored(self, shop: Shop) -> None:
        shop.pack.apply((1, 20_000))

        assert "idempotency_max_result_size" in shop.celery("show", "shop.pack", "[1, 20000]")

    def test_shows_a_takeover_and_the_lease(self, shop: Shop) -> None:
        shop.begin(shop.charge, 42, 999, attempt=2)

        output = shop.celery("show", "shop.charge", "[42, 999]")

        assert "2: 1 earlier execution died" in output
        assert "lease " in output
        assert "until " in output

    def test_reports_an_absent_record_in_one_line(self, shop: Shop) -> None:
        for names in (("shop.charge", "[1, 2]"), ("no-such-id",), ("shop.charge:" + "x" * 22,)):
            output = shop.celery("show", *names, code=1)
            assert len(output.splitlines()) == 1
            assert output.startswith("Error: ")

    def test_rejects_arguments_that_are_not_json(self, shop: Shop) -> None:
        assert "is not a JSON list" in shop.celery("show", "shop.charge", "42", code=2)
        assert "do not fit" in shop.celery("show", "shop.charge", "[]", code=2)
