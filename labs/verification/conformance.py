"""Sequences of calls of the scripts on a server, compared with the model.

Each rule makes one call through the store and compares it with the model's `Protocol`: reply,
record and expiry must be equal to the byte, whatever happened before: other executions, lost
replies, clock steps, flushed scripts.

Sequences are reproducible: nothing that is drawn depends on a reply, and no lease or reservation is
so short that it could expire between two calls.

The clock steps without changing the server's clock: a step forward by a second moves all stored
times back by a second.
"""

from __future__ import annotations

from typing import Any

import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from celery_idempotent.key.key import Key, default_root
from celery_idempotent.record import layout
from celery_idempotent.record import steps as entries
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record as StoredRecord
from celery_idempotent.record.record import State
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command, LeaseExtension
from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.store.scripts import Reply
from labs.verification.model import WITH_ENTRY, Clock, Protocol, Record, Result
from labs.verification.table import BACKENDS, META
from labs.verification.wire import AT_THE_MOMENT, MOMENT, TOLERANCE_MS, encode, microsecond
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

#: Longer than a sequence takes on a busy machine: things may expire by a step of the clock alone,
#: or sequences would not be reproducible.
LEASE_MS, HOLD_MS, ERROR_MS, RETENTION_MS = 600_000, 900_000, 18_000_000, 36_000_000
GRACE_MS = 300_000

#: How long the result backend keeps a task's result.
BACKEND_SECONDS = 3600

