"""The real scripts on a real server against the model, through any sequence of calls.

Each rule makes one call, by way of the store, and asks the model's Protocol what it must answer and
leave behind. Answer, record and expiry must be the model's to the byte, whatever went before:
owners that come and go, replies that are lost, clocks that step, scripts that are flushed.

The same sequence goes the same way each time: what is drawn never hangs on what the server said,
and no lease or reservation is left with so little that it would end by itself between two calls.

The clock steps without touching the server's: to move it by a second is to move everything that was
written by a second the other way.
"""

from __future__ import annotations

from typing import Any

import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from celery_idempotent.key.key import Key
from celery_idempotent.record import layout
from celery_idempotent.record import steps as entries
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record as Shown
from celery_idempotent.record.record import State
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command, Extension
from celery_idempotent.store.scripts import Reply
from tests.labs.verification.model import Answer, Clock, Protocol, Record
from tests.labs.verification.wire import AT_THE_MOMENT, MOMENT, TOLERANCE_MS, microsecond, written
from tests.store.record_harness import (
    FIRST,
    KEY,
    NO_ARGUMENTS,
    OTHER_ARGUMENTS,
    OTHER_WORKER,
    SECOND,
    WORKER,
    RecordHarness,
)

#: Minutes, and more than a sequence takes on a busy machine: nothing may end but by a step of the
#: clock, or the same sequence would go two ways.
LEASE_MS, HOLD_MS, ERROR_MS, RETENTION_MS = 600_000, 900_000, 18_000_000, 36_000_000
GRACE_MS = 300_000

