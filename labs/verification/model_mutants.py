"""Deliberate mistakes in the model, each of which the search must detect.

Mistakes in the scripts override `Protocol`, mistakes in the library override `Environment`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labs.verification.environment import Environment
from labs.verification.model import (
    COMPLETED,
    FAILED,
    SETTLED,
    STARTED,
    UNCHANGED,
    Clock,
    Protocol,
    Record,
    Result,
)
from labs.verification.search import SearchResult, search
from labs.verification.state import (
    LEASE,
    OUTCOME,
    RETENTION,
    Delivery,
    Effect,
    Message,
    Reply,
    State,
)


@dataclass(frozen=True)
class Mutant:
    name: str
    protocol: type[Protocol]
    environment: type[Environment]
    #: The environment in which the mistake shows: the arguments of `Environment`.
    arguments: dict[str, Any]

    def search(self) -> SearchResult:
        """Searches for a counterexample."""
        return search(self.environment(self.protocol(), **self.arguments))


MUTANTS: list[Mutant] = []


def mutant(
    name: str,
    tasks: int = 1,
    workers: int = 2,
    fused: bool = False,
    continues: bool = False,
    same_id: bool = False,
    **allowed: int,
) -> Callable[[type], type]:
    """Registers the decorated class as a mutant, with the environment in which it shows."""
    events = {event.replace("_", " "): times for event, times in allowed.items()}

    def add(cls: type) -> type:
        protocol = cls if issubclass(cls, Protocol) else Protocol
        environment = cls if issubclass(cls, Environment) else Environment
        arguments = {
            "tasks": tasks, "workers": workers, "fused": fused, "continues": continues,
            "same_id": same_id, "allowed": events,
        }  # fmt: skip
        MUTANTS.append(Mutant(name, protocol, environment, arguments))
        return cls

    return add


# The scripts


@mutant("no token check", tasks=2, freeze=1)
class NoTokenCheck(Protocol):
    def is_held_by(self, record: Record | None, token: int) -> bool:
        return record is not None and record.state == STARTED


@mutant("the last completion wins", tasks=2, freeze=1)
class Overwrites(Protocol):
    def settle(
        self, record: Record | None, clock: Clock, state: str, token: int, *rest: Any
    ) -> Result:
        if record is not None and record.finished:
            record, token = record._replace(state=STARTED), record.token
        return super().settle(record, clock, state, token, *rest)


@mutant("the deadline is the key's expiry", tasks=2, freeze=1)
class DeadlineInExpiry(Protocol):
    def started_expiry(self, clock: Clock, lease_ms: int, ttl_ms: int) -> int:
        return clock.ms + lease_ms


@mutant("no expiry while STARTED", crash=1)
class NoExpiry(Protocol):
    def started_expiry(self, clock: Clock, lease_ms: int, ttl_ms: int) -> int:
        return 10**12


@mutant("an active lease is taken over", redelivery=1)
class TakesOverTooEarly(Protocol):
    def is_active(self, record: Record, clock: Clock) -> bool:
        return False


@mutant("an expired lease is not taken over", crash=1)
class NeverTakesOver(Protocol):
    def is_active(self, record: Record, clock: Clock) -> bool:
        return True


@mutant("a takeover keeps the token", tasks=2, freeze=1)
class SameToken(Protocol):
    def next_token(self, record: Record, clock: Clock) -> int:
        return record.token


@mutant("the token is the clock", clock_back=1, crash=1)
class TokenIsClock(Protocol):
    def next_token(self, record: Record, clock: Clock) -> int:
        return clock.us


@mutant("the token counts from the record alone", forget=1, redelivery=1)
class TokenCounts(Protocol):
    def begin(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        return super().begin(record, Clock(clock.ms, -(10**6)), **arguments)


@mutant("begin does not recognise its own resend", lost_reply=1)
class RejectsResendOfBegin(Protocol):
    def is_own(self, record: Record, execution_id: bytes) -> bool:
        return False


@mutant("begin does not recognise an unanswered delivery", lost_reply=1)
class IgnoresUnansweredIds(Protocol):
    def begin(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        return super().begin(record, clock, **{**arguments, "unanswered_ids": b""})


@mutant("complete rejects its own resend", lost_reply=1)
class RejectsResendOfComplete(Protocol):
    def settle(self, record: Record | None, *rest: Any) -> Result:
        result = super().settle(record, *rest)
        return result._replace(case="lost") if record == result.after else result


@mutant("any outcome is accepted as the caller's", tasks=2, freeze=1)
class AcceptsAnyOutcome(Protocol):
    def settle(self, record: Record | None, *rest: Any) -> Result:
        if record is not None and record.finished:
            return Result("ok", record, record)
        return super().settle(record, *rest)


@mutant("abandon gives no new token", time_limit=1)
class AbandonKeepsToken(Protocol):
    def abandon(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        result = super().abandon(record, clock, **arguments)
        if result.case != "ok" or result.after is None or record is None:
            return result
        return result._replace(after=result.after._replace(token=record.token))


@mutant("abandon ignores the worker", crash=1)
class AbandonsAnyone(Protocol):
    def is_child(self, record: Record, task_id: bytes, worker: bytes) -> bool:
        return record.state == STARTED and record.task_id == task_id


@mutant("release ignores the token", tasks=2, freeze=1, error=1)
class ReleasesWithoutToken(Protocol):
    def release(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        token = arguments["token"] if record is None else record.token
        return super().release(record, clock, **{**arguments, "token": token})


@mutant("a retry does not hold the key", tasks=2, retry=1)
class NoHold(Protocol):
    def begin(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        if record is not None and record.state == "R":
            record = record._replace(at=clock.ms)
        return super().begin(record, clock, **arguments)


@mutant("a release forgets finished steps", step=1, error=1, retry=1)
class LosesSteps(Protocol):
    def release(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        return super().release(record and record._replace(body=b""), clock, **arguments)


@mutant("a takeover does not count", crash=1)
class KeepsAttempt(Protocol):
    def begin(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        result = super().begin(record, clock, **arguments)
        if result.case != "begun" or result.after is None:
            return result
        begun = result.after._replace(attempt=1)
        return Result("begun", begun, begun)


@mutant("poisoned one death too early", workers=1, crash=3)
class PoisonsEarly(Protocol):
    def begin(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        limit = arguments["max_attempts"] - 1
        return super().begin(record, clock, **{**arguments, "max_attempts": limit})


@mutant("a poisoned outcome is not stored", workers=1, crash=3)
class DoesNotStorePoisoned(Protocol):
    def begin(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        result = super().begin(record, clock, **arguments)
        poisoned = (
            result.replied and result.replied.state == FAILED and record and not record.finished
        )
        return result._replace(after=record) if poisoned else result


@mutant("an error is not stored for copies", error=1, redelivery=1)
class LeavesNoError(Protocol):
    def release(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        return super().release(record, clock, **{**arguments, "error": b""})


@mutant("an error is returned to every message of its task id", tasks=2, same_id=True, error=1)
class ReturnsErrorToAll(Environment):
    def execute(self, state: State, name: str, *args: Any, **arguments: Any) -> Any:
        if name in ("begin", "release"):
            arguments["task"] = arguments["root"] = self.tasks[0]
        if name == "release":
            arguments.pop("root")
        return super().execute(state, name, *args, **arguments)


@mutant("a retry gets the error of the message before it", error=1, retry=1, freeze=1, redelivery=1)
class ReturnsErrorToRetries(Protocol):
    def has_error(self, entry: Record, generation: int) -> bool:
        return SETTLED.get(entry.state) == FAILED


@mutant("an error is left without the lease", tasks=2, freeze=1, error=1)
class LeavesErrorWithoutLease(Protocol):
    def release(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        result = super().release(record, clock, **arguments)
        if result.case != "lost" or not arguments["error"] or record is None:
            return result
        names = ("generation", "format", "error", "error_ms", "lease_ms")
        left = self.ended(record, clock, *(arguments[name] for name in names))
        return result._replace(entry=left)


@mutant("messages of one task id share its outcome's continuation", tasks=2, same_id=True,
        continues=True)  # fmt: skip
class SharesContinuations(Protocol):
    def is_of(self, record: Record, root: bytes) -> bool:
        return True


@mutant("a continuation that is being sent is sent by a copy, too", continues=True, redelivery=1)
class SendsWithCopy(Protocol):
    def is_sent_by_another(self, outcome: Record, clock: Clock, ids: tuple[bytes, bytes]) -> bool:
        return False


@mutant("two redeliveries send the continuation of one that died", continues=True, crash=1,
        redelivery=1)  # fmt: skip
class ClaimsNothing(Protocol):
    def claim(
        self, outcome: Record, clock: Clock, ids: tuple[bytes, bytes], claim: dict[str, Any]
    ) -> tuple[str, Record]:
        case, claimed = super().claim(outcome, clock, ids, claim)
        return case, outcome if case == "finished" else claimed


@mutant("a completion takes its continuation for sent", continues=True, crash=1)
class TakesForSent(Protocol):
    def complete(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        return super().complete(record, clock, **{**arguments, "lease_ms": 0})


@mutant("an error takes its errbacks for sent", continues=True, error=1, crash=1)
class TakesErrbacksForSent(Protocol):
    def release(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        return super().release(record, clock, **{**arguments, "lease_ms": ""})


@mutant("a duplicate leaves no entry of its continuation", tasks=2, continues=True, redelivery=1)
class LeavesNoEntry(Protocol):
    def duplicate(self, *args: Any) -> Result:
        return super().duplicate(*args)._replace(entry=UNCHANGED)


@mutant("a duplicate's continuation is sent by its copy, too", tasks=2, workers=3, continues=True,
        redelivery=1)  # fmt: skip
class DuplicatesTogether(Protocol):
    def duplicate(
        self, record: Record, entry: Record | None, clock: Clock, ids: Any, claim: Any, *rest: Any
    ) -> Result:
        if entry is not None and SETTLED[entry.state] == COMPLETED and entry.sending:
            entry = None
        return super().duplicate(record, entry, clock, ids, claim, *rest)


@mutant("a copy of an earlier message counts as the retry", retry=1, redelivery=1)
class TakesCopiesForRetries(Protocol):
    def is_awaited(self, record: Record, task_id: bytes, root: bytes, generation: int) -> bool:
        return super().is_awaited(record, task_id, root, generation + 1)


@mutant("a final time limit stores no error", final_time_limit=1, redelivery=1)
class LeavesNoLimit(Protocol):
    def abandon(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        return super().abandon(record, clock, **{**arguments, "error": b""})


@mutant("a final time limit does not count as a death", tasks=2, final_time_limit=1)
class CountsNoLimit(Protocol):
    def abandon(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        result = super().abandon(record, clock, **arguments)
        if result.case != "ok" or result.after is None or not arguments["error"]:
            return result
        return result._replace(after=result.after._replace(attempt=0))


@mutant("there is no grace period for the child to be killed", tasks=2, final_time_limit=1)
class NoGrace(Protocol):
    def abandon(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        return super().abandon(record, clock, **{**arguments, "grace_ms": 0})


@mutant("forget compares the token alone", forget_displayed=1)
class ForgetsByToken(Protocol):
    def was_displayed(self, record: Record, state: str, token: int | str) -> bool:
        return record.token == token


@mutant("forget compares the state alone", tasks=2, forget_displayed=1, freeze=1)
class ForgetsByState(Protocol):
    def was_displayed(self, record: Record, state: str, token: int | str) -> bool:
        return super().was_displayed(record, state, record.token)


@mutant("a refused result is written", fused=True, tasks=2, freeze=1)
class WritesRefusedResult(Protocol):
    def fused_complete(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        result = super().fused_complete(record, clock, **arguments)
        return result._replace(backend=arguments["meta"]) if result.case == "lost" else result


@mutant("a SUCCESS of the result backend is overwritten", fused=True, crash=1)
class OverwritesSuccess(Protocol):
    def is_no_success(self, backend: bytes) -> bool:
        return True


@mutant("a result is reported as written, but is not", fused=True)
class WritesNothing(Protocol):
    def fused_complete(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        result = super().fused_complete(record, clock, **arguments)
        return result._replace(backend=arguments["backend"])


@mutant("a resend reports an expired result as written", fused=True, lost_reply=1,
        result_expires=1)  # fmt: skip
class ReportsExpiredResult(Protocol):
    def fused_complete(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        result = super().fused_complete(record, clock, **arguments)
        return result._replace(case="written") if result.case == "ok" else result


@mutant("a resend writes an expired result again", fused=True, late_copy=1, result_expires=1)
class WritesAgain(Protocol):
    def fused_complete(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        result = super().fused_complete(record, clock, **arguments)
        if result.case == "ok" and arguments["backend"] is None:
            return result._replace(case="written", backend=arguments["meta"])
        return result


@mutant("a replay extends the record", fused=True, tasks=2)
class ExtendsReplayed(Protocol):
    def fused_complete(self, record: Record | None, clock: Clock, **arguments: Any) -> Result:
        result = super().fused_complete(record, clock, **arguments)
        if arguments["token"] != 0 or record is None:
            return result
        return result._replace(after=record._replace(expires=clock.ms + LEASE + RETENTION))


# The library


@mutant("the execution id is the task id", redelivery=1)
class TaskIdAsExecutionId(Environment):
    def execution_id_for(self, state: State, message: Message) -> bytes:
        return message.task[-1:].translate(bytes.maketrans(b"123", b"xyz"))


@mutant("a message is acknowledged before it is published again", redelivery=1)
class AcknowledgesFirst(Environment):
    def requeue(self, slot: int) -> Effect:
        return self._acknowledge(slot, then="publish")

    def _publish_again(self, slot: int, then: str = "ack") -> Effect:
        return super()._publish_again(slot, then="")


@mutant("a copy of the running message is ignored", redelivery=1)
class IgnoresCopies(Environment):
    def conflict_policy(self, delivery: Delivery, reply: Reply) -> str:
        return "ignore"


@mutant("a message put back loses its unanswered ids", lost_reply=1)
class LosesUnansweredIds(Environment):
    def unanswered_ids(self, delivery: Delivery) -> bytes:
        return b""


@mutant("the lease is counted from the reply, not the request", tasks=2, freeze=1)
class CountsFromReply(Environment):
    def lease_left_at_begin(self, delivery: Delivery) -> int:
        return LEASE


@mutant("a heartbeat outlives its execution", crash=1)
class RenewsDeadLease(Environment):
    def _tick(self, state: State) -> State:
        state = super()._tick(state)
        record = state.record
        if record is not None and record.state == STARTED:
            record = record._replace(at=LEASE, expires=LEASE + RETENTION)
        return state._replace(record=record)


@mutant("Celery does not write what the script has not written", fused=True, lost_reply=1,
        result_expires=1)  # fmt: skip
class TakesOkForWritten(Environment):
    def _on_reply(self, slot: int, delivery: Delivery) -> Effect:
        reply = delivery.reply
        if delivery.script == "fused_complete" and reply is not None and reply.case == "ok":
            return self._on_result(slot, OUTCOME)
        return super()._on_reply(slot, delivery)


@mutant("a redelivery is taken to have its result", fused=True, redelivery=1, result_overwritten=1)
class TakesResultForGranted(Environment):
    def _on_reply(self, slot: int, delivery: Delivery) -> Effect:
        if delivery.script == "begin" and delivery.reply == Reply("finished", "C", delivery.task):
            return self._on_result(slot, OUTCOME)
        return super()._on_reply(slot, delivery)


@mutant("Celery writes a refused result", fused=True, tasks=2, freeze=1)
class GivesRefusedResult(Environment):
    def result_after(self, delivery: Delivery, result: Result) -> bytes:
        if delivery.script == "fused_complete":
            return delivery.execution_id
        return super().result_after(delivery, result)
