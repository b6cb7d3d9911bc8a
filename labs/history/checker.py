"""Decides whether a history is linearizable: Wing and Gong's search, with memoisation.

A call that got no reply may take effect at any time after its invocation, or never. So may each
copy of a call that was sent more than once.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from celery_idempotent.record import layout
from labs.history.operation import NEVER, Operation
from labs.verification.model import STARTED, WITH_ENTRY, Clock, Protocol, Record, Result
from labs.verification.wire import encode, microsecond

#: Milliseconds around the end of a record's time to live in which the server may have it or not.
EXPIRY_MS = 20
#: Configurations after which the search of one key gives up.
LIMIT = 200_000

Entries = tuple[tuple[bytes, Record], ...]


class Configuration(NamedTuple):
    """Which calls have taken effect, and what the server holds then."""

    #: A bit for each of them.
    done: int
    record: Record | None
    entries: Entries
    #: The server's time of the last one, in milliseconds.
    now_ms: int


class Verdict(NamedTuple):
    """Of the calls of one key."""

    key: str
    calls: int
    #: Configurations that were visited.
    visited: int
    #: Why no order explains the replies; empty if one does.
    counterexample: str = ""
    #: The search was given up.
    undecided: bool = False


class Step(NamedTuple):
    """A call that takes effect."""

    operation: Operation
    #: Whether its reply has to be explained; else it may be left out.
    replied: bool
    #: When it has taken effect, probably.
    at_ms: float
    #: The server's times, in milliseconds and microseconds, at which it can have taken effect,
    #: besides that of the call before it.
    moments: tuple[Clock, ...] = ()


class Checker:
    """Checks the calls of one key.

    Args:
        monotonic: whether the server's clock never went back.
    """

    def __init__(self, operations: Sequence[Operation], *, monotonic: bool = True) -> None:
        self.protocol = Protocol()
        self.monotonic = monotonic
        self.steps: list[Step] = []
        replied = [each for each in operations if each.returned != NEVER]
        raws = {
            each.raw.partition(b" ")[2] if each.script == "get" else each.raw for each in replied
        }
        begun = [layout.begun(raw) for raw in raws if raw[:1] == b"S" and layout.owner(raw)]
        #: Seconds for which a takeover has found its key without a lease.
        self.orphaned = {each.orphaned_seconds for each in begun if each.attempt > 1}
        #: Of the server's clock to that of the callers, in milliseconds, by their time.
        self.offsets = sorted(
            (each.invoked, each.now_ms - each.invoked / 1e6) for each in replied if each.now_ms
        )
        for operation in operations:
            if operation.returned != NEVER:
                by_server = self.monotonic and operation.now_ms
                at = by_server or operation.invoked / 1e6 + max(self.offsets_at(operation.invoked))
                self.steps.append(Step(operation, True, at))
            without_reply = operation.copies - (operation.returned != NEVER)
            seen = (*moments(operation, raws),)
            # An earlier copy of a call with a reply seldom matters.
            at = seen[0].ms if seen and operation.returned == NEVER else math.inf
            self.steps += [Step(operation, False, at, seen)] * min(without_reply, 3)
        # A likely order, which is tried first.
        self.steps.sort(key=lambda step: step.at_ms)
        self.required = sum(1 << number for number, step in enumerate(self.steps) if step.replied)
        invoked = [step.operation.invoked for step in self.steps]
        self.by_invocation = sorted(range(len(self.steps)), key=invoked.__getitem__)
        self.usable = self.by_invocation

    def check(self) -> Verdict:
        key = self.steps[0].operation.key
        visited = 0
        # Calls that no reply shows seldom matter, so they are left out first.
        shown = [each for each in self.by_invocation if self.steps[each].at_ms < math.inf]
        for usable in (shown, self.by_invocation):
            self.usable = usable
            seen, is_explained, best = self.search()
            visited += len(seen)
            if is_explained:
                return Verdict(key, len(self.steps), visited)
        if len(seen) > LIMIT:
            return Verdict(key, len(self.steps), visited, undecided=True)
        return Verdict(key, len(self.steps), visited, "\n".join(self.explain(best)))

    def search(self) -> tuple[set[Configuration], bool, Configuration]:
        """Returns what was visited, whether all replies are explained, and how far that got."""
        best = Configuration(0, None, (), 0)
        seen, path = {best}, [self.successors(best)]
        # Successors are computed when they are needed.
        while path and len(seen) <= LIMIT:
            configuration = next(path[-1], None)
            if configuration is None:
                path.pop()
                continue
            if configuration in seen:
                continue
            seen.add(configuration)
            done = configuration.done & self.required
            if done.bit_count() > (best.done & self.required).bit_count():
                best = configuration
            if done == self.required:
                return seen, True, best
            path.append(self.successors(configuration))
        return seen, False, best

    def successors(self, configuration: Configuration) -> Iterator[Configuration]:
        """Yields the configurations after one more call, the most likely first."""
        candidates = [*self.candidates(configuration)]
        # No call takes effect before one that did so at an earlier time of the server.
        latest = min(
            (
                step.operation.now_ms
                for _, step in candidates
                if step.replied and step.operation.now_ms
            ),
            default=math.inf,
        )
        for number, step in candidates:
            for clock in self.clocks(configuration, step):
                if self.monotonic and clock.ms > latest and not step.replied:
                    continue
                for record, entries in unexpired(configuration, clock.ms):
                    result = self.apply(record, entries, step.operation, clock)
                    if step.replied and not explains(result, step.operation):
                        continue
                    left = with_entry(entries, step.operation.root, result)
                    if not step.replied and (result.after, left) == (record, entries):
                        continue  # it may as well be left out
                    done = configuration.done | 1 << number
                    is_known = not step.replied or step.operation.now_ms
                    now_ms = clock.ms if is_known else configuration.now_ms
                    yield Configuration(done, result.after, left, now_ms)

    def candidates(self, configuration: Configuration) -> Iterator[tuple[int, Step]]:
        """Yields the calls that may be next: those that began before any other one returned."""
        horizon, left = NEVER, []
        for number in self.usable:
            if configuration.done >> number & 1:
                continue
            step = self.steps[number]
            if (
                number
                and self.steps[number - 1] is step
                and not configuration.done >> number - 1 & 1
            ):
                continue  # the copies of a call are alike
            if step.operation.invoked > horizon:
                break
            if step.replied:
                horizon = min(horizon, step.operation.returned)
            left.append((number, step))
        return (
            (number, step)
            for number, step in sorted(left, key=itemgetter(0))
            if step.operation.invoked <= horizon
        )

    def clocks(self, configuration: Configuration, step: Step) -> Iterator[Clock]:
        """Yields the server's times at which a call may take effect."""
        now_ms = step.operation.now_ms
        if step.replied and now_ms:
            if now_ms >= configuration.now_ms or not self.monotonic:
                yield Clock(now_ms, microsecond(now_ms, step.operation.raw))
            return
        if step.replied:
            # The script did not read its clock, but the server knows what has expired.
            for offset in self.offsets_at(step.operation.returned):
                until = round(step.operation.returned / 1e6 + offset)
                yield Clock(until, until * 1000)
        for moment in step.moments:
            if moment.ms >= configuration.now_ms or not self.monotonic:
                yield moment
        record = configuration.record
        if step.operation.script == "begin" and record is not None and record.state == STARTED:
            # A takeover that no reply shows may be known from the one after it.
            for seconds in self.orphaned:
                moment_ms = record.at + round(seconds * 1000)
                yield Clock(moment_ms, moment_ms * 1000)
        yield Clock(configuration.now_ms, configuration.now_ms * 1000)

    def offsets_at(self, moment: int) -> set[float]:
        """Returns the offset of the server's clock before and after a moment: it may step."""
        number = bisect([invoked for invoked, _ in self.offsets], moment)
        around = self.offsets[max(0, number - 1) : number + 1]
        return {offset for _, offset in around} or {0.0}

    def apply(
        self, record: Record | None, entries: Entries, operation: Operation, clock: Clock
    ) -> Result:
        arguments = dict(operation.arguments)
        if operation.script in WITH_ENTRY:
            arguments["entry"] = dict(entries).get(operation.root)
        result: Result = getattr(self.protocol, operation.script)(record, clock, **arguments)
        return result

    def explain(self, best: Configuration) -> Iterator[str]:
        """Yields the lines of a counterexample: how far an order could explain the replies."""
        done = [step for number, step in enumerate(self.steps) if best.done >> number & 1]
        yield f"  … {len(done)} calls are explained; the record is then"
        yield f"    {best.record}"
        for root, entry in best.entries:
            yield f"    entry {root.hex()}: {entry}"
        yield "  the last of them:"
        for step in sorted(done, key=lambda step: step.operation.invoked)[-6:]:
            yield f"    {step.operation}"
        yield "  none of these can be next:"
        for _, step in self.candidates(best):
            if not step.replied:
                continue
            yield f"    {step.operation}"
            for clock in [*self.clocks(best, step)][:1]:
                result = self.apply(best.record, best.entries, step.operation, clock)
                yield f"      the model: {result.case} {result.replied}"


