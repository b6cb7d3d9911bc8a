"""What a begin has granted, when a signal handler raises or the body has threads."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from celery_idempotent.core.flow.call import Call, Grant
from celery_idempotent.core.flow.execution import AsyncExecution, Execution
from celery_idempotent.core.flow.host import CallData
from celery_idempotent.core.key import Key
from celery_idempotent.core.lease import Lease
from celery_idempotent.core.record.layout import Begun
from celery_idempotent.settings import Settings


class Heartbeat:
    """Runtime whose heartbeat is interrupted by a signal handler when it first stops a renewal."""

    store = None
    execution = Execution

    def __init__(self) -> None:
        self.held: set[Lease] = set()
        self.interrupted = False

    def start_renewal(self, lease: Lease) -> None:
        self.held.add(lease)

    def stop_renewal(self, lease: Lease) -> None:
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        self.held.discard(lease)


def granted(runtime: Any) -> Grant:
    settings = Settings(lease=60.0)
    data = CallData(None, Key("shop.charge", "digest"), settings, "id", "here/1", 1.0)
    host: Any = None
    codec: Any = None
    grant = Grant(Call(data, host, runtime, codec), Begun(1, 1, b""))
    runtime.start_renewal(grant.lease)
    return grant


def test_a_renewal_that_a_signal_keeps_from_ending_ends_with_the_next_call() -> None:
    runtime = Heartbeat()
    grant = granted(runtime)
    with pytest.raises(KeyboardInterrupt):
        grant.stop_renewal()

    grant.stop_renewal()

    assert not runtime.held


def test_an_execution_is_shown_without_its_inner_parts() -> None:
    shown = repr(granted(Heartbeat()).execution)

    assert shown == "Execution(key='shop.charge:digest', token=1, attempt=1)"


@pytest.mark.parametrize("kind", [Execution, AsyncExecution])
@pytest.mark.parametrize("protection", [granted(Heartbeat()), None], ids=["protected", "plain"])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("a", 5),
            "step 'a': pass the function and its arguments, step('a', f, x), not the value of f(x)",
        ),
        ((5, pytest.fail), "the name of a step must be text, not int"),
        ((None, 5), "the name of a step must be text, not NoneType"),
    ],
)
def test_a_step_without_a_function_or_a_name_is_refused(
    kind: Any, protection: Any, args: Any, message: str
) -> None:
    with pytest.raises(TypeError) as caught:
        asyncio.run(kind("k", _protection=protection).step(*args))

    assert str(caught.value) == message


def first_steps_of_threads(grant: Grant) -> list[Any]:
    """What each of four threads gets that ask at the same time."""
    barrier = threading.Barrier(4)

    def ask(_: int) -> Any:
        barrier.wait()
        return grant.steps

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(ask, range(4)))


def test_threads_that_run_their_first_steps_at_once_share_the_steps() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            first, *others = first_steps_of_threads(granted(Heartbeat()))
            assert all(steps is first for steps in others)
    finally:
        sys.setswitchinterval(before)
