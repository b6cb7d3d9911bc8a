"""Whatever a script is given: one of its cases or an error, and nothing that stays for ever."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from celery_idempotent.errors import CorruptRecordError, IdempotencyError, StoreUnavailableError
from celery_idempotent.record import layout, steps
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import State
from celery_idempotent.store import commands, scripts
from tests.store import deployments as sites
from tests.store.record_harness import FIRST, LEASE_MS, RETENTION_MS, SHORT_MS, Scene
from tests.unit.record.raw import raw_record

NAMES = (
    "begin",
    "extend",
    "complete",
    "fail",
    "release",
    "abandon",
    "reserve",
    "mark_continued",
    "save_step",
    "forget",
    "get",
)

steady = settings(
    derandomize=True,
    deadline=None,
    max_examples=50,
    # Each kind of Redis is another executor.
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,
    ],
)

GIVEN: dict[str, Callable[[Scene], Any]] = {
    "absent": lambda scene: None,
    "started": Scene.started,
    "with-a-step": lambda scene: scene.step(scene.started().token),
    "lapsed": lambda scene: scene.started(lease_ms=1),
    "reserved": Scene.reserved,
    "completed": Scene.completed,
    "failed": Scene.failed,
    "damaged": lambda scene: scene.put(b"S cut short"),
    "newer": lambda scene: scene.put(raw_record(b"Z")),
    "at-the-end-of-numbers": lambda scene: scene.put(
        raw_record(attempt=255, token=2**56 - 1, at_ms=2**48 - 1)
    ),
}

#: What Lua and Redis each take for a number, or do not; and what is there already.
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
def test_a_script_answers_or_refuses_and_leaves_nothing_for_ever(scene: Scene, name: str) -> None:
    script = scripts.load(name)

    @steady
    @given(st.sampled_from(sorted(GIVEN)), st.tuples(*[awkward] * len(script.argv)), st.booleans())
    def any_arguments(state: str, values: tuple[Any, ...], own_token: bool) -> None:
        scene.client.delete(scene.name)
        GIVEN[state](scene)
        arguments = dict(zip(script.argv, values, strict=True))
        raw = scene.raw
        if own_token and raw and "token" in arguments:
            arguments["token"] = int.from_bytes(raw[2:9], "big")
        try:
            answer = scene.client.eval(script.source, 1, scene.name, *script.arguments(arguments))
        except ResponseError:
            pass
        else:
            reply = script.reply(answer)
            assert reply.case in script.replies
            assert reply.now_ms == 0 or reply.now_ms > 1_700_000_000_000
        assert scene.left_ms() != -1

    any_arguments()


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=400)
task_ids = texts | st.uuids().map(str) | st.just("x" * 65_534)
lengths_ms = st.integers(10_000, 366 * 86_400_000)


class TestThroughTheStore:
    """What its callers may hand over, written by Lua and read by Python."""

    @steady
    @given(
        task_id=task_ids,
        worker=texts,
        owner=st.binary(min_size=1, max_size=255),
        prior=st.binary(max_size=200),
        lease_ms=lengths_ms,
        retention_ms=lengths_ms,
        form=st.text("abcjson+!@=", max_size=255),
        body=st.binary(max_size=200),
        step=texts.filter(bool).map(lambda text: text[:200]),
    )
    def test_everything_comes_back_as_it_was(
        self,
        scene: Scene,
        task_id: str,
        worker: str,
        owner: bytes,
        prior: bytes,
        lease_ms: int,
        retention_ms: int,
        form: str,
        body: bytes,
        step: str,
    ) -> None:
        scene.client.delete(scene.name)
        begun = scene.store.execute(
            commands.begin(
                scene.key,
                owner=owner,
                prior=prior,
                task_id=task_id,
                worker=worker,
                lease_ms=lease_ms,
                retention_ms=retention_ms,
                max_attempts=255,
                error_ms=retention_ms,
            )
        )
        record = scene.record()
        assert begun.case == "begun"
        assert (record.state, record.task_id, record.attempt) == (State.STARTED, task_id, 1)
        assert worker.encode().endswith(record.worker.encode())
        assert record.at_ms == begun.now_ms + lease_ms

        entry = steps.write(step, form, body)
        scene.store.execute(
            commands.step(
                scene.key, record.token, entry, lease_ms=lease_ms, retention_ms=retention_ms
            )
        )
        assert scene.steps == {step: (form, body)}

        scene.complete(record.token, Payload(form, body))
        record = scene.record()
        assert (record.state, record.format, record.body) == (State.COMPLETED, form, body)
        assert 0 < scene.left_ms() <= RETENTION_MS

    def test_an_id_that_has_no_room_is_refused_before_it_is_sent(self, scene: Scene) -> None:
        for act in (
            lambda: scene.begin(task_id="x" * 65_535),
            lambda: scene.reserve("é" * 32_768),
            lambda: scene.dispatched("\ud800"),
        ):
            with pytest.raises(IdempotencyError, match="the task's id ") as caught:
                act()
            assert len(str(caught.value)) < 100
        assert scene.raw is None

    @pytest.mark.parametrize("lease_ms", [0, -1, -(10**20), 10**20, 2**63])
    def test_a_length_that_redis_does_not_take_changes_nothing(
        self, scene: Scene, lease_ms: int
    ) -> None:
        before = scene.started()

        with pytest.raises(StoreUnavailableError, match="Redis refuses"):
            scene.store.execute(
                commands.step(
                    scene.key, before.token, b"s", lease_ms=lease_ms, retention_ms=-lease_ms
                )
            )
        assert scene.record() == before

    @pytest.mark.parametrize("site", sites.params(sites.PLAIN[0]), indirect=True)
    def test_sixty_four_megabytes_are_carried(self, scene: Scene) -> None:
        large = os.urandom(1024) * 64 * 1024

        scene.complete(scene.started().token, Payload("json", large))

        assert scene.record().body == large
        assert scene.begin().case == "finished"
        assert scene.forget().case == "ok"


#: One of each state, whole.
WHOLE = {
    letter: raw_record(
        letter.encode(),
        owner=b"" if letter != "S" else b"an execution id!",
        form=b"json" if letter in "CF" else b"",
        body=b'"text"' if letter in "CF" else b"",
    )
    for letter in "RSCF"
}


@pytest.mark.parametrize("letter", WHOLE)
def test_a_record_cut_short_anywhere_is_left_as_it_is(scene: Scene, letter: str) -> None:
    whole = WHOLE[letter]
    head = len(whole) - (6 if letter in "CF" else 0)
    token = int.from_bytes(whole[2:9], "big")
    for length in range(head):
        raw = whole[:length]
        scene.put(raw)

        with pytest.raises(CorruptRecordError):
            scene.store.look_up(scene.key)
        acts = [
            commands.begin(
                scene.key, owner=b"o", prior=b"", task_id="a", worker="w", lease_ms=LEASE_MS,
                retention_ms=RETENTION_MS, max_attempts=5, error_ms=1000,
            ),
            commands.reserve(scene.key, "a", SHORT_MS),
            commands.complete(scene.key, token, Payload("json", b"1"), 1000),
            commands.release(scene.key, token, hold_ms=0, retention_ms=1000),
            commands.abandon(scene.key, "a", "w", grace_ms=0),
        ]  # fmt: skip
        cases = [scene.store.execute(act).case for act in acts]

        assert cases == ["corrupt", "corrupt", "lost", "lost", "lost"], length
        assert scene.raw == raw
        assert scene.forget().case == "ok"
