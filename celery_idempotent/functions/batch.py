"""Batches: any number of keys begin in one round trip and complete in another.

Each key has a `Call` and a flow of its own. `Lockstep` runs the flows side by side, and sends the
commands that they wait for together.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import coroutine
from typing import Any

from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report, report_refused
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.execution import BaseExecution
from celery_idempotent.core.flow.extension import Extension
from celery_idempotent.core.flow.host import CallData
from celery_idempotent.core.flow.values import Admission, Answer, End, Failure, Finished, Result
from celery_idempotent.core.payload.codec import PayloadCodec
from celery_idempotent.core.record import Record, layout
from celery_idempotent.core.store import run_sync
from celery_idempotent.core.store.commands import Command
from celery_idempotent.errors import (
    ConflictError,
    IdempotencyError,
    KeyReusedError,
    KeyRuleError,
    LeaseLostError,
    StoreUnavailableError,
)
from celery_idempotent.functions.direct_call import (
    Decision,
    DirectHost,
    NotCompletedError,
    Parts,
    TwoPartFlows,
    extensions_of_direct_call,
    outcome_of,
)


@dataclass(eq=False)
class Entry:
    """One key of a batch."""

    #: The key, as passed by the caller.
    key: Hashable
    decision: Decision = Decision.DUPLICATE
    #: The reason for REJECTED, the ConflictError under CONFLICT, or the reason why a completed
    #: key's value was not stored.
    error: IdempotencyError | None = None
    #: Under REPLAY, the finished record; None otherwise.
    record: Record | None = None
    #: Under RUN, the execution; None otherwise.
    execution: BaseExecution | None = None

    def refuse(self, error: Exception) -> None:
        """Sets the decision of a key that `error` refuses."""
        if not isinstance(error, IdempotencyError):
            raise error
        conflict = isinstance(error, ConflictError)
        self.decision, self.error = Decision.CONFLICT if conflict else Decision.REJECTED, error

    def set_decision(self, call: Call, end: End | BaseException | None) -> None:
        """Sets the decision from the `end` of the flow of `call`; None if it reached its body."""
        if end is None:
            assert call.grant is not None
            self.decision, self.execution = Decision.RUN, call.grant.execution
        elif isinstance(end, Answer) and end.replayed and not end.refused:
            self.decision, self.record = Decision.REPLAY, end.record
        else:
            try:
                outcome_of(call, end).get()
            except Exception as error:
                self.refuse(error)

    @property
    def replay(self) -> Any:
        """The stored value under REPLAY; for a failed key, the exception.

        Raises:
            ResultNotStoredError: if the value was not stored.
            CorruptRecordError, StoreUnavailableError: if the value cannot be read, or fetched.
        """
        return None if self.record is None else self.record.outcome()

    @property
    def token(self) -> int:
        """The fencing token under RUN, else 0."""
        return 0 if self.execution is None else self.execution.token

    @property
    def attempt(self) -> int:
        """Under RUN, 1 plus the number of earlier executions that died; else 0."""
        return 0 if self.execution is None else self.execution.attempt


def _not_stored(call: Call, end: End | BaseException | None) -> IdempotencyError | None:
    """Returns the reason why the value of a completed key is not stored, if it is not."""
    assert call.grant is not None
    if not call.grant.protected:
        return None
    lost = LeaseLostError(f"{call.key}: another execution has taken over")
    assert end is not None
    try:
        outcome_of(call, end).get()
    except IdempotencyError as error:
        return lost if isinstance(error, LeaseLostError) else error
    except Exception:
        return lost  # the execution that has taken over raised it
    assert isinstance(end, Answer)
    return end.unsaved or (None if end.is_own else lost)


class LeaveRecord(Extension):
    """Answers with a finished record whose value is not decoded: the caller may not need it.

    `Entry.replay` decodes it.
    """

    async def admitted(self, admission: Admission) -> Admission:
        """See `LeaveRecord`; a poisoned key is refused."""
        if not isinstance(admission, Finished):
            return admission
        record = admission.record
        if layout.is_poisoned(record):
            error = report_refused(self.call, record.outcome())
            return Answer(Failure(error), record, replayed=True, refused=True)
        report(table.REPLAYED, self.call, record=record)
        return Answer(Result(None), record, replayed=True)


class BaseBatch(TwoPartFlows, Sequence[Entry]):
    """The entries of a batch, in the order of the keys. The leases of pending keys are renewed."""

    def __init__(
        self,
        runtime: Any,
        codec: PayloadCodec,
        keys: Sequence[Hashable],
        calls: Sequence[CallData | IdempotencyError],
    ) -> None:
        super().__init__(runtime)
        self._entries = [Entry(key) for key in keys]
        #: The calls that may run and have neither completed nor been released, by key.
        self._pending: dict[Hashable, Call] = {}
        #: The call of each usable key, with the first entry that has the key; the others are
        #: DUPLICATE.
        self._calls: dict[Call, Entry] = {}
        firsts: dict[str, Call] = {}
        digests: dict[Hashable, str] = {}
        for entry, data in zip(self._entries, calls, strict=True):
            if isinstance(data, IdempotencyError):
                entry.refuse(data)
            elif digests.setdefault(entry.key, data.key.digest) != data.key.digest:
                # 1 == 1.0 in a dictionary: `complete_many` could not distinguish these keys.
                entry.refuse(
                    KeyRuleError(
                        f"{data.key}: the key equals an earlier key of another type in the "
                        "batch, such as 1 and 1.0; pass keys of one type"
                    )
                )
            elif (first := firsts.get(data.key.digest)) is None:
                # A batch does not wait for a key that is held.
                data = data._replace(wait_timeout=0.0)
                extensions = (*extensions_of_direct_call(data.settings), LeaveRecord)
                call = Call(data, DirectHost(data), runtime, codec, extensions)
                firsts[call.key.digest], self._calls[call] = call, entry
            elif first.key.fingerprint != data.key.fingerprint:
                entry.refuse(
                    KeyReusedError(f"{data.key} appears earlier in the batch with other arguments")
                )

    def __getitem__(self, index: Any) -> Any:
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def pending(self) -> list[Hashable]:
        """The keys to run that are not yet completed or released."""
        return list(self._pending)

    def check(self) -> None:
        """Checks, without a round trip, that no other execution can be running a pending key.

        Raises:
            LeaseLostError: naming the first key that another execution may have taken over.
        """
        for call in self._pending.values():
            assert call.grant is not None
            call.grant.execution.check()

    def _after_begin(self) -> None:
        """Sets the decisions of all entries."""
        ends = self._ends
        unavailable = [end for end in ends.values() if isinstance(end, StoreUnavailableError)]
        if unavailable and len(unavailable) == len(self._calls):
            raise unavailable[0]
        for call, entry in self._calls.items():
            entry.set_decision(call, ends[call])
            if entry.decision is Decision.RUN:
                self._pending[entry.key] = call

    async def _run(self, parts: Parts) -> None:
        for call in parts:
            call.runtime = SharedRoundTrips(self._runtime)
        try:
            await Lockstep(self._runtime, parts, self._ends).run()
        finally:
            for call in parts:
                call.runtime = self._runtime

    def _take(self, keys: Iterable[Hashable]) -> dict[Hashable, Call]:
        """Removes the calls of `keys` from the pending ones and returns them."""
        keys = dict.fromkeys(keys)
        if keys.keys() - self._pending.keys():
            raise IdempotencyError(
                "a key is not pending in this batch; complete or release each key of Batch.pending "
                "once"
            )
        return {key: self._pending.pop(key) for key in keys}

    async def _begin_all(self) -> None:
        """Begins the keys; called once, by the engine."""
        await self._begin([*self._calls], NotCompletedError("the batch could not begin"))

    async def _complete_many(self, values: Mapping[Hashable, Any] | None) -> dict[Hashable, Any]:
        """Completes the keys of `values`; returns the errors of those whose value is not stored."""
        if values is None:
            values = dict.fromkeys(self._pending)
        completed = self._take(values)
        await self._complete({call: Result(values[key]) for key, call in completed.items()})
        errors = {}
        for call in completed.values():
            entry = self._calls[call]
            entry.error = _not_stored(call, self._ends[call])
            if entry.error is not None:
                errors[entry.key] = entry.error
        return errors

    async def _release_many(self, keys: Iterable[Hashable] | None = None) -> None:
        released = self._take(self.pending if keys is None else keys)
        reason = NotCompletedError("the batch released the key without completing it")
        await self._complete(dict.fromkeys(released.values(), Failure(reason)))


class Batch(BaseBatch):
    """A batch for blocking code. As a context manager, it releases pending keys on exit."""

    def complete_many(self, values: Mapping[Hashable, Any] | None = None) -> dict[Hashable, Any]:
        """Stores a value for each of these keys; by default None for all pending keys.

        Returns:
            The error of each key whose value was not stored, also set as its entry's `error`:
            LeaseLostError if another execution has taken over, StoreUnavailableError if Redis was
            unavailable until the lease expired, ResultNotStoredError if the value cannot be
            serialized or offloaded, or is too large (the key has completed without it).
        """
        return run_sync(self._complete_many(values))

    def release_many(self, keys: Iterable[Hashable] | None = None) -> None:
        """Releases these keys, by default all pending ones; the next caller may run them."""
        run_sync(self._release_many(keys))

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.release_many()


class AsyncBatch(BaseBatch):
    """A batch for coroutines. As a context manager, it releases pending keys on exit."""

    async def complete_many(
        self, values: Mapping[Hashable, Any] | None = None
    ) -> dict[Hashable, Any]:
        """As :meth:`Batch.complete_many`."""
        return await self._complete_many(values)

    async def release_many(self, keys: Iterable[Hashable] | None = None) -> None:
        """As :meth:`Batch.release_many`."""
        await self._release_many(keys)

    async def __aenter__(self) -> AsyncBatch:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._pending.clear()
        await self._end(error, NotCompletedError("the batch has ended"))


@coroutine
def _wait_for(effect: Any) -> Generator[Any, Any, Any]:
    """Suspends a flow at `effect`, a command or a pause in seconds; returns what resumes it."""
    return (yield effect)


class SharedRoundTrips:
    """The runtime of a flow while :class:`Lockstep` runs it.

    Where another runtime would send a command or wait, it suspends the flow.
    """

    execute = sleep = staticmethod(_wait_for)

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


class Lockstep:
    """Runs parts of several flows side by side, so that their commands share round trips.

    Args:
        runtime: sends the commands and waits.
        ends: receives the end of each part, or the error that it raised.
    """

    def __init__(self, runtime: Any, parts: Parts, ends: dict[Call, Any]) -> None:
        self._runtime, self._parts, self._ends = runtime, parts, ends
        #: The parts that have not ended; the None with which `send` starts each.
        self._unended = dict.fromkeys(parts)

    async def run(self) -> None:
        """Runs the parts to their ends.

        Raises:
            BaseException: what a signal handler has raised. The parts have ended nevertheless.
        """
        try:
            await self._run(self._unended)
        except GeneratorExit:
            raise
        except BaseException as error:
            await self._run(dict.fromkeys(self._unended, error))
            raise
        for end in map(self._ends.get, self._parts):
            if isinstance(end, BaseException) and not isinstance(end, Exception):
                raise end

    async def _run(self, replies: dict[Call, Any]) -> None:
        """Resumes each part with its reply, or an error, and does what the parts then wait for.

        Commands come first, in one round trip. Once all parts wait for a pause, the longest is
        made.
        """
        waiting: dict[Call, Any] = {}
        while replies:
            for call, reply in tuple(replies.items()):
                effect = await self._resume(call, reply)
                if effect is not None:
                    waiting[call] = effect
            commands = {call: e for call, e in waiting.items() if isinstance(e, Command)}
            served = commands or dict(waiting)
            replies = dict(zip(served, await self._serve([*served.values()]), strict=True))
            for call in served:
                del waiting[call]

    async def _serve(self, effects: list[Any]) -> list[Any]:
        try:
            if effects and isinstance(effects[0], Command):
                return await self._runtime.execute_all(effects)  # type: ignore[no-any-return]
            if effects:
                await self._runtime.sleep(max(effects))
        except GeneratorExit:
            raise
        except BaseException as error:
            return [error] * len(effects)
        return [None] * len(effects)

    async def _resume(self, call: Call, reply: Any) -> Any:
        """Runs a part until it waits for an effect, which is returned, or to its end."""
        part = self._parts[call]
        try:
            effect = part.throw(reply) if isinstance(reply, BaseException) else part.send(reply)
            while not isinstance(effect, (Command, float)):
                try:
                    # It is a future of the event loop, not an effect. All parts wait for it.
                    reply = await _wait_for(effect)
                except Exception as error:
                    effect = part.throw(error)
                else:
                    effect = part.send(reply)
        except StopIteration as end:
            self._ends[call] = end.value
        except GeneratorExit:
            raise
        except BaseException as error:
            self._ends[call] = error
        else:
            return effect
        del self._unended[call]
        return None
