"""The server: runs the scripts, and checks the invariants at each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from labs.verification.model import (
    RESERVED,
    STARTED,
    UNCHANGED,
    WITH_ENTRY,
    Clock,
    Protocol,
    Record,
    Result,
)
from labs.verification.state import (
    EVENTS,
    HOLD,
    LEASE,
    NO_RESULT,
    NO_SUCCESS,
    NO_TOKEN,
    POISONED,
    RETENTION,
    UNRECORDED,
    Delivery,
    History,
    State,
    Violation,
    is_success,
    microsecond,
    new_execution_id,
    put_entry,
    put_result,
    remaining,
    result_of,
    worker_of,
)


def _meta(result: bytes) -> bytes | None:
    """What the result backend stores, in a form of which the scripts read the state."""
    if result == NO_RESULT:
        return None
    return b"status: " + (b"FAILURE " if result == NO_SUCCESS else b"SUCCESS ") + result


class Server:
    """A setting: tasks that share a key, workers, and the events that may happen.

    Args:
        protocol: the scripts.
        tasks: number of messages with ids of their own.
        workers: number of deliveries at a time.
        reserves: whether publishers reserve the key first.
        on_conflict: "retry" or "ignore", as the option.
        continues: whether each task has a continuation, so that sending it is marked.
        same_id: whether all tasks are publishes of one task id.
        max_attempts: as the option.
        exclusive: whether to check that at most one execution trusts its lease; None: where that
            can hold.
        tokens_grow: whether tokens must grow after a record is gone; None: where they can.
        fused: whether executions complete by fused_complete, with a result backend.
        keeps_success: whether to check that Celery, which reads a result before it writes one,
            replaces no SUCCESS that another process has written in between.
        allowed: how often each of `EVENTS` may happen.
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
        same_id: bool = False,
        max_attempts: int = 3,
        exclusive: bool | None = None,
        tokens_grow: bool | None = None,
        fused: bool = False,
        keeps_success: bool = True,
        allowed: Mapping[str, int],
    ) -> None:
        unknown = set(allowed) - set(EVENTS)
        assert not unknown, unknown
        self.protocol = protocol or Protocol()
        self.tasks = tuple(b"T%d" % (number + 1) for number in range(tasks))
        self.workers = workers
        self.reserves = reserves
        self.on_conflict = on_conflict
        self.continues = continues
        self.same_id = same_id
        self.max_attempts = max_attempts
        # Tasks with a continuation have no fused completion.
        assert not (fused and continues)
        self.fused = fused
        self.keeps_success = keeps_success
        self.remaining = tuple(allowed.get(name, 0) for name in EVENTS)
        # An operator who forgets a running execution, or a clock that leaps, admits a second one.
        admits_second = any(map(allowed.get, ("forget", "forget displayed", "clock forward")))
        self.exclusive = not admits_second if exclusive is None else exclusive
        # A single message without copies: a delivery that takes over from one without a reply
        # knows that it got none.
        copies = ("redelivery", "late copy", "crash", "time limit", "final time limit")
        #: A continuation may be sent once more for each of these.
        self.slips = ("crash", "freeze", "time limit", "final time limit", "clock forward")
        self.allowed = allowed
        self.single_message = tasks == 1 and not any(map(allowed.get, copies))
        #: Of the last reply.
        self.case = ""
        # Without a record the clock alone makes the next token, which is higher than the last one
        # unless the clock has been set back.
        self.clock_steps_back = bool(allowed.get("clock back"))
        self.tokens_grow = not self.clock_steps_back if tokens_grow is None else tokens_grow

    def execute_for(self, state: State, script: str, delivery: Delivery) -> tuple[Result, State]:
        """Executes a script with the arguments of a delivery."""
        token = {"token": delivery.token}
        retention = {"retention_ms": RETENTION}
        sends = {"lease_ms": LEASE if self.continues else ""}
        root = {"root": delivery.task}
        no_error = {
            "generation": delivery.retries, "format": b"", "error": b"", "error_ms": RETENTION
        }  # fmt: skip
        release = {**token, "hold_ms": 0, **retention, **no_error, **sends}
        lease = {"lease_ms": LEASE, "ttl_ms": LEASE + RETENTION}
        outcome = {**token, "format": b"", "body": delivery.execution_id, **retention, **sends}
        arguments: dict[str, dict[str, Any]] = {
            "begin": {
                "execution_id": delivery.execution_id, "unanswered_ids": delivery.unanswered_ids,
                "task_id": self.id_of(delivery.task), **root, "generation": delivery.retries,
                "fingerprint": b"", "worker": worker_of(delivery.execution_id), **lease,
                "max_attempts": self.max_attempts, "error_ms": RETENTION,
                "continues": int(self.continues),
            },
            "complete": outcome,
            "fused_complete": outcome,
            "write_result": {**outcome, "token": 0, "body": b""},
            "fail": outcome,
            "release": {**release, "error": delivery.execution_id},
            "stop": release,
            "exit": release,
            "hold": {**release, "hold_ms": HOLD, "generation": delivery.retries + 1},
            "extend": {**token, **lease},
            "save_step": {**token, "entry": b"1", **lease},
            "mark": {"execution_id": delivery.execution_id, "lease_ms": ""},
        }  # fmt: skip
        if script in ("fused_complete", "write_result"):
            arguments[script].pop("lease_ms")
            return self._execute_fused_complete(state, script, delivery, arguments[script])
        name = "release" if script in ("hold", "stop", "exit") else script
        name = "continuation" if script == "mark" else name
        check = getattr(self, f"_check_{name}", self._check_others)
        return self.execute(
            state, name, lambda *seen: check(*seen, delivery), task=delivery.task,
            **arguments[script],
        )  # fmt: skip

    def _execute_fused_complete(
        self, state: State, script: str, delivery: Delivery, outcome: dict[str, Any]
    ) -> tuple[Result, State]:
        is_replay = script == "write_result"
        before = result_of(state, delivery.task)
        meta = _meta(delivery.result if is_replay else delivery.execution_id)

        def check(history: History, record: Record | None, result: Result) -> History:
            is_resend = not is_replay and record is not None and record.finished
            if is_resend and result.backend != _meta(before):
                raise Violation("a resend writes the result again")
            if result.case == "written" and result.backend != meta:
                raise Violation("the reply is written, but the result is not there")
            if not is_replay:
                return self._check_complete(history, record, result, delivery)
            if result.after != record:
                raise Violation("a replay changes the record")
            return history

        result, after = self.execute(
            state,
            "fused_complete",
            check,
            task=delivery.task,
            **outcome,
            meta=meta,
            expires=0,
            backend=_meta(before),
        )
        if result.backend == _meta(before):
            return result, after
        if is_success(before):
            raise Violation("fused_complete replaces a SUCCESS")
        return result, self.store_result(after, delivery.task, (result.backend or b"")[-1:])

    def store_result(self, state: State, task: bytes, result: bytes) -> State:
        """Writes a result into the result backend."""
        if is_success(result) and result not in (state.history.outcome, UNRECORDED):
            raise Violation("the result backend has another outcome than the record")
        return put_result(state, task, result)

    def abandon(
        self, state: State, task: bytes, worker: bytes, grace: int, retries: int = 0,
        error: bytes = b"",
    ) -> State:  # fmt: skip
        def check(history: History, before: Record | None, result: Result) -> History:
            if result.case != "ok":
                return history
            if worker != worker_of(history.last):
                raise Violation("the lease of another execution is abandoned")
            history = history._replace(holder=b"")
            return history.with_ended(task, retries, error) if error else history

        parent = new_execution_id(state)
        arguments = {
            "task_id": self.id_of(task), "root": task, "worker": worker, "grace_ms": grace,
            "generation": retries, "format": b"", "error": error, "error_ms": RETENTION,
            "execution_id": parent, "lease_ms": LEASE if self.continues else "",
        }  # fmt: skip
        result, state = self.execute(state, "abandon", check, task=task, **arguments)
        if error and result.case == "ok" and self.continues:
            state = self.note_sent(state, task)
            mark = {"execution_id": parent, "lease_ms": ""}
            _, state = self.execute(state, "continuation", task=task, **mark)
        return state

    def execute(
        self, state: State, name: str,
        check: Callable[[History, Record | None, Result], History] = lambda history, *_: history, /,
        task: bytes = b"", **arguments: Any,
    ) -> tuple[Result, State]:  # fmt: skip
        """Executes a script, checks the invariants and that a resend gets the same reply."""
        script = getattr(self.protocol, name)
        clock = Clock(0, microsecond(state))
        if name in WITH_ENTRY:
            arguments["entry"] = state.entries[self.tasks.index(task)]
        result = script(state.record, clock, **arguments)
        self.case = result.case
        if name == "fused_complete":
            arguments["backend"] = result.backend
        if result.entry is not UNCHANGED:
            arguments["entry"] = result.entry
            state = put_entry(state, task, arguments["entry"])
        resent = script(result.after, Clock(0, clock.us + 1), **arguments)
        if resent.case != result.case and name != "forget":
            raise Violation(f"a resend changes the reply: {result.case}, then {resent.case}")
        if result.case == "begun" and resent.replied != result.replied:
            raise Violation("a resend of begin begins another execution")
        self._check_record(state, name, task, result)
        history = check(state.history, state.record, result)
        deleted = result.after is None and state.record is not None
        state = state._replace(record=result.after, history=history)
        return result, self.remove_record(state) if deleted else state

    # The invariants

    def _check_record(self, state: State, name: str, task: bytes, result: Result) -> None:
        before, after = state.record, result.after
        if after is not None:
            if not 0 < (after.expires or 10**9) <= LEASE + HOLD + RETENTION + LEASE:
                raise Violation(f"the record that {name} stores does not expire in time")
            if after.token < (before.token if before else 0):
                raise Violation(f"{name} lowers the token")
        if before is not None and before.finished and name != "forget" and (
            after is None or not after.finished or after.body != before.body
        ):  # fmt: skip
            raise Violation(f"{name} overwrites an outcome")
        replied = result.replied
        if replied is None or not replied.finished or result.case == "held" or name == "forget":
            return
        entry = state.entries[self.tasks.index(task)] if task else None
        is_error = entry is not None and replied == entry
        if not is_error and (after is None or after.body != replied.body):
            raise Violation("a reply has an outcome that is not stored")
        first = state.history.outcome or (POISONED if name == "begin" else b"")
        if is_error:
            errors = (error for ended, _, error in state.history.ended if ended == task)
            first = next(errors, b"")
        if replied.body != first:
            raise Violation("a reply has another outcome than the first")

    def _check_begin(
        self, history: History, before: Record | None, result: Result, delivery: Delivery
    ) -> History:
        replied = result.replied
        own_end = next((end for end in history.ended if end[0] == delivery.task), None)
        has_ended = own_end is not None and delivery.retries <= own_end[1]
        if result.case in ("finished", "sent"):
            assert replied is not None
            if has_ended:
                if own_end is not None and replied.body != own_end[2]:
                    raise Violation("a copy of a message that ended in an error gets an outcome")
                return history
            if history.outcome:
                return history
            if history.begun < self.max_attempts:
                raise Violation("the task is poisoned before its attempts are used up")
            return History(
                outcome=replied.body, token=replied.token, ended=history.ended, sent=history.sent
            )
        if (
            result.case == "held" and before is not None and not before.finished and before.at <= 0
            and replied == before
        ):  # fmt: skip
            raise Violation("begin replies held after the lease has expired")
        if result.case != "begun" or replied is None:
            return history
        if history.outcome:
            raise Violation("an execution begins though there is an outcome")
        if has_ended:
            raise Violation("a copy of a message that ended in an error runs again")
        is_reserved = before is not None and before.state == RESERVED and before.at > 0
        task, retries = history.awaited or (b"", 0)
        if is_reserved and delivery.task == task and delivery.retries < retries:
            raise Violation("a copy of an earlier message runs while its retry is awaited")
        if replied.body != history.steps:
            raise Violation("begin returns other steps than those that were saved")
        own_id = self.id_of(delivery.task)
        if before is not None and is_reserved and before.task_id not in (own_id, b""):
            raise Violation("an execution begins over another task's reservation")
        if history.holder == delivery.execution_id:
            if replied.token != history.token:
                raise Violation("a resend of begin changes the token")
            return history
        if replied.token <= history.token:
            raise Violation("the token does not grow")
        died = history.died + bool(history.last and not history.given_up)
        if replied.attempt > self.max_attempts:
            raise Violation("an execution begins after the last attempt")
        at_most = died if self.single_message else history.begun
        if not died <= replied.attempt - 1 <= at_most:
            raise Violation(f"attempt {replied.attempt} begins with a death count of {died}")
        return history._replace(
            holder=delivery.execution_id, last=delivery.execution_id, died=died,
            begun=history.begun + 1, token=replied.token, given_up=False, awaited=None,
        )  # fmt: skip

    def _check_complete(
        self, history: History, before: Record | None, result: Result, delivery: Delivery
    ) -> History:
        if result.case == "lost":
            return self._check_others(history, before, result, delivery)
        if history.outcome:
            if history.outcome != delivery.execution_id:
                raise Violation("a second completion is accepted")
            return history
        if history.holder != delivery.execution_id:
            raise Violation("the completion of a stale token is accepted")
        return History(
            outcome=delivery.execution_id, token=history.token, ended=history.ended,
            sent=history.sent,
        )  # fmt: skip

    _check_fail = _check_complete

    def _check_release(
        self, history: History, before: Record | None, result: Result, delivery: Delivery
    ) -> History:
        if result.case == "lost" or before is None or before == result.after:
            return self._check_others(history, before, result, delivery)
        if history.holder != delivery.execution_id:
            raise Violation("the release of a stale token is accepted")
        released = History(
            token=history.token, steps=history.steps, ended=history.ended, sent=history.sent
        )
        if delivery.script == "release":
            return released.with_ended(delivery.task, delivery.retries, delivery.execution_id)
        if delivery.script == "hold":
            return released._replace(awaited=(delivery.task, delivery.retries + 1))
        return released

    def _check_others(
        self, history: History, before: Record | None, result: Result, delivery: Delivery
    ) -> History:
        """Checks extend, save_step, and every script that replies lost."""
        holds = (history.holder, history.token) == (delivery.execution_id, delivery.token)
        if result.case == "lost" and holds and not history.outcome:
            raise Violation("the holder of the lease is rejected")
        if result.case == "ok" and result.after is not None and result.after.state == STARTED:
            if history.holder != delivery.execution_id:
                raise Violation("a stale token keeps the lease")
            return history._replace(steps=result.after.body)
        return history

    def _check_continuation(
        self, history: History, before: Record | None, result: Result, delivery: Delivery
    ) -> History:
        if result.after is not before and (before is None or not before.finished):
            raise Violation("a continuation changes an execution")
        return history

    def remove_record(self, state: State) -> State:
        """Returns the state without the record; the entries stay."""
        history = state.history
        ended = {task for task, _, _ in history.ended}
        state = state._replace(record=None, history=History(
            token=history.token if self.tokens_grow else NO_TOKEN, ended=history.ended,
            sent=tuple(task for task in history.sent if task in ended),
        ))  # fmt: skip
        return self._without_record(state) if self.fused else state

    def remove_entry(self, state: State, task: bytes) -> State:
        history = state.history
        ended = tuple(end for end in history.ended if end[0] != task)
        sent = tuple(each for each in history.sent if each != task)
        state = state._replace(history=history._replace(ended=ended, sent=sent))
        return put_entry(state, task, None)

    def id_of(self, task: bytes) -> bytes:
        """Returns the task id of a publish."""
        return self.tasks[0] if self.same_id else task

    def note_sent(self, state: State, task: bytes) -> State:
        """Notes that a continuation is sent."""
        sent = tuple(sorted((*state.history.sent, task)))
        slips = sum(self.allowed.get(event, 0) - remaining(state, event) for event in self.slips)
        if sent.count(task) > 1 + slips:
            raise Violation("a continuation is sent twice")
        ever_sent = list(state.ever_sent)
        ever_sent[self.tasks.index(task)] = True
        return state._replace(history=state.history._replace(sent=sent), ever_sent=tuple(ever_sent))

    def check_sent(self, state: State, task: bytes) -> None:
        """Checks that a continuation is not lost with the message."""
        if self.continues and not state.ever_sent[self.tasks.index(task)]:
            raise Violation("a message is acknowledged before its continuation is sent")

    def _without_record(self, state: State) -> State:
        """The outcome that the record had is no longer the key's."""

        def unrecorded(result: bytes) -> bytes:
            return UNRECORDED if is_success(result) else result

        def without_record(delivery: Delivery) -> Delivery:
            return delivery._replace(result=unrecorded(delivery.result))

        copy = state.late_copy
        return state._replace(
            results=tuple(map(unrecorded, state.results)),
            deliveries=tuple(each and without_record(each) for each in state.deliveries),
            late_copy=copy and copy._replace(sender=without_record(copy.sender)),
        )
