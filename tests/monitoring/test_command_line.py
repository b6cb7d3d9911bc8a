"""``celery -A shop idempotency …``, each command on real records."""

from __future__ import annotations

import json
import math
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent import IdempotentTask
from celery_idempotent.cli import listing
from celery_idempotent.testing.server import RedisServer
from tests.monitoring.conftest import Shop
from tests.monitoring.shop import URL_VARIABLE, make_app
from tests.monitoring.test_records import copy

ROOT = Path(__file__).parents[2]
LIST = [sys.executable, "-m", "celery", "-A", "tests.monitoring.shop", "idempotency", "list"]

#: What a terminal is told: show another screen, and the former one again.
ENTERS_SCREEN, LEAVES_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


class TestList:
    def test_is_a_line_for_each_record(self, shop: Shop) -> None:
        shop.charge.apply((1, 999))
        shop.charge.apply((2, 13))
        shop.begin(shop.pack, 1)

        heads, *lines = shop.celery("list").splitlines()

        assert heads.split() == ["STATE", "TRY", "SINCE", "UNTIL", "TASK", "ID", "KEY"]
        assert sorted(line.split()[0] for line in lines) == ["COMPLETED", "FAILED", "STARTED"]
        (running,) = (line for line in lines if "STARTED" in line)
        assert "lease" in running
        assert str(shop.pack.idempotency_key_of(1)) in running

    def test_takes_filters(self, shop: Shop) -> None:
        shop.charge.apply((1, 999))
        shop.charge.apply((2, 13))

        assert [one["state"] for one in lines_of(shop, "--state", "failed")] == ["FAILED"]
        assert len(lines_of(shop, "--task", "shop.charge", "--limit", "1")) == 1
        assert lines_of(shop, "--older-than", "2h") == []
        assert shop.celery("list", "--task", "shop.nothing") == "No such records.\n"
        assert "write 90s, 10m, 2h or 1d" in shop.celery("list", "--older-than", "soon", code=2)
        assert "is longer than" in shop.celery("list", "--older-than", "9999999999d", code=2)

    def test_stays_and_shows_the_newest(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = 0

        def meanwhile(seconds: float) -> None:
            nonlocal looks
            looks += 1
            if looks == 3:
                raise KeyboardInterrupt
            shop.charge.apply((looks, 999))

        monkeypatch.setattr(listing, "sleep", meanwhile)
        seen = shop.celery("list", "--watch", "0.5", "--limit", "1")

        assert "no records" in seen
        assert "1 COMPLETED" in seen
        assert "2 COMPLETED" in seen
        *_, last, caption = (line for line in seen.splitlines() if line.strip())
        assert str(shop.charge.idempotency_key_of(2, 999)) in last
        assert "2 COMPLETED" in caption
        assert "for people" in shop.celery("list", "--watch", "1", "--json", code=2)

    def test_stays_on_a_terminal_until_it_is_interrupted(
        self, shop: Shop, server: RedisServer
    ) -> None:
        ours, its = pty.openpty()
        command = [*LIST, "--watch", "0.1"]
        env = os.environ | {URL_VARIABLE: server.url, "TERM": "xterm", "COLUMNS": "150"}
        screen = b""

        def until(text: bytes) -> None:
            """Read on; the timeout of a test is the limit."""
            nonlocal screen
            while text not in screen:
                screen += os.read(ours, 4096)

        with subprocess.Popen(command, cwd=ROOT, env=env, stdin=its, stdout=its) as process:
            until(b"no records")
            shop.charge.apply((1, 999))
            until(b"1 COMPLETED")
            process.send_signal(signal.SIGINT)
            until(LEAVES_SCREEN)
            assert process.wait() == 0
        os.close(ours)
        os.close(its)
        assert screen.startswith(ENTERS_SCREEN)

    def test_shows_what_cannot_be_read(self, shop: Shop) -> None:
        shop.client.set("idem:shop.charge:" + "x" * 22, "Znewer")

        (one,) = lines_of(shop)
        assert one == {"key": f"shop.charge:{'x' * 22}", "task": "shop.charge", "state": "CORRUPT"}
        assert "CORRUPT" in shop.celery("list")

    @pytest.mark.parametrize("right", ["scan", "getrange", "pttl", "time"])
    def test_takes_no_refusal_for_a_damaged_record(
        self, shop: Shop, server: RedisServer, right: str
    ) -> None:
        shop.charge.apply((1, 999))
        rules = f"reset on nopass ~* +@all -{right}".split()
        shop.client.execute_command("ACL", "SETUSER", "limited", *rules)
        limited = Shop(make_app(server.url.replace("redis://", "redis://limited@")), shop.client)

        said = limited.celery("list", code=1)
        limited.app.close()

        assert said.startswith("Error: Redis refuses: ")
        assert f"'{right}'" in said

    def test_has_stable_names_for_programs(self, shop: Shop) -> None:
        shop.charge.apply((1, 999))

        (one,) = lines_of(shop)

        assert list(one) == [
            *("key", "task", "state", "task_id", "worker", "token", "attempt"),
            *("started_at", "finished_at", "deadline", "expires_at"),
        ]

    def test_ends_quietly_when_nobody_reads_on(self, server: RedisServer, shop: Shop) -> None:
        shop.charge.apply((1, 999))
        copy(shop, 3_000)
        shop.client.config_resetstat()

        ended = subprocess.run(
            f"{shlex.join(LIST)} | head -2",
            shell=True,
            cwd=ROOT,
            env=os.environ | {URL_VARIABLE: server.url},
            capture_output=True,
            text=True,
            check=True,
        )

        assert len(ended.stdout.splitlines()) == 2
        assert ended.stderr == ""
        assert "\x1b" not in ended.stdout


def lines_of(shop: Shop, *words: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in shop.celery("list", *words, "--json").splitlines()]


class MuteError(Exception):
    """Keeps its code out of its arguments, and so has none when it is read back."""

    def __init__(self, code: str | None = None) -> None:
        super().__init__()
        self.code = code

    def __str__(self) -> str:
        assert self.code is not None
        return self.code


class TestShow:
    @pytest.mark.parametrize(
        "words",
        [
            ("shop.charge", "[42]", '{"amount": 999}'),
            ("shop.charge", "[42, 999]"),
            ("KEY",),
            ("idem:KEY",),
            ("the-task-id",),
        ],
    )
    def test_finds_a_record_by_any_of_its_names(self, shop: Shop, words: tuple[str, ...]) -> None:
        shop.charge.apply((42, 999), task_id="the-task-id")
        key = str(shop.charge.idempotency_key_of(42, 999))

        shown = shop.json("show", *(word.replace("KEY", key) for word in words))

        assert (shown["key"], shown["task_id"]) == (key, "the-task-id")
        assert shown["result"] == {"order": 42, "amount": 999}

    @pytest.mark.parametrize("name", ["KEY", "pack:KEY"])
    def test_finds_it_where_a_task_is_named_like_the_prefix(self, shop: Shop, name: str) -> None:
        def pack(size: int) -> str:
            return "x" * size

        options = {"name": "pack", "idempotency_key_prefix": "pack"}
        task = shop.app.task(pack, base=IdempotentTask, shared=False, lazy=False, **options)
        task.apply((2_000,))
        shop.client.set("pack:" + "x" * 22, "somebody else's")

        (listed,) = lines_of(shop, "--task", "pack")
        shown = shop.json("show", name.replace("KEY", listed["key"]))

        assert shown["result"] == "x" * 2_000

    def test_finds_it_by_the_calls_own_key(self, shop: Shop) -> None:
        shop.charge.apply((42, 999), idempotency_key="req-7f3a")

        assert shop.json("show", "shop.charge", "--key", "req-7f3a")["state"] == "COMPLETED"

    def test_tells_an_error_and_times_in_words(self, shop: Shop) -> None:
        shop.charge.apply((42, 13))

        told = shop.celery("show", "shop.charge", "[42, 13]")

        assert "DeclinedError: order 42" in told
        assert " UTC, " in told
        assert "from now" in told
        assert shop.json("show", "shop.charge", "[42, 13]")["error"] == {
            "type": "DeclinedError",
            "message": "order 42",
        }

    @pytest.mark.parametrize(
        ("result", "told"),
        [
            ([math.inf], "[inf]"),
            ({(1, 2): 3}, "{(1, 2): 3}"),
            ("half \ud800", "half \ud800"),
            ({1: b"x"}, {"1": "b'x'"}),
        ],
        ids=["infinite", "key", "half-a-letter", "bytes"],
    )
    def test_is_json_whatever_the_task_returned(self, shop: Shop, result: Any, told: Any) -> None:
        shop.app.conf.accept_content = ["json", "pickle"]

        def give() -> Any:
            return result

        options = {"name": "shop.give", "idempotency_serializer": "pickle"}
        give = shop.app.task(give, base=IdempotentTask, shared=False, lazy=False, **options)
        give.apply()

        shown = json.loads(shop.celery("show", "shop.give", "--json"), parse_constant=pytest.fail)

        assert shown["result"] == told
        assert shop.celery("show", "shop.give")

    def test_tells_of_an_error_that_cannot_tell_itself(self, shop: Shop) -> None:
        def lose() -> None:
            raise MuteError("code")

        options = {"name": "shop.lose", "idempotency_replay_errors": (MuteError,)}
        lose = shop.app.task(lose, base=IdempotentTask, shared=False, lazy=False, **options)
        lose.apply()

        assert "MuteError" in shop.celery("show", "shop.lose")
        assert shop.json("show", "shop.lose")["error"]["type"] == "MuteError"

    def test_tells_why_a_result_is_not_there(self, shop: Shop) -> None:
        shop.pack.apply((1, 20_000))

        assert "idempotency_max_result_size" in shop.celery("show", "shop.pack", "[1, 20000]")

    def test_tells_of_a_takeover_and_of_the_lease(self, shop: Shop) -> None:
        shop.begin(shop.charge, 42, 999, attempt=2)

        told = shop.celery("show", "shop.charge", "[42, 999]")

        assert "2: 1 execution died before" in told
        assert "until" in told

    def test_names_what_is_absent_in_one_line(self, shop: Shop) -> None:
        for words in (("shop.charge", "[1, 2]"), ("no-such-id",), ("shop.charge:" + "x" * 22,)):
            said = shop.celery("show", *words, code=1)
            assert len(said.splitlines()) == 1
            assert said.startswith("Error: ")

    def test_asks_for_json(self, shop: Shop) -> None:
        assert "is not a JSON list" in shop.celery("show", "shop.charge", "42", code=2)
        assert "do not fit" in shop.celery("show", "shop.charge", "[]", code=2)


class TestForget:
    def test_asks_first(self, shop: Shop) -> None:
        shop.charge.apply((42, 999))
        words = ("forget", "shop.charge", "[42, 999]")

        assert "Forget shop.charge:" in shop.celery(*words, answer="n\n", code=1)
        assert shop.charge.idempotency_record(42, 999) is not None
        assert "forgotten" in shop.celery(*words, answer="y\n")
        assert shop.charge.idempotency_record(42, 999) is None

    def test_leaves_a_running_one_alone_unless_forced(self, shop: Shop) -> None:
        key = str(shop.begin(shop.charge, 42, 999))

        assert shop.json("forget", key, "--yes", code=1) == [{"key": key, "case": "running"}]
        assert shop.charge.idempotency_record(42, 999) is not None
        assert shop.json("forget", key, "--yes", "--force") == [{"key": key, "case": "forgotten"}]
        assert shop.charge.idempotency_record(42, 999) is None

    def test_takes_one_whose_lease_is_over(self, shop: Shop) -> None:
        shop.begin(shop.charge, 42, 999, lease_ms=0)

        assert "forgotten" in shop.celery("forget", "shop.charge", "[42, 999]", "--yes")

    def test_many(self, shop: Shop) -> None:
        for number in range(3):
            shop.charge.apply((number, 13))
        shop.charge.apply((9, 999))

        said = shop.celery("forget", "--state", "FAILED", answer="y\n")

        assert "Forget 3 records?" in said
        assert [one["state"] for one in lines_of(shop)] == ["COMPLETED"]

    def test_takes_no_record_that_has_changed_meanwhile(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shop.charge.apply((42, 999))

        def run_again(*_: object, **__: object) -> None:
            shop.charge.idempotency_forget(42, 999)
            shop.charge.apply((42, 999))

        monkeypatch.setattr("click.confirm", run_again)

        assert "changed meanwhile" in shop.celery("forget", "shop.charge", "[42, 999]", code=1)
        assert shop.charge.idempotency_record(42, 999) is not None

    def test_takes_what_cannot_be_read_if_it_is_named(self, shop: Shop) -> None:
        key = "shop.charge:" + "x" * 22
        shop.client.set(f"idem:{key}", "Znewer")

        assert "forgotten" in shop.celery("forget", key, "--yes")
        assert not shop.client.exists(f"idem:{key}")

    def test_takes_what_is_in_the_depot_along(self, shop: Shop, tmp_path: Path) -> None:
        def scan() -> str:
            return "x" * 1_000

        task = shop.app.task(
            scan,
            base=IdempotentTask,
            name="shop.scan",
            shared=False,
            lazy=False,
            idempotency_max_result_size=10,
            idempotency_offload_backend=f"file://{tmp_path}",
        )
        task.apply()
        assert len(list(tmp_path.iterdir())) == 1

        assert "forgotten" in shop.celery("forget", "shop.scan", "--yes")
        assert list(tmp_path.iterdir()) == []

    def test_wants_to_know_which(self, shop: Shop) -> None:
        assert "name records, or choose" in shop.celery("forget", code=2)


class TestStats:
    def test_counts_by_task_and_state(self, shop: Shop) -> None:
        for number in range(3):
            shop.charge.apply((number, 999))
        shop.charge.apply((3, 13))
        shop.begin(shop.charge, 4, 999, attempt=2)
        shop.begin(shop.pack, 1, lease_ms=0)

        tasks = shop.json("stats", "--timeout", "0")["tasks"]

        charge, pack = tasks["shop.charge"], tasks["shop.pack"]
        assert charge["states"] == {
            "RESERVED": 0,
            "STARTED": 1,
            "COMPLETED": 3,
            "FAILED": 1,
            "CORRUPT": 0,
        }
        assert (charge["takeovers"], charge["lease_expired"]) == (1, 0)
        assert (pack["takeovers"], pack["lease_expired"]) == (0, 1)

    def test_measures_and_estimates(self, shop: Shop) -> None:
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
        assert 0 < charge["per_second"] <= 10, "what is younger than a second counts as one"

    def test_says_that_no_worker_has_answered(self, shop: Shop) -> None:
        shop.charge.apply((1, 999))

        assert "No worker has answered" in shop.celery("stats", "--timeout", "0.1")

    @pytest.mark.timeout(30)
    def test_does_not_wait_for_a_broker_that_says_nothing(self, shop: Shop) -> None:
        shop.charge.apply((1, 999))
        shop.app.conf.broker_transport_options = {"socket_timeout": 60}
        with socket.create_server(("127.0.0.1", 0)) as silent:
            shop.app.conf.broker_url = f"redis://127.0.0.1:{silent.getsockname()[1]}"

            assert "No worker has answered" in shop.celery("stats", "--timeout", "0.1")


class TestExplain:
    def test_tells_how_the_key_comes_about(self, shop: Shop) -> None:
        told = shop.json("explain", "shop.charge", "[42]", '{"amount": 999}')

        key = shop.charge.idempotency_key_of(42, 999)
        assert told["rule"] == "the template 'order:{order_id}'"
        assert told["arguments"] == [
            {"name": "order_id", "canonical": "i2a;", "at_default": False, "in_key": True},
            {"name": "amount", "canonical": "i3e7;", "at_default": False, "in_key": False},
            {"name": "currency", "canonical": "s3:EUR", "at_default": True, "in_key": False},
        ]
        assert (told["key"], told["fingerprint"]) == (str(key), key.fingerprint.hex())
        assert told["redis_name"] == f"idem:{key}"
        assert shop.celery("explain", "shop.charge", "[42, 999]").count("order:42") == 1

    def test_tells_what_a_call_would_meet(self, shop: Shop) -> None:
        assert meets(shop, "shop.charge", "[42, 999]") == "run"
        shop.charge.apply((42, 999))
        assert meets(shop, "shop.charge", "[42, 999]") == "replay"
        assert meets(shop, "shop.charge", "[42, 1000]") == "reused"
        shop.begin(shop.charge, 43, 999)
        assert meets(shop, "shop.charge", "[43, 999]") == "conflict"
        shop.begin(shop.charge, 44, 999, lease_ms=0)
        assert meets(shop, "shop.charge", "[44, 999]") == "taken over"
        shop.begin(shop.charge, 45, 999, lease_ms=0, attempt=5)
        assert meets(shop, "shop.charge", "[45, 999]") == "poisoned"
        shop.client.set(f"idem:{shop.charge.idempotency_key_of(46, 999)}", "Znewer")
        assert meets(shop, "shop.charge", "[46, 999]") == "corrupt"

    def test_tells_of_each_kind_of_rule(self, shop: Shop) -> None:
        assert shop.json("explain", "shop.pack", "[1]")["rule"] == "all arguments"
        assert "id of the message" in shop.json("explain", "shop.tidy", "--task-id", "x")["rule"]
        assert "give --task-id" in shop.celery("explain", "shop.tidy", code=2)
        own = shop.json("explain", "shop.charge", "[42, 999]", "--key", "req-7f3a")
        assert own["key"] == str(shop.charge.idempotency_key_of(idempotency_key="req-7f3a"))


def meets(shop: Shop, *words: str) -> str:
    case: str = shop.json("explain", *words)["meets"]["case"]
    return case


class TestDoctor:
    def test_finds_what_is_wrong_with_this_server(self, shop: Shop) -> None:
        told = shop.json("doctor", code=1)

        assert [one["name"] for one in told["findings"]].count("persistence") == 1
        assert len(told["stores"]) == 1, "two prefixes, one server"
        assert all(set(one) == FINDING for one in told["findings"])
        assert told["versions"]["celery"]
        assert "appendonly yes" in shop.celery("doctor", "--fail-on", "never")

    def test_takes_a_server_that_may_not_be_asked_for_one_that_does_not_tell(
        self, shop: Shop, server: RedisServer
    ) -> None:
        rules = ["reset", "on", "nopass", "~*", "+@all", "-info", "-config"]
        shop.client.execute_command("ACL", "SETUSER", "silenced", *rules)
        silenced = Shop(make_app(server.url.replace("redis://", "redis://silenced@")), shop.client)
        silenced.app.conf.task_always_eager = False

        findings = silenced.json("doctor", code=0)["findings"]
        silenced.app.close()

        assert {one["severity"] for one in findings} == {"note"}
        not_told = {one["name"] for one in findings if "does not tell" in one["what"]}
        assert not_told == {"server-version", "eviction", "persistence", "replicas"}

    def test_its_exit_code_is_as_wanted(self, shop: Shop) -> None:
        shop.app.conf.task_always_eager = False

        shop.celery("doctor", "--fail-on", "error")
        shop.celery("doctor", "--fail-on", "warning", code=1)


FINDING = {"name", "severity", "subject", "what", "setting", "why"}


def test_a_redis_that_is_away_is_one_line(shop: Shop) -> None:
    with RedisServer.start() as away:
        shop.app.conf.idempotency_redis_url = url = away.url.replace("://", "://:secret@")
    for command in (("list",), ("stats",), ("show", "shop.charge", "[1, 2]")):
        said = shop.celery(*command, code=1)
        assert len(said.splitlines()) == 1
        assert "cannot be reached" in said
        assert "secret" not in said
    assert "store-away" in shop.celery("doctor", "--json", code=1)
    assert url not in shop.celery("doctor", code=1)


def test_an_app_without_tasks_is_one_line(shop: Shop) -> None:
    shop.app.tasks.clear()

    assert "has no idempotent task" in shop.celery("list", code=1)


def test_libraries_that_are_missing_are_one_line(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.charge.apply((1, 999))
    monkeypatch.setitem(sys.modules, "humanize", None)

    assert "pip install 'celery-idempotent[cli]'" in shop.celery("list", code=1)
    assert len(lines_of(shop)) == 1