execution_ids = st.sampled_from([bytes([number]) * 8 for number in range(1, 5)])
unanswered = st.lists(execution_ids, max_size=2, unique=True).map(b"".join)
task_ids = st.sampled_from([FIRST, SECOND])
workers = st.sampled_from([WORKER, OTHER_WORKER])
keys = st.sampled_from([KEY, KEY, KEY, OTHER_ARGUMENTS, NO_ARGUMENTS])
holds = st.sampled_from([0, HOLD_MS])
VALUES = Payload("json", b'"charged"'), Payload("pickle+zlib", b"\0\xff")
REPLACEMENT = Payload(
    "=task", layout.write_replacement(1, FIRST, entries.write("one", "json", b"1"))
)
payloads = st.sampled_from([*VALUES, REPLACEMENT])
values = st.sampled_from(VALUES)
#: How a call is made: once; again after its reply was lost; or so many milliseconds after the end
#: of the present lease or reservation.
ONCE, RESENT = "once", "resent"
modes = st.sampled_from([ONCE, ONCE, ONCE, RESENT, -1, 0, 1])
#: The token of a call: the record's, most often, so that sequences get further; one that no
#: execution has; or that of the last, last but one, … execution that has begun.
CURRENT, UNUSED = "current", 0
tokens = st.sampled_from([CURRENT] * 5 + [UNUSED, -1, -2, -3])
generations = st.integers(0, 2)
#: Of three messages, two of which have one task id.
ROOTS = {FIRST: default_root(FIRST), SECOND: default_root(SECOND)}
roots = st.sampled_from([*ROOTS.values(), b"anew 8 b"])
#: How long a continuation may be sent; None: there is none.
SENDING_MS = 1_200_000
sendings = st.sampled_from([None, None, 0, SENDING_MS])
#: How long a call that meets an execution comes back for its outcome: longer than any retention.
keeps = st.sampled_from([0, 0, RETENTION_MS + HOLD_MS])
#: An error that ends a task id, or none.
errors = st.sampled_from([None, Payload("json", b"{}"), Payload("", b"too large")])
#: How far the clock steps: past the end of the present lease or reservation, or by a duration. No
#: sum of these and of the durations above is within milliseconds of another.
PAST_END = "past end"
clock_steps = st.sampled_from(
    [PAST_END, PAST_END, LEASE_MS // 2 + 1, RETENTION_MS + 1, -LEASE_MS // 2, -HOLD_MS]
)


class Machine(RuleBasedStateMachine):
    """Several executions of one key, on the server of `harness`."""

    protocol = Protocol()

    def __init__(self, harness: RecordHarness) -> None:
        super().__init__()
        self.harness = harness
        self.client: redis.Redis = harness.client
        self.client.delete(harness.name)
        self.record: Record | None = None
        #: By root.
        self.entries: dict[bytes, Record] = {}
        for root in (*ROOTS.values(), b"anew 8 b"):
            self.client.delete(self.entry_name(root))
        self.backend_name = f"{harness.name}:result"
        #: What the result backend holds.
        self.backend: bytes | None = None
        #: Of executions that have begun; no execution has the first one.
        self.tokens = [1_700_000_000_000_000]
        #: The number of calls.
        self.steps = 0

    # Calls

    @rule(execution_id=execution_ids, unanswered_ids=unanswered, task_id=task_ids, root=roots,
          generation=generations, continues=st.booleans(), worker=workers, key=keys,
          max_attempts=st.sampled_from([1, 2, 5]), min_retention_ms=keeps, mode=modes)  # fmt: skip
    def begin(self, key: Key, mode: Any, **arguments: Any) -> None:
        durations = {"lease_ms": LEASE_MS, "retention_ms": RETENTION_MS, "error_ms": ERROR_MS}
        result = self.call(commands.begin(key, **arguments, **durations), mode)
        if result.case == "begun" and result.replied is not None:
            self.tokens.append(result.replied.token)

    @rule(which=tokens, payload=values, sending_ms=sendings, mode=modes)
    def complete(self, which: Any, payload: Payload, mode: Any, **sending: Any) -> None:
        token = self.token(which)
        self.call(commands.complete(KEY, token, payload, RETENTION_MS, **sending), mode)

    @rule(which=tokens, mode=modes)
    def replace(self, which: Any, mode: Any) -> None:
        # The task that takes over has the continuation, and its error releases the record.
        token = self.token(which)
        self.call(commands.complete(KEY, token, REPLACEMENT, RETENTION_MS, sending_ms=0), mode)

    @rule(which=tokens, payload=values, before=st.sampled_from(BACKENDS), mode=modes)
    def fused_complete(self, which: Any, payload: Payload, before: Any, mode: Any) -> None:
        result = commands.BackendResult(self.backend_name, META, BACKEND_SECONDS)
        command = commands.complete(KEY, self.token(which), payload, RETENTION_MS, result)
        self.hold_in_backend(before)
        self.call(command, mode)

    @rule(before=st.sampled_from(BACKENDS), mode=modes)
    def write_result(self, before: Any, mode: Any) -> None:
        result = commands.BackendResult(self.backend_name, META, BACKEND_SECONDS)
        self.hold_in_backend(before)
        self.call(commands.write_result(KEY, result), mode)

    @rule(which=tokens, payload=payloads, sending_ms=sendings, mode=modes)
    def fail(self, which: Any, payload: Payload, mode: Any, **sending: Any) -> None:
        self.call(commands.fail(KEY, self.token(which), payload, ERROR_MS, **sending), mode)

    @rule(which=tokens, hold_ms=holds, generation=generations, error=errors, mode=modes,
          sending_ms=st.sampled_from([None, SENDING_MS]))  # fmt: skip
    def release(self, which: Any, hold_ms: int, mode: Any, **final: Any) -> None:
        durations = {"retention_ms": RETENTION_MS, "error_ms": ERROR_MS}
        token = self.token(which)
        # An execution releases with the root that it has begun with.
        root = (self.record and self.record.root) or ROOTS[FIRST]
        release = commands.release(KEY, token, hold_ms=hold_ms, root=root, **final, **durations)
        self.call(release, mode)

    @rule(which=tokens, mode=modes)
    def extend(self, which: Any, mode: Any) -> None:
        extension = LeaseExtension(KEY, self.token(which), LEASE_MS, RETENTION_MS)
        self.call(commands.extend(extension), mode)

    @rule(which=tokens, name=st.sampled_from(["one", "two"]), mode=modes)
    def step(self, which: Any, name: str, mode: Any) -> None:
        entry = entries.write(name, "json", b"1")
        durations = {"lease_ms": LEASE_MS, "retention_ms": RETENTION_MS}
        self.call(commands.save_step(KEY, self.token(which), entry, **durations), mode)

    @rule(task_id=task_ids, worker=workers, grace_ms=st.sampled_from([0, 0, GRACE_MS]),
          root=roots, execution_id=execution_ids, generation=generations, error=errors,
          sending_ms=st.sampled_from([None, SENDING_MS]), mode=modes)  # fmt: skip
    def abandon(self, task_id: str, worker: str, mode: Any, **rest: Any) -> None:
        self.call(commands.abandon(KEY, task_id, worker, **rest, error_ms=ERROR_MS), mode)

    @rule(task_id=task_ids, key=keys, hold_ms=holds, mode=modes)
    def reserve(self, task_id: str, key: Key, hold_ms: int, mode: Any) -> None:
        self.call(commands.reserve(key, task_id, hold_ms), mode)

    @rule(root=roots, execution_id=execution_ids, lease_ms=st.sampled_from([0, SENDING_MS]),
          mode=modes)  # fmt: skip
    def renew_continuation(
        self, root: bytes, execution_id: bytes, lease_ms: int, mode: Any
    ) -> None:
        extension = LeaseExtension(KEY, 0, lease_ms, RETENTION_MS, root, execution_id)
        self.call(commands.extend(extension), mode)

    @rule(root=roots, execution_id=execution_ids, mode=modes)
    def mark_continued(self, root: bytes, execution_id: bytes, mode: Any) -> None:
        self.call(commands.mark_continued(KEY, root, execution_id), mode)

    @rule(which=tokens, state=st.sampled_from([None, *State]))
    def forget(self, which: Any, state: State | None) -> None:
        displayed = None if state is None else stored_record(state, self.token(which))
        # Not resent: the second reply would be absent.
        self.call(commands.forget(KEY, displayed), ONCE)

    # Faults

    @rule(by=clock_steps)
    def the_clock_steps(self, by: Any) -> None:
        if self.record is not None:
            end = self.record.until if self.record.sending else self.record.at
            left_ms = max(1, end - self.harness.now_ms())
            by_ms = left_ms + 1 if by == PAST_END else by
            self.shift(by_ms)
            self.shift_entries(by_ms)

    @rule()
    def the_scripts_are_flushed(self) -> None:
        self.client.script_flush()

    # Execution

    def hold_in_backend(self, before: bytes | None) -> None:
        """Puts `before` into the result backend."""
        if before is None:
            self.client.delete(self.backend_name)
        else:
            self.client.set(self.backend_name, before, ex=BACKEND_SECONDS)
        self.backend = before

    def call(self, command: Command, mode: Any) -> Result:
        """Executes a command in the given mode and compares it with the model."""
        if isinstance(mode, int) and self.record is not None and not self.record.finished:
            result = self.compare(command, self.execute_at(mode, command))
            if mode < 0:
                self.prolong(LEASE_MS + mode)
            return result
        result = self.compare(command, run_sync(self.harness.store.execute(command)))
        if mode == RESENT:
            again = self.compare(command, run_sync(self.harness.store.execute(command)))
            assert again.case == result.case, "a resend changes the reply"
        return result

    def execute_at(self, after_ms: int, command: Command) -> Reply:
        """Executes a command exactly `after_ms` after the end of the lease or reservation."""
        source = AT_THE_MOMENT % after_ms + command.script.source
        names = [self.harness.name, *filter(None, [command.result_name])]
        if command.root:
            names.append(self.entry_name(command.root))
        raw_reply = self.client.eval(source, len(names), *names, *command.arguments)
        assert isinstance(raw_reply, bytes)
        moment = int(self.client.get(f"{self.harness.name}{MOMENT}") or 0)  # type: ignore[arg-type]
        assert self.record is not None
        self.record = self.record._replace(at=moment - after_ms)
        return command.script.reply(raw_reply)

    def prolong(self, by_ms: int) -> None:
        """Prolongs a lease or reservation that would expire during the sequence."""
        record = self.record
        if record is not None and not record.finished:
            self.put(record._replace(at=record.at + by_ms))

    def compare(self, command: Command, reply: Reply) -> Result:
        """Returns the model's result, after comparing the server's reply and record with it."""
        raw, ttl_ms, (seconds, microseconds) = (
            self.client.pipeline().get(self.harness.name).pttl(self.harness.name).time().execute()
        )
        names = command.script.argv[: len(command.arguments)]
        values = map(model_argument, names, command.arguments)
        argv = dict(zip(names, values, strict=True))
        now_ms = reply.now_ms or seconds * 1000
        clock = Clock(now_ms, microsecond(now_ms, raw))
        if command.result_name:
            argv["backend"] = self.backend
        script = getattr(self.protocol, command.script.name)
        if command.script.name in WITH_ENTRY:
            argv["entry"] = self.entries.get(command.root)
        result: Result = script(self.record, clock, **argv)
        assert reply.case == result.case
        assert reply.raw == (encode(result.replied) or b"")
        assert raw == encode(result.after)
        if result.after is not None:
            expires = seconds * 1000 + microseconds // 1000 + ttl_ms
            assert ttl_ms > 0
            assert abs(expires - result.after.expires) <= TOLERANCE_MS
        if command.result_name:
            assert self.client.get(self.backend_name) == result.backend
            self.backend = result.backend
        self.record = result.after
        if isinstance(result.entry, Record):
            self.entries[command.root] = result.entry
        if command.root:
            self.compare_entry(command.root)
        self.steps += 1
        return result

    def entry_name(self, root: bytes) -> str:
        return self.harness.store.name(KEY.entry(root))

    def compare_entry(self, root: bytes) -> None:
        """Compares the entry of a message with the model's."""
        name, expected = self.entry_name(root), self.entries.get(root)
        assert self.client.get(name) == encode(expected)
        if expected is not None:
            expires = self.harness.now_ms() + int(self.client.pttl(name))  # type: ignore[arg-type]
            assert abs(expires - expected.expires) <= TOLERANCE_MS

    def shift(self, by_ms: int) -> None:
        """Has the effect of moving the server's clock forward."""
        record = self.record
        assert record is not None
        self.tokens = [token - by_ms * 1000 for token in self.tokens]
        if record.expires - by_ms <= self.harness.now_ms() + TOLERANCE_MS:
            self.record = None
            self.client.delete(self.harness.name)
            return
        moved = {
            "at": record.at - by_ms, "expires": record.expires - by_ms,
            "until": record.until - by_ms if record.sending else 0,
            "met": None if record.met is None else record.met - by_ms,
        }  # fmt: skip
        self.put(record._replace(token=record.token - by_ms * 1000, **moved))

    def shift_entries(self, by_ms: int) -> None:
        """As `shift`, for the entries."""
        for root, entry in [*self.entries.items()]:
            if entry.expires - by_ms <= self.harness.now_ms() + TOLERANCE_MS:
                del self.entries[root]
                self.client.delete(self.entry_name(root))
                continue
            moved = entry._replace(
                at=entry.at - by_ms, expires=entry.expires - by_ms,
                until=entry.until - by_ms if entry.sending else 0,
            )  # fmt: skip
            self.entries[root] = moved
            raw = encode(moved)
            assert raw is not None
            self.client.set(self.entry_name(root), raw, pxat=moved.expires)

    def put(self, record: Record) -> None:
        """Writes a record without a script."""
        self.record = record
        raw = encode(record)
        assert raw is not None
        self.client.set(self.harness.name, raw, pxat=record.expires)

    def token(self, which: Any) -> int:
        if which == CURRENT:
            current = self.record.token if self.record is not None else 0
            return current if current in self.tokens else self.tokens[-1]
        return self.tokens[max(which, -len(self.tokens))]


def stored_record(state: State, token: int) -> StoredRecord:
    """Returns a record as displayed to an operator."""
    return StoredRecord(state, str(KEY), KEY.task, FIRST, WORKER, token, 1)


def model_argument(name: str, argument: Any) -> Any:
    """Converts an argument of a command to the model's: text to bytes, except for states."""
    if isinstance(argument, str) and argument and name != "state":
        return argument.encode()
    return b"" if name == "format" and not argument else argument


def lengths(examples: int, steps: int, seed: int | None = None) -> settings:
    """Returns settings for sequences of calls; without a seed they are always the same."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=seed is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
