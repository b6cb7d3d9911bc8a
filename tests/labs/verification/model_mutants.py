"""The model broken on purpose: each mutant is a mistake that one could make, and must be caught.

A mutant of the scripts overrides the Protocol, one of the gate or of the library overrides the
World.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.labs.verification.environment import Runtime
from tests.labs.verification.model import FAILED, STARTED, Answer, Clock, Error, Protocol, Record
from tests.labs.verification.search import Searched, search
from tests.labs.verification.state import LEASE, RETENTION, Heard, Message, Pass, State, StepTaken


@dataclass(frozen=True)
class Mutant:
    name: str
    protocol: type[Protocol]
    world: type[Runtime]
    #: The world in which it is looked for: what World takes.
    where: dict[str, Any]

    def conformance_run(self) -> Searched:
        """A search that ends with a counterexample."""
        return search(self.world(self.protocol(), **self.where))


MUTANTS: list[Mutant] = []


def mutant(name: str, tasks: int = 1, workers: int = 2, **allowed: int) -> Callable[[type], type]:
    """The decorated class is the mutant `name`, to be looked for where that is allowed."""
    allowed = {what.replace("_", " "): times for what, times in allowed.items()}

    def add(one: type) -> type:
        protocol = one if issubclass(one, Protocol) else Protocol
        world = one if issubclass(one, Runtime) else Runtime
        MUTANTS.append(
            Mutant(name, protocol, world, {"tasks": tasks, "workers": workers, "allowed": allowed})
        )
        return one

    return add


# The scripts


@mutant("no token check", tasks=2, freeze=1)
class NoTokenCheck(Protocol):
    def holds(self, there: Record | None, token: int) -> bool:
        return there is not None and there.state == STARTED


@mutant("the last completion wins", tasks=2, freeze=1)
class Overwrites(Protocol):
    def settle(
        self, there: Record | None, clock: Clock, state: str, token: int, *rest: Any
    ) -> Answer:
        if there is not None and there.finished:
            there, token = there._replace(state=STARTED), there.token
        return super().settle(there, clock, state, token, *rest)


@mutant("the deadline is the key's expiry", tasks=2, freeze=1)
class DeadlineInExpiry(Protocol):
    def started_until(self, clock: Clock, lease_ms: int, ttl_ms: int) -> int:
        return clock.ms + lease_ms


@mutant("no expiry while STARTED", crash=1)
class NoExpiry(Protocol):
    def started_until(self, clock: Clock, lease_ms: int, ttl_ms: int) -> int:
        return 10**12


@mutant("a lease that lasts is taken over", handed_out_again=1)
class TakesOverTooEarly(Protocol):
    def lasts(self, there: Record, clock: Clock) -> bool:
        return False


@mutant("a lease that ended is not taken over", crash=1)
class NeverTakesOver(Protocol):
    def lasts(self, there: Record, clock: Clock) -> bool:
        return True


@mutant("a takeover keeps the token", tasks=2, freeze=1)
class SameToken(Protocol):
    def next_token(self, there: Record, clock: Clock) -> int:
        return there.token


@mutant("the token is the clock", clock_back=1, crash=1)
class TokenIsClock(Protocol):
    def next_token(self, there: Record, clock: Clock) -> int:
        return clock.us


@mutant("the token counts from the record alone", forget=1, handed_out_again=1)
class TokenCounts(Protocol):
    def begin(self, there: Record | None, clock: Clock, **arguments: Any) -> Answer:
        return super().begin(there, Clock(clock.ms, -(10**6)), **arguments)


@mutant("begin does not know its own resend", lost_reply=1)
class NotItsOwn(Protocol):
    def is_own(self, there: Record, execution_id: bytes) -> bool:
        return False


@mutant("begin does not know an unanswered pass", lost_reply=1)
class ForgetsPrior(Protocol):
    def begin(self, there: Record | None, clock: Clock, **arguments: Any) -> Answer:
        return super().begin(there, clock, **{**arguments, "unanswered_ids": b""})


@mutant("complete refuses its own resend", lost_reply=1)
class RefusesResend(Protocol):
    def settle(self, there: Record | None, *rest: Any) -> Answer:
        answer = super().settle(there, *rest)
        return answer._replace(case="lost") if there == answer.after else answer


@mutant("any outcome is told to be the caller's", tasks=2, freeze=1)
class AnyOutcomeWillDo(Protocol):
    def settle(self, there: Record | None, *rest: Any) -> Answer:
        if there is not None and there.finished:
            return Answer("ok", there, there)
        return super().settle(there, *rest)


@mutant("abandon gives no new token", time_limit=1)
class AbandonKeepsToken(Protocol):
    def abandon(self, there: Record | None, clock: Clock, **arguments: Any) -> Answer:
        answer = super().abandon(there, clock, **arguments)
        if answer.case != "ok" or answer.after is None or there is None:
            return answer
        return answer._replace(after=answer.after._replace(token=there.token))


@mutant("abandon does not look at the worker", crash=1)
class AbandonsAnyone(Protocol):
    def is_child(self, there: Record, task_id: bytes, worker: bytes) -> bool:
        return there.state == STARTED and there.task_id == task_id


@mutant("release does not look at the token", tasks=2, freeze=1, error=1)
class ReleasesAnyones(Protocol):
    def release(self, there: Record | None, clock: Clock, **arguments: Any) -> Answer:
        token = arguments["token"] if there is None else there.token
        return super().release(there, clock, **{**arguments, "token": token})


@mutant("a retry does not hold the key", tasks=2, retry=1)
class NoHold(Protocol):
    def begin(self, there: Record | None, clock: Clock, **arguments: Any) -> Answer:
        if there is not None and there.state == "R":
            there = there._replace(at=clock.ms)
        return super().begin(there, clock, **arguments)


@mutant("a release forgets finished steps", step=1, error=1, retry=1)
class LosesSteps(Protocol):
    def release(self, there: Record | None, clock: Clock, **arguments: Any) -> Answer:
        return super().release(there and there._replace(body=b""), clock, **arguments)


@mutant("a takeover does not count", crash=1)
class CountsNobody(Protocol):
    def begin(self, there: Record | None, clock: Clock, **arguments: Any) -> Answer:
        answer = super().begin(there, clock, **arguments)
        if answer.case != "begun" or answer.after is None:
            return answer
        begun = answer.after._replace(attempt=1)
        return Answer("begun", begun, begun)


@mutant("poisoned one death too early", workers=1, crash=3)
class PoisonsEarly(Protocol):
    def begin(self, there: Record | None, clock: Clock, **arguments: Any) -> Answer:
        most = arguments["max_attempts"] - 1
        return super().begin(there, clock, **{**arguments, "max_attempts": most})


@mutant("poisoned and told, but not stored", workers=1, crash=3)
class PoisonsUnseen(Protocol):
    def begin(self, there: Record | None, clock: Clock, **arguments: Any) -> Answer:
        answer = super().begin(there, clock, **arguments)
        poisoned = answer.told and answer.told.state == FAILED and there and not there.finished
        return answer._replace(after=there) if poisoned else answer


@mutant("an error leaves nothing for copies", error=1, handed_out_again=1)
class LeavesNoError(Protocol):
    def release(self, there: Record | None, clock: Clock, **arguments: Any) -> Answer:
        return super().release(there, clock, **{**arguments, "error": b""})


@mutant("an error takes the place of another task id's", tasks=2, error=2, handed_out_again=1)
class KeepsTheLatestError(Protocol):
    def with_error(self, there: Record, error: Error) -> Record:
        return there._replace(errors=(error,))


@mutant("an error is not looked for over a lease that ended", tasks=2, error=1, crash=1,
        handed_out_again=1)  # fmt: skip
class ErrorsOfTheFreeAlone(Protocol):
    def answering(self, there: Record, task_id: bytes, generation: int) -> Error | None:
        if there.state == STARTED:
            return None
        return super().answering(there, task_id, generation)


@mutant("an error answers every task id", tasks=2, error=1)
class AnswersEverybody(Protocol):
    def answering(self, there: Record, task_id: bytes, generation: int) -> Error | None:
        return next(iter(there.errors), None)


@mutant("a copy of an earlier message passes for the retry", retry=1, handed_out_again=1)
class TakesCopiesForRetries(Protocol):
    def is_earlier(self, there: Record, generation: int) -> bool:
        return False


@mutant("a time limit that is the end leaves nothing", fatal_time_limit=1, handed_out_again=1)
class LeavesNoLimit(Protocol):
    def abandon(self, there: Record | None, clock: Clock, **arguments: Any) -> Answer:
        return super().abandon(there, clock, **{**arguments, "error": b""})


@mutant("a time limit that is the end does not count", tasks=2, fatal_time_limit=1)
class CountsNoLimit(Protocol):
    def with_error(self, there: Record, error: Error) -> Record:
        return super().with_error(there, error)._replace(attempt=0)


@mutant("nobody waits for the child to be killed", tasks=2, fatal_time_limit=1)
class NoGrace(Protocol):
    def abandon(self, there: Record | None, clock: Clock, **arguments: Any) -> Answer:
        return super().abandon(there, clock, **{**arguments, "grace_ms": 0})


@mutant("forget compares the token alone", forget_shown=1)
class ForgetsByToken(Protocol):
    def was_shown(self, there: Record, state: str, token: int | str) -> bool:
        return there.token == token


@mutant("forget compares the state alone", tasks=2, forget_shown=1, freeze=1)
class ForgetsByState(Protocol):
    def was_shown(self, there: Record, state: str, token: int | str) -> bool:
        return super().was_shown(there, state, there.token)


# The gate and the library


@mutant("the task id is the owner", handed_out_again=1)
class TaskIdIsOwner(Runtime):
    def owner_of(self, state: State, message: Message) -> bytes:
        return message.task[-1:].translate(bytes.maketrans(b"123", b"xyz"))


@mutant("acknowledges before it publishes again", handed_out_again=1)
class AcknowledgesFirst(Runtime):
    def comes_back(self, slot: int) -> StepTaken:
        return self._acknowledges(slot, then="publish")

    def _publishes_again(self, slot: int, then: str = "ack") -> StepTaken:
        return super()._publishes_again(slot, then="")


@mutant("a copy of the running message is ignored", handed_out_again=1)
class IgnoresCopies(Runtime):
    def policy(self, one: Pass, heard: Heard) -> str:
        return "ignore"


@mutant("a message put back forgets its unanswered pass", lost_reply=1)
class ForgetsItsPasses(Runtime):
    def unanswered_ids(self, one: Pass) -> bytes:
        return b""


@mutant("the lease is trusted from when the answer came", tasks=2, freeze=1)
class TrustsFromAnswer(Runtime):
    def trusts(self, one: Pass) -> int:
        return LEASE


@mutant("a heartbeat outlives its execution", crash=1)
class BeatsForTheDead(Runtime):
    def _ticks(self, state: State) -> State:
        state = super()._ticks(state)
        there = state.record
        if there is not None and there.state == STARTED:
            there = there._replace(at=LEASE, expires=LEASE + RETENTION)
        return state._replace(record=there)