def check(operations: Iterable[Operation], *, monotonic: bool = True) -> Iterator[Verdict]:
    """Yields the verdict on each key."""
    by_key: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        by_key[operation.key].append(operation)
    for calls in by_key.values():
        if any(call.returned != NEVER for call in calls):
            yield Checker(calls, monotonic=monotonic).check()


def explains(result: Result, operation: Operation) -> bool:
    """Whether the reply that the caller got is that of the model."""
    raw = operation.raw
    if operation.script == "get" and operation.case == "found":
        raw = raw.partition(b" ")[2]  # after the time to live
    return (result.case, encode(result.replied) or b"") == (operation.case, raw)


def with_entry(entries: Entries, root: bytes, result: Result) -> Entries:
    if not isinstance(result.entry, Record | None):
        return entries
    others = {each: entry for each, entry in entries if each != root}
    if result.entry is not None:
        others[root] = result.entry
    return tuple(sorted(others.items()))


def unexpired(configuration: Configuration, now_ms: int) -> Iterator[tuple[Record | None, Entries]]:
    """Yields what the server may still hold at a time."""
    records: list[Record | None] = [*_unexpired(configuration.record, now_ms)]
    kept: list[Entries] = [()]
    for root, entry in configuration.entries:
        may_be = [*_unexpired(entry, now_ms)]
        kept = [
            (*before, (root, each)) if each is not None else before
            for before in kept
            for each in may_be
        ]
    for record in records:
        for entries in kept:
            yield record, entries


