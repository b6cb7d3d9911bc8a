"""Any arguments of a script give a listed reply or an error, and every record expires."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from celery_idempotent.core.record import Payload, layout
from celery_idempotent.core.store import commands, run_sync, scripts
from celery_idempotent.core.store.commands import LeaseExtension
from celery_idempotent.errors import IdempotencyError, StoreUnavailableError
from tests.store import deployments
from tests.store.record_harness import FIRST, Harness, raw_record

NAMES = ("begin", "extend", "settle", "abandon", "queue", "forget")

steady = settings(
    derandomize=True,
    deadline=None,
    max_examples=50,
    # The test function runs once for each deployment.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)

GIVEN: dict[str, Callable[[Harness], Any]] = {
    "absent": lambda harness: None,
    "started": Harness.started,
    "with-a-step": lambda harness: harness.save_step(harness.started().token),
    "lapsed": lambda harness: harness.started(lease_ms=1),
    "reserved": Harness.reserved,
    "completed": Harness.completed,
    "failed": Harness.failed,
    "damaged": lambda harness: harness.put(b"A cut short"),
    "of-the-layout-before": lambda harness: harness.put(raw_record(b"S")),
    "a-turn": lambda harness: harness.put(bytes([6]) * 7 + b"another"),
    "newer": lambda harness: harness.put(raw_record(b"Z")),
    "at-the-end-of-numbers": lambda harness: harness.put(
        raw_record(attempt=255, token=2**56 - 1, at_ms=2**48 - 1)
    ),
}

#: Values that Lua and Redis may or may not read as numbers.
awkward = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(0, 100_000),
    st.floats().map(repr),
    st.binary(max_size=40),
    st.sampled_from(["", "0", "-0", "nan", "inf", "1e3", "1e400", "0x10", " 1", "1 ", "1.5", "\0"]),
    st.sampled_from([FIRST, layout.write_task_id(FIRST), b"x" * 300, "celery@host/4711"]),
    st.text(max_size=20).map(lambda text: text.encode("utf-8", "surrogatepass")),
)


@pytest.mark.parametrize("name", NAMES)
def test_any_arguments_give_a_listed_reply_or_an_error_and_every_record_expires(
    harness: Harness, name: str
) -> None:
    script = scripts.load(name)
    of_kind = {"record": harness.name, "slot": harness.store.config.slot_name(harness.key)}
    of_kind |= {"turn": f"{{{harness.name}}}:turn"}
    kinds = scripts.read_head(script.source)["KEYS"]
    names = [of_kind[kind] for kind in kinds if kind in of_kind]

    @steady
    @given(st.sampled_from(sorted(GIVEN)), st.tuples(*[awkward] * len(script.argv)), st.booleans())
    def any_arguments(state: str, values: tuple[Any, ...], own_token: bool) -> None:
        harness.client.delete(*names)
        GIVEN[state](harness)
        arguments = dict(zip(script.argv, values, strict=True))
        raw = harness.raw
        if own_token and raw and "token" in arguments:
            arguments["token"] = int.from_bytes(raw[2:9], "big")
        try:
            argv = [arguments[name] for name in script.argv]
            answer = harness.client.eval(script.source, len(names), *names, *argv)
        except ResponseError:
            pass
        else:
            reply = script.reply(answer)
            assert reply.case in script.replies
            assert reply.now_ms == 0 or reply.now_ms > 1_700_000_000_000
        assert -1 not in [harness.client.pttl(name) for name in names]

    any_arguments()


class TestThroughTheStore:
    """Arguments of callers, written by Lua and read by Python."""

    def test_too_long_a_task_id_is_rejected_before_it_is_sent(self, harness: Harness) -> None:
        for act in (
            lambda: harness.begin(task_id="x" * 65_535),
            lambda: harness.reserve("é" * 32_768),
            lambda: harness.abandon("\ud800"),
        ):
            with pytest.raises(IdempotencyError, match="the task's id ") as caught:
                act()
            assert len(str(caught.value)) < 100
        assert harness.raw is None

    @pytest.mark.parametrize("lease_ms", [0, -1, -(10**20), 10**20, 2**63])
    def test_a_duration_out_of_range_changes_nothing(self, harness: Harness, lease_ms: int) -> None:
        before = harness.started()

        extension = LeaseExtension(harness.key, before.token, lease_ms, -lease_ms)
        with pytest.raises(StoreUnavailableError, match="Redis replied with an error"):
            run_sync(harness.store.execute(commands.extend(extension, b"s")))
        assert harness.record() == before

    @pytest.mark.exhaustive
    @deployments.on(deployments.PLAIN[0])
    def test_a_result_of_sixty_four_megabytes_is_stored(self, harness: Harness) -> None:
        large = os.urandom(1024) * 64 * 1024

        harness.complete(harness.started().token, Payload("json", large))

        assert harness.record().body == large
        assert harness.begin().case == "finished"
        assert harness.forget().case == "ok"
