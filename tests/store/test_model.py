"""Any sequence of calls, against a model of what DESIGN's table of states promises.

The model is small enough to be read as the contract. Deadlines pass when the machine says so: it
writes an old one into the record.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_idempotent.record import layout
from celery_idempotent.record import steps as entries
from celery_idempotent.record.record import State
from tests.store.scene import (
    ERROR,
    FIRST,
    HOLD_MS,
    NO_ARGUMENTS,
    OTHER_ARGUMENTS,
    OTHER_WORKER,
    RESULT,
    SECOND,
    WORKER,
    Answer,
    Scene,
)
from tests.store.scene import KEY as ARGUMENTS

OWNERS = [bytes([number]) * 16 for number in range(1, 5)]

owners = st.sampled_from(OWNERS)
priors = st.lists(owners, max_size=2, unique=True).map(b"".join)
task_ids = st.sampled_from([FIRST, SECOND])
workers = st.sampled_from([WORKER, OTHER_WORKER])
keys = st.sampled_from([ARGUMENTS, ARGUMENTS, OTHER_ARGUMENTS, NO_ARGUMENTS])
holds = st.sampled_from([0, HOLD_MS])


@dataclass(frozen=True)
class Expected:
    """What the record must be; None for a key that is absent."""

    state: State
    task_id: str
    fingerprint: bytes
    worker: str = ""
    owner: bytes = b""
    attempt: int = 0
    body: bytes = b""
    continued: bool = False
    #: Its deadline has passed.
    over: bool = False


class Machine(RuleBasedStateMachine):
    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.scene = scene
        self.scene.client.delete(scene.name)
        self.expected: Expected | None = None
        #: Of every execution that has begun, as it knows them; 17 is nobody's.
        self.tokens: list[int] = [17]
        self.holder: int | None = None  # the token that the record answers to
        self.newest = 0

    # What the calls promise

    @rule(
        owner=owners,
        prior=priors,
        task_id=task_ids,
        worker=workers,
        key=keys,
        most=st.sampled_from([1, 2, 5]),
    )
    def begin(self, owner, prior, task_id, worker, key, most):  # type: ignore[no-untyped-def]
        there = self.expected
        answer = self.scene.begin(
            owner=owner, prior=prior, task_id=task_id, worker=worker, key=key, max_attempts=most
        )
        if there is not None and self._refused(answer, key.fingerprint):
            return
        attempt, body, known = 1, b"", key.fingerprint
        if there is not None:
            body, known = there.body, key.fingerprint or there.fingerprint
            if there.state is State.RESERVED and there.task_id != task_id and not there.over:
                assert answer.case == "held"
                return
            if there.state is State.STARTED:
                unanswered = bool(there.owner) and there.owner in (prior[:16], prior[16:])
                own = there.owner == owner
                if not (own or unanswered or there.over):
                    assert answer.case == "held"
                    return
                attempt = there.attempt + (0 if own or unanswered else 1)
                if not own and attempt > most:
                    assert answer.case == "finished"
                    self.expected = replace(
                        there, state=State.FAILED, task_id=task_id, attempt=there.attempt,
                        owner=b"", body=b"poisoned", over=False,
                    )  # fmt: skip
                    self._newer(answer)
                    return
                if own:
                    assert answer.token == self.holder
                    self.newest -= 1
        assert answer.case == "begun"
        self.expected = Expected(State.STARTED, task_id, known, worker, owner, attempt, body)
        self._newer(answer)
        self.tokens.append(answer.token)

    @rule(data=st.data(), fails=st.booleans())
    def settle(self, data, fails):  # type: ignore[no-untyped-def]
        token = self._any_token(data)
        answer = (self.scene.fail if fails else self.scene.complete)(token)
        state = State.FAILED if fails else State.COMPLETED
        there = self.expected
        if self._holds(token):
            assert there is not None
            assert answer.case == "ok"
            body = (ERROR if fails else RESULT).body
            self.expected = replace(there, state=state, owner=b"", body=body, over=False)
        elif there and there.state is state and token == self.holder and not there.continued:
            assert answer.case == "ok"
        else:
            assert answer.case == "lost"

    @rule(data=st.data(), hold_ms=holds)
    def release(self, data, hold_ms):  # type: ignore[no-untyped-def]
        token = self._any_token(data)
        answer = self.scene.release(token, hold_ms)
        there = self.expected
        if self._holds(token):
            assert there is not None
            assert answer.case == "ok"
            if hold_ms or there.body:
                self.expected = Expected(
                    State.RESERVED, there.task_id, there.fingerprint, body=there.body,
                    over=not hold_ms,
                )  # fmt: skip
            else:
                self._forgotten()
        elif there is None or (there.state is State.RESERVED and token == self.holder):
            assert answer.case == "ok"
        else:
            assert answer.case == "lost"

    @rule(data=st.data())
    def extend(self, data):  # type: ignore[no-untyped-def]
        token = self._any_token(data)
        answer = self.scene.extend(token)
        assert answer.case == ("ok" if self._holds(token) else "lost")
        if answer.case == "ok":
            self._lives()

    @rule(data=st.data(), name=st.sampled_from(["one", "two"]))
    def step(self, data, name):  # type: ignore[no-untyped-def]
        token = self._any_token(data)
        answer = self.scene.step(token, name, b"1")
        assert answer.case == ("ok" if self._holds(token) else "lost")
        if answer.case == "ok":
            assert self.expected is not None
            entry = entries.write(name, "json", b"1")
            if not self.expected.body.endswith(entry):
                self.expected = replace(self.expected, body=self.expected.body + entry)
            self._lives()

    @rule(task_id=task_ids, worker=workers)
    def abandon(self, task_id, worker):  # type: ignore[no-untyped-def]
        answer = self.scene.abandon(task_id, worker)
        there = self.expected
        if there and there.state is State.STARTED and (there.task_id, there.worker) == (
            task_id, worker,
        ):  # fmt: skip
            assert answer.case == "ok"
            self.expected = replace(there, over=True, owner=b"")
            self.holder = None
        else:
            assert answer.case == "lost"

    @rule(task_id=task_ids, key=keys, hold_ms=holds)
    def reserve(self, task_id, key, hold_ms):  # type: ignore[no-untyped-def]
        there = self.expected
        answer = self.scene.reserve(task_id, key=key, hold_ms=hold_ms)
        body, known = b"", key.fingerprint
        if there is not None:
            body, known = there.body, key.fingerprint or there.fingerprint
            if self._refused(answer, key.fingerprint):
                return
            if there.state is State.STARTED:
                assert answer.case == ("expired" if there.over else "held")
                return
            if there.task_id != task_id and not there.over:
                assert answer.case == "held"
                return
        assert answer.case == "reserved"
        if hold_ms or body:
            self.expected = Expected(
                State.RESERVED, task_id, known, body=body, over=not hold_ms
            )  # fmt: skip
            self._newer(answer)
        else:
            self._forgotten()

    @rule(task_id=task_ids)
    def dispatched(self, task_id):  # type: ignore[no-untyped-def]
        there = self.expected
        answer = self.scene.dispatched(task_id)
        if there and there.state.finished and there.task_id == task_id:
            assert answer.case == "ok"
            self.expected = replace(there, continued=True)
        else:
            assert answer.case == "lost"

    @rule(data=st.data(), any_token=st.booleans())
    def forget(self, data, any_token):  # type: ignore[no-untyped-def]
        token = None if any_token else self._any_token(data)
        answer = self.scene.forget(token)
        if self.expected is None:
            assert answer.case == "absent"
        elif token is not None and token != self.holder:
            assert answer.case == "changed"
        else:
            assert answer.case == "ok"
            self._forgotten()

    @precondition(lambda self: self.expected and not self.expected.state.finished)
    @rule()
    def time_passes(self):  # type: ignore[no-untyped-def]
        self.scene.client.setrange(self.scene.name, 9, (1).to_bytes(6, "big"))
        assert self.expected is not None
        self.expected = replace(self.expected, over=True)

    # What holds at all times

    @initialize()
    def absent(self):  # type: ignore[no-untyped-def]
        assert self.scene.raw is None

    @invariant()
    def the_record_is_as_expected(self):  # type: ignore[no-untyped-def]
        raw = self.scene.raw
        if self.expected is None:
            assert raw is None
            return
        assert raw is not None
        record = layout.read(raw, "k", "t")
        seen = Expected(
            state=record.state,
            task_id=record.task_id,
            fingerprint=record.fingerprint,
            worker=record.worker,
            owner=self.expected.owner,
            attempt=record.attempt,
            body=record.body,
            continued=record.continued,
            over=self.expected.over,
        )
        assert seen == self.expected
        assert self.scene.left_ms() > 0

    # Helpers

    def _any_token(self, data: st.DataObject) -> int:
        # The right one more often than the others: sequences get further so.
        right = [self.holder] * 6 if self.holder in self.tokens else []
        return data.draw(st.sampled_from([*self.tokens[-3:], *right]), label="token")

    def _holds(self, token: int) -> bool:
        there = self.expected
        return there is not None and there.state is State.STARTED and token == self.holder

    def _refused(self, answer: Answer, fingerprint: bytes) -> bool:
        assert self.expected is not None
        known = self.expected.fingerprint
        if known and fingerprint and known != fingerprint:
            assert answer.case == "reused"
            return True
        if self.expected.state.finished:
            assert answer.case == "finished"
            return True
        return False

    def _newer(self, answer: Answer) -> None:
        assert answer.token > self.newest
        self.newest = self.holder = answer.token

    def _lives(self) -> None:
        assert self.expected is not None
        self.expected = replace(self.expected, over=False)

    def _forgotten(self) -> None:
        self.expected = self.holder = None


def test_any_sequence_of_calls_keeps_the_contract(scene: Scene) -> None:
    run_state_machine_as_test(
        lambda: Machine(scene),  # type: ignore[arg-type]
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