def _unexpired(record: Record | None, now_ms: int) -> Iterator[Record | None]:
    if record is not None and record.expires > now_ms - EXPIRY_MS:
        yield record
    if record is None or record.expires <= now_ms + EXPIRY_MS:
        yield None


def moments(operation: Operation, raws: Iterable[bytes]) -> Iterator[Clock]:
    """Yields the times at which a call without a reply took effect, as other replies show them."""
    arguments = operation.arguments
    token = arguments.get("token")
    mark = arguments.get("execution_id") or arguments.get("task_id")
    if isinstance(token, int):
        mark = token.to_bytes(7, "big")
    error = arguments.get("error")
    shortens = not arguments.keys().isdisjoint(_DURATIONS)
    durations = {0, *(value for name, value in arguments.items() if name in _DURATIONS and value)}
    found = set()
    for raw in raws:
        if len(raw) < 15:
            continue
        drawn, ends = int.from_bytes(raw[2:9], "big"), []
        if (mark and mark in raw) or (error and raw.endswith(error)):
            found.add(Clock(drawn // 1000, drawn))
            ends.append(int.from_bytes(raw[9:15], "big"))
            if raw[:1] in b"PQ":
                ends.append(int.from_bytes(layout.owner(raw)[-6:], "big"))
        if raw[:1] == b"S" and raw[1] > 1 and layout.owner(raw) and shortens:
            # A takeover shows when the lease before it ended.
            ends.append(drawn // 1000 - round(layout.begun(raw).orphaned_seconds * 1000))
        found |= {Clock(at - each, (at - each) * 1000) for at in ends for each in durations}
    yield from sorted(found)


_DURATIONS = ("lease_ms", "hold_ms", "grace_ms")