OWNERS = [bytes([number]) * 16 for number in range(1, 5)]
owners = st.sampled_from(OWNERS)
priors = st.lists(owners, max_size=2, unique=True).map(b"".join)
task_ids = st.sampled_from([FIRST, SECOND])
workers = st.sampled_from([WORKER, OTHER_WORKER])
keys = st.sampled_from([KEY, KEY, KEY, OTHER_ARGUMENTS, NO_ARGUMENTS])
holds = st.sampled_from([0, HOLD_MS])
payloads = st.sampled_from([
    Payload("json", b'"charged"'), Payload("pickle+zlib", b"\0\xff"),
    Payload("=task", layout.write_replacement(1, FIRST, entries.write("one", "json", b"1"))),
])  # fmt: skip
#: How a call is made: as it is; sent again after its reply was lost; or at a moment around the very
#: end of the lease or the reservation that is there, in milliseconds after it.
plain, resent = "plain", "resent"
calls = st.sampled_from([plain, plain, plain, resent, -1, 0, 1])
#: With whose token: the record's, more often than others, so that sequences get further; nobody's;
#: or that of the last, last but one, … execution that has begun.
its_own, nobodys = "its own", 0
tokens = st.sampled_from([its_own] * 5 + [nobodys, -1, -2, -3])
#: Of a message among those of its task id.
generations = st.integers(0, 2)
#: The last word for a task id, or none.
output_tail = st.sampled_from([None, Payload("json", b"{}"), Payload("", b"too large")])
#: By how far the clock steps: past the end of the lease or the reservation that is there, or by so
#: much. No sum of these and of the durations above ends where a millisecond counts.
past = "past its end"
clock_steps = st.sampled_from(
    [past, past, LEASE_MS // 2 + 1, RETENTION_MS + 1, -LEASE_MS // 2, -HOLD_MS]
)


class Machine(RuleBasedStateMachine):
    """Several owners of one key, in the server behind `scene`."""

    protocol = Protocol()

    def __init__(self, scene: RecordHarness) -> None:
        super().__init__()
        self.scene = scene
        self.client: redis.Redis = scene.client
        self.client.delete(scene.name)
        self.there: Record | None = None
        #: Of executions that have begun, as they know them; the first is nobody's.
        self.tokens = [1_700_000_000_000_000]
        #: Calls made.
        self.steps = 0

    # The calls

    @rule(execution_id=owners, unanswered_ids=priors, task_id=task_ids, generation=generations,
        worker=workers,
          key=keys, max_attempts=st.sampled_from([1, 2, 5]), how=calls)  # fmt: skip
    def begin(self, key: Key, how: Any, **arguments: Any) -> None:
        lasts = {"lease_ms": LEASE_MS, "retention_ms": RETENTION_MS, "error_ms": ERROR_MS}
        answer = self.call(commands.begin(key, **arguments, **lasts), how)
        if answer.case == "begun" and answer.told is not None:
            self.tokens.append(answer.told.token)

    @rule(which=tokens, payload=payloads, how=calls)
    def complete(self, which: Any, payload: Payload, how: Any) -> None:
        self.call(commands.complete(KEY, self.token(which), payload, RETENTION_MS), how)

    @rule(which=tokens, payload=payloads, how=calls)
    def fail(self, which: Any, payload: Payload, how: Any) -> None:
        self.call(commands.fail(KEY, self.token(which), payload, ERROR_MS), how)

    @rule(which=tokens, hold_ms=holds, generation=generations, error=output_tail, how=calls)
    def release(self, which: Any, hold_ms: int, how: Any, **last_word: Any) -> None:
        lasts = {"retention_ms": RETENTION_MS, "error_ms": ERROR_MS}
        token = self.token(which)
        self.call(commands.release(KEY, token, hold_ms=hold_ms, **last_word, **lasts), how)

    @rule(which=tokens, how=calls)
    def extend(self, which: Any, how: Any) -> None:
        extension = Extension(KEY, self.token(which), LEASE_MS, RETENTION_MS)
        self.call(commands.extend(extension), how)

    @rule(which=tokens, name=st.sampled_from(["one", "two"]), how=calls)
    def step(self, which: Any, name: str, how: Any) -> None:
        entry = entries.write(name, "json", b"1")
        lasts = {"lease_ms": LEASE_MS, "retention_ms": RETENTION_MS}
        self.call(commands.step(KEY, self.token(which), entry, **lasts), how)

    @rule(task_id=task_ids, worker=workers, grace_ms=st.sampled_from([0, 0, GRACE_MS]),
          generation=generations, error=output_tail, how=calls)  # fmt: skip
    def abandon(self, task_id: str, worker: str, how: Any, **rest: Any) -> None:
        self.call(commands.abandon(KEY, task_id, worker, **rest, error_ms=ERROR_MS), how)

    @rule(task_id=task_ids, key=keys, hold_ms=holds, how=calls)
    def reserve(self, task_id: str, key: Key, hold_ms: int, how: Any) -> None:
        self.call(commands.reserve(key, task_id, hold_ms), how)

    @rule(task_id=task_ids, how=calls)
    def mark_continued(self, task_id: str, how: Any) -> None:
        self.call(commands.mark_continued(KEY, task_id), how)

    @rule(which=tokens, state=st.sampled_from([None, *State]))
    def forget(self, which: Any, state: State | None) -> None:
        shown = None if state is None else record_with(state, self.token(which))
        # Not resent: the second time there is nothing left to forget, and it says so.
        self.call(commands.forget(KEY, shown), plain)

    # What befalls

    @rule(by=clock_steps)
    def the_clock_steps(self, by: Any) -> None:
        if self.there is not None:
            left_ms = max(1, self.there.at - self.scene.now_ms())
            self.shift(left_ms + 1 if by == past else by)

    @rule()
    def the_scripts_are_flushed(self) -> None:
        self.client.script_flush()

    # How

    def call(self, command: Command, how: Any) -> Answer:
        """One call, or two of the same; every answer must be the model's."""
        if isinstance(how, int) and self.there is not None and not self.there.finished:
            answer = self.judged(command, self.execute_at(how, command))
            if how < 0:
                self.last_longer(LEASE_MS + how)
            return answer
        answer = self.judged(command, self.scene.store.execute(command))
        if how == resent:
            again = self.judged(command, self.scene.store.execute(command))
            assert again.case == answer.case, "a resend changes the answer"
        return answer

    def execute_at(self, after_ms: int, command: Command) -> Reply:
        """The script itself, `after_ms` after the end of the lease or reservation, to the ms."""
        source = AT_THE_MOMENT % after_ms + command.script.source
        answer = self.client.eval(source, 1, self.scene.name, *command.arguments)
        assert isinstance(answer, bytes)
        moment = int(self.client.get(f"{self.scene.name}{MOMENT}") or 0)  # type: ignore[arg-type]
        assert self.there is not None
        self.there = self.there._replace(at=moment - after_ms)
        return command.script.reply(answer)

    def last_longer(self, by_ms: int) -> None:
        """A lease that has a millisecond left would end by itself, sooner or later."""
        there = self.there
        if there is not None and not there.finished:
            self.put(there._replace(at=there.at + by_ms))

    def judged(self, command: Command, reply: Reply) -> Answer:
        """What the model answers; the server must have said and done the same."""
        raw, left_ms, (seconds, microseconds) = (
            self.client.pipeline().get(self.scene.name).pttl(self.scene.name).time().execute()
        )
        names = command.script.argv
        values = map(as_the_model_has_it, names, command.arguments)
        argv = dict(zip(names, values, strict=True))
        now_ms = reply.now_ms or seconds * 1000
        clock = Clock(now_ms, microsecond(now_ms, raw))
        script = getattr(self.protocol, command.script.name)
        answer: Answer = script(self.there, clock, **argv)
        assert reply.case == answer.case
        assert reply.raw == (written(answer.told) or b"")
        assert raw == written(answer.after)
        if answer.after is not None:
            ends = seconds * 1000 + microseconds // 1000 + left_ms
            assert left_ms > 0
            assert abs(ends - answer.after.expires) <= TOLERANCE_MS
        self.there = answer.after
        self.steps += 1
        return answer

    def shift(self, by_ms: int) -> None:
        """Move the server's clock forward, as far as anybody can tell."""
        there = self.there
        assert there is not None
        self.tokens = [token - by_ms * 1000 for token in self.tokens]
        if there.expires - by_ms <= self.scene.now_ms() + TOLERANCE_MS:
            self.there = None
            self.client.delete(self.scene.name)
            return
        moved = {"at": there.at - by_ms, "expires": there.expires - by_ms}
        self.put(there._replace(token=there.token - by_ms * 1000, **moved))

    def put(self, there: Record) -> None:
        """Write a record past the scripts."""
        self.there = there
        raw = written(there)
        assert raw is not None
        self.client.set(self.scene.name, raw, pxat=there.expires)

    def token(self, which: Any) -> int:
        if which == its_own:
            own = self.there.token if self.there is not None else 0
            return own if own in self.tokens else self.tokens[-1]
        return self.tokens[max(which, -len(self.tokens))]


def record_with(state: State, token: int) -> Shown:
    """A record as an operator is shown it."""
    return Shown(state, str(KEY), KEY.task, FIRST, WORKER, token, 1)


def as_the_model_has_it(name: str, argument: Any) -> Any:
    """Text reaches the server as bytes; a state is a letter, and a missing token no text."""
    if isinstance(argument, str) and argument and name != "state":
        return argument.encode()
    return b"" if name == "format" and not argument else argument


def lengths(examples: int, steps: int, seed: int | None = None) -> settings:
    """So many sequences of so many steps; the same ones each time unless seeded."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=seed is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
