"""The environments with a turn that are searched, and mistakes that the search must detect."""

from __future__ import annotations

from typing import Any, NamedTuple

from labs.verification.model import STARTED, Clock, Record, Waiting
from labs.verification.search import SearchResult, search
from labs.verification.turn_environment import TurnEnvironment
from labs.verification.turn_model import TurnProtocol, TurnResult

_BURST: dict[str, Any] = {"until": "started", "tasks": 3, "dedupes": True}

#: By name: the arguments of TurnEnvironment.
SHORT: dict[str, dict[str, Any]] = {
    "one at a time": {"allowed": {"freeze": 1}},
    "one at a time, a crash and a copy": {"allowed": {"crash": 1, "redelivery": 1}},
    "one at a time, an error, a retry and a copy": {
        "allowed": {"error": 1, "retry": 1, "redelivery": 1},
    },
    "one at a time, ignored": {
        "on_conflict": "ignore", "allowed": {"crash": 1, "redelivery": 1},
    },
    "one at a time, published once": {
        "tasks": 3, "dedupes": True, "allowed": {"seen crash": 1},
    },
    "one at a time, published anew": {
        "same_id": True, "allowed": {"error": 1, "redelivery": 1},
    },
    "a burst": _BURST,
    "a burst, a crash": {**_BURST, "allowed": {"crash": 1}},
    "a burst, ignored": {**_BURST, "on_conflict": "ignore", "allowed": {"seen crash": 1}},
}  # fmt: skip

LONG: dict[str, dict[str, Any]] = {
    **SHORT,
    "one at a time, two freezes": {"tasks": 3, "allowed": {"freeze": 2}},
    "one at a time, freeze, crash and copy": {
        "allowed": {"freeze": 1, "crash": 1, "redelivery": 1},
    },
    "one at a time, three workers": {
        "tasks": 3, "workers": 3, "allowed": {"freeze": 1, "redelivery": 1},
    },
    "one at a time, freeze, error and retry": {
        "allowed": {"freeze": 1, "error": 1, "retry": 1, "redelivery": 1},
    },
    "a burst, freeze and retry": {**_BURST, "allowed": {"freeze": 1, "retry": 1}},
    "a burst, crash, error and copy": {
        **_BURST, "allowed": {"crash": 1, "error": 1, "redelivery": 1},
    },
    "a burst of four": {**_BURST, "tasks": 4, "allowed": {"seen crash": 1}},
    "a burst, reservations that expire": {**_BURST, "expires": True, "allowed": {"error": 1}},
}  # fmt: skip


class TurnMutant(NamedTuple):
    """A deliberate mistake, and the environment in which it shows."""

    name: str
    protocol: type[TurnProtocol]
    environment: type[TurnEnvironment]
    arguments: dict[str, Any]

    def search(self) -> SearchResult:
        """Searches for a counterexample."""
        return search(self.environment(self.protocol(), **self.arguments))  # type: ignore[arg-type]


MUTANTS: list[TurnMutant] = []


def mutant(name: str, environment: str) -> Any:
    """Registers the decorated class as a mutant."""

    def add(cls: type) -> type:
        protocol = cls if issubclass(cls, TurnProtocol) else TurnProtocol
        setting = cls if issubclass(cls, TurnEnvironment) else TurnEnvironment
        MUTANTS.append(TurnMutant(name, protocol, setting, SHORT[environment]))
        return cls

    return add


@mutant("the turn is taken over while it is held", "one at a time")
class TakesTurnOver(TurnProtocol):
    def blocks(self, *args: Any) -> bool:
        return False


@mutant("ends do not compare the token of the turn", "one at a time")
class EndsWithoutTurn(TurnProtocol):
    def holds(self, turn: Record | None, token: int) -> bool:
        return turn is not None and turn.state == STARTED


@mutant("the heartbeat does not extend the turn", "one at a time")
class ExtendsMessageOnly(TurnProtocol):
    def extend(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        result = super().extend(record, turn, clock, **arguments)
        return result._replace(turn=turn)


@mutant("the end of a message is not remembered", "one at a time, a crash and a copy")
class ForgetsEnds(TurnProtocol):
    def begin(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        if record is not None and record.finished:
            record = None
        if turn is not None and turn.finished:
            turn = None
        return super().begin(record, turn, clock, **arguments)


@mutant("an error of a message is not remembered", "one at a time, an error, a retry and a copy")
class ForgetsErrors(TurnProtocol):
    def release(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        return super().release(record, turn, clock, **{**arguments, "error": b""})


@mutant("a turn that ended answers every message", "one at a time")
class AnswersEveryMessage(TurnProtocol):
    def has_ended(self, turn: Record, task_id: bytes, root: bytes) -> bool:
        return turn.finished


@mutant("the end keeps the turn", "one at a time")
class KeepsTurn(TurnProtocol):
    def end_turn(
        self, turn: Record | None, clock: Clock, last: Record | None, expires: int
    ) -> Record | None:
        return turn


@mutant("a burst gets the result of the running call", "a burst")
class CollapsesOntoRunning(TurnProtocol):
    def reserve_turn(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        return super().reserve_turn(record, turn, clock, **{**arguments, "waits": 0})


@mutant("the end forgets the waiting message", "a burst")
class ForgetsWaiting(TurnProtocol):
    def end_turn(
        self, turn: Record | None, clock: Clock, last: Record | None, expires: int
    ) -> Record | None:
        return last and last._replace(expires=expires)


@mutant("a takeover forgets the waiting message", "a burst, a crash")
class TakeoverForgetsWaiting(TurnProtocol):
    def begin(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        result = super().begin(record, turn, clock, **arguments)
        if result.case != "begun" or result.turn is None:
            return result
        return result._replace(turn=result.turn._replace(waiting=()))


@mutant("every message of a burst waits", "a burst")
class EveryoneWaits(TurnProtocol):
    def waiting(self, turn: Record | None, clock: Clock) -> Waiting | None:
        return None


@mutant("an abandoned turn forgets the waiting message", "a burst, ignored")
class AbandonForgetsWaiting(TurnProtocol):
    def abandon(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        result = super().abandon(record, turn, clock, **arguments)
        return result._replace(turn=result.turn and result.turn._replace(waiting=()))


@mutant("a waiting message is ignored", "a burst, ignored")
class IgnoresWaiting(TurnEnvironment):
    def policy(self, case: str) -> str:
        return self.on_conflict


@mutant("a message that was killed is ignored", "one at a time, ignored")
class IgnoresKilled(TurnProtocol):
    def begin(
        self, record: Record | None, turn: Record | None, clock: Clock, **arguments: Any
    ) -> TurnResult:
        result = super().begin(record, turn, clock, **arguments)
        return result._replace(case="busy") if result.case == "later" else result


@mutant("a copy is put back without being published again", "one at a time, a crash and a copy")
class DropsCopies(TurnEnvironment):
    def _requeue(self, state: Any, message: Any) -> Any:
        return self._acknowledge(state, message, "")
