"""The server: it runs the scripts, and what must hold is judged at each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.labs.verification.model import RESERVED, STARTED, Answer, Clock, Protocol, Record
from tests.labs.verification.state import (
    ALLOWANCES,
    HOLD,
    LEASE,
    NONE,
    POISONED,
    RETENTION,
    Pass,
    State,
    Truth,
    Violation,
    microsecond,
    worker_of,
)


class Server:
    """One setting: so many tasks of the same key, workers, and faults.

    Args:
        protocol: the scripts.
        tasks: how many messages with ids of their own.
        workers: how many passes at a time.
        reserves: whether publishers reserve the key first.
        on_conflict: "retry" or "ignore", as the setting.
        continues: whether something follows each task, so that its dispatch is noted.
        max_attempts: as the setting.
        exclusive: whether to judge that at most one trusts its lease; None where that can hold.
        remembers: whether tokens must grow past a record that is gone; None where they can.
        allowed: how often each of `ALLOWANCES`.
    """

    def __init__(
        self,
        protocol: Protocol | None = None,
        *,
        tasks: int = 2,
        workers: int = 2,
        reserves: bool = False,
        on_conflict: str = "retry",
        continues: bool = False,
        max_attempts: int = 3,
        exclusive: bool | None = None,
        remembers: bool | None = None,
        allowed: Mapping[str, int],
    ) -> None:
        unknown = set(allowed) - set(ALLOWANCES)
        assert not unknown, unknown
        self.protocol = protocol or Protocol()
        self.tasks = tuple(b"T%d" % (number + 1) for number in range(tasks))
        self.workers = workers
        self.reserves = reserves
        self.on_conflict = on_conflict
        self.continues = continues
        self.max_attempts = max_attempts
        self.left = tuple(allowed.get(name, 0) for name in ALLOWANCES)
        # An operator who forgets a running execution, and a clock that leaps, let a second one in.
        leaps = any(map(allowed.get, ("forget", "forget shown", "clock forward")))
        self.exclusive = not leaps if exclusive is None else exclusive
        # One message that nothing copies: whoever takes over from a pass without an answer knows
        # that it had none.
        copies = ("handed out again", "echo", "crash", "time limit", "fatal time limit")
        self.alone = tasks == 1 and not any(map(allowed.get, copies))
        #: Of the last answer.
        self.case = ""
        # Without a record its token is not remembered, and the clock alone makes the next one: it
        # is higher unless the clock has fallen back meanwhile.
        self.steps_back = bool(allowed.get("clock back"))
        self.remembers = not self.steps_back if remembers is None else remembers

    def asks(self, state: State, script: str, one: Pass) -> tuple[Answer, State]:
        """A script, as the pass `one` calls it."""
        token = {"token": one.token}
        keeps = {"retention_ms": RETENTION}
        plain = {"generation": one.retries, "format": b"", "error": b"", "error_ms": RETENTION}
        given_back = {**token, "hold_ms": 0, **keeps, **plain}
        lease = {"lease_ms": LEASE, "ttl_ms": LEASE + RETENTION}
        arguments: dict[str, dict[str, Any]] = {
            "begin": {
                "execution_id": one.execution_id, "unanswered_ids": one.unanswered_ids,
                "task_id": one.task, "fingerprint": b"",
                "generation": one.retries, "worker": worker_of(one.execution_id), **lease,
                "max_attempts": self.max_attempts, "error_ms": RETENTION,
            },
            "complete": {**token, "format": b"", "body": one.execution_id, **keeps},
            "fail": {**token, "format": b"", "body": one.execution_id, **keeps},
            "release": {**given_back, "error": one.execution_id},
            "stop": given_back,
            "exit": given_back,
            "hold": {**given_back, "hold_ms": HOLD, "generation": one.retries + 1},
            "extend": {**token, **lease},
            "save_step": {**token, "entry": b"1", **lease},
            "mark_continued": {"task_id": one.task},
        }  # fmt: skip
        name = "release" if script in ("hold", "stop", "exit") else script
        judge = getattr(self, f"_judge_{name}", self._judge_others)
        return self.calls(state, name, lambda *told: judge(*told, one), **arguments[script])

    def abandoned(
        self, state: State, task: bytes, worker: bytes, grace: int, retries: int = 0,
        error: bytes = b"",
    ) -> State:  # fmt: skip
        def judge(truth: Truth, before: Record | None, answer: Answer) -> Truth:
            if answer.case != "ok":
                return truth
            if worker != worker_of(truth.last):
                raise Violation("the lease of another execution is abandoned")
            truth = truth._replace(holder=b"")
            return truth.ending(task, retries, error) if error else truth

        arguments = {
            "task_id": task, "worker": worker, "grace_ms": grace, "generation": retries,
            "format": b"", "error": error, "error_ms": RETENTION,
        }  # fmt: skip
        return self.calls(state, "abandon", judge, **arguments)[1]

    def calls(
        self, state: State, name: str,
        judge: Callable[[Truth, Record | None, Answer], Truth] = lambda truth, *_: truth, /,
        **arguments: Any,
    ) -> tuple[Answer, State]:  # fmt: skip
        """A script: at the server, once; what it answers is what it would answer a resend."""
        script = getattr(self.protocol, name)
        clock = Clock(0, microsecond(state))
        answer = script(state.record, clock, **arguments)
        self.case = answer.case
        again = script(answer.after, Clock(0, clock.us + 1), **arguments)
        if again.case != answer.case and name != "forget":
            raise Violation(f"a resend changes the answer: {answer.case}, then {again.case}")
        if answer.case == "begun" and again.told != answer.told:
            raise Violation("a resend of begin begins another execution")
        self._judge_record(state, name, answer)
        truth = judge(state.truth, state.record, answer)
        gone = answer.after is None and state.record is not None
        state = state._replace(record=answer.after, truth=truth)
        # An operator forgets all of it, a release what it may.
        ended = () if name == "forget" else truth.ended
        return answer, self.vanishes(state, ended) if gone else state

    # What must hold

    def _judge_record(self, state: State, name: str, answer: Answer) -> None:
        before, after = state.record, answer.after
        if after is not None:
            if not 0 < (after.expires or 10**9) <= LEASE + HOLD + RETENTION + LEASE:
                raise Violation(f"the record that {name} leaves does not expire in time")
            if after.token < (before.token if before else 0):
                raise Violation(f"{name} lowers the token")
        if before is not None and before.finished and name != "forget" and (
            after is None or not after.finished or after.body != before.body
        ):  # fmt: skip
            raise Violation(f"{name} overwrites an outcome")
        told = answer.told
        if told is not None and told.finished:
            stored = after and (after if after.finished else after.error_of(told.task_id))
            if not stored or stored.body != told.body:
                raise Violation("an outcome is told that is not stored")
            known = state.truth.outcome or (POISONED if name == "begin" else b"")
            if stored is not after:
                known = next((e for t, _, e in state.truth.ended if t == told.task_id), b"")
            if told.body != known:
                raise Violation("a reader sees another outcome than the first")

    def _judge_begin(self, truth: Truth, before: Record | None, answer: Answer, one: Pass) -> Truth:
        told, after = answer.told, answer.after
        if answer.case == "finished" and not truth.outcome:
            assert told is not None
            if after is not None and not after.finished:
                return truth
            if truth.begun < self.max_attempts:
                raise Violation("it is poisoned before its attempts are used up")
            return Truth(outcome=told.body, token=told.token)
        if answer.case == "held" and before is not None and before.at <= 0:
            raise Violation("it is refused, and nobody has a lease")
        if answer.case != "begun" or told is None:
            return truth
        if truth.outcome:
            raise Violation("an execution begins though there is an outcome")
        if any(task == one.task and one.retries <= retries for task, retries, _ in truth.ended):
            raise Violation("a copy of a message that ended in an error runs again")
        lasts = before is not None and before.state == RESERVED and before.at > 0
        task, retries = truth.awaited or (b"", 0)
        if lasts and one.task == task and one.retries < retries:
            raise Violation("a copy of an earlier message runs while its retry is awaited")
        if told.body != truth.steps:
            raise Violation("the finished steps are not those that were kept")
        if before is not None and before.state == RESERVED and before.at > 0 and (
            before.task_id not in (one.task, b"")
        ):  # fmt: skip
            raise Violation("an execution begins over another task's reservation")
        if truth.holder == one.execution_id:
            if told.token != truth.token:
                raise Violation("a resend of begin changes the token")
            return truth
        if told.token <= truth.token:
            raise Violation("the token does not grow")
        died = truth.died + bool(truth.last and not truth.given_up)
        if told.attempt > self.max_attempts:
            raise Violation("an execution begins after the last attempt")
        at_most = died if self.alone else truth.begun
        if not died <= told.attempt - 1 <= at_most:
            raise Violation(f"attempt {told.attempt} begins after {died} that died")
        return truth._replace(
            holder=one.execution_id, last=one.execution_id, died=died, begun=truth.begun + 1,
            token=told.token,
            given_up=False, awaited=None,
            ended=tuple(ending for ending in truth.ended if ending[0] != one.task),
        )  # fmt: skip

    def _judge_complete(
        self, truth: Truth, before: Record | None, answer: Answer, one: Pass
    ) -> Truth:
        if answer.case == "lost":
            return self._judge_others(truth, before, answer, one)
        if truth.outcome:
            if truth.outcome != one.execution_id:
                raise Violation("a second completion is told that it was accepted")
            return truth
        if truth.holder != one.execution_id:
            raise Violation("the completion of a stale token is accepted")
        return Truth(outcome=one.execution_id, token=truth.token)

    _judge_fail = _judge_complete

    def _judge_release(
        self, truth: Truth, before: Record | None, answer: Answer, one: Pass
    ) -> Truth:
        if answer.case == "lost" or before is None or before == answer.after:
            return self._judge_others(truth, before, answer, one)
        if truth.holder != one.execution_id:
            raise Violation("the release of a stale token is accepted")
        released = Truth(token=truth.token, steps=truth.steps, ended=truth.ended)
        if one.script == "release":
            return released.ending(one.task, one.retries, one.execution_id)
        if one.script == "hold":
            return released._replace(awaited=(one.task, one.retries + 1))
        return released

    def _judge_others(
        self, truth: Truth, before: Record | None, answer: Answer, one: Pass
    ) -> Truth:
        """extend, step, and every refusal."""
        held = (truth.holder, truth.token) == (one.execution_id, one.token)
        if answer.case == "lost" and held and not truth.outcome:
            raise Violation("the holder of the lease is refused")
        if answer.case == "ok" and answer.after is not None and answer.after.state == STARTED:
            if truth.holder != one.execution_id:
                raise Violation("a stale token keeps the lease")
            return truth._replace(steps=answer.after.body)
        return truth

    def vanishes(self, state: State, ended: tuple[tuple[bytes, int, bytes], ...] = ()) -> State:
        token = state.truth.token if self.remembers else NONE
        return state._replace(record=None, truth=Truth(token=token, ended=ended))
