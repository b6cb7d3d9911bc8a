"""An execution, as its body sees it: ``self.idempotency`` in a bound task."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, overload

from celery_idempotent.core.flow.values import step_that_has_run
from celery_idempotent.core.lease import Lease
from celery_idempotent.errors import LeaseLostError, TransactionError

T = TypeVar("T")


class Protection(Protocol):
    """What an execution needs of its `Grant`."""

    lease: Lease | None

    def step(self, name: str, func: Callable[[], Any], *, in_transaction: bool = False) -> Any:
        """Returns the outcome of a step; on an event loop, an awaitable of it."""


@dataclass(slots=True, eq=False)
class BaseExecution:
    """One execution of a key."""

    #: An idempotency key to pass on (``task:digest``), equal in duplicates; empty in a plain call.
    key: str
    #: Fencing token. Pass it to the downstream system, which should reject smaller ones.
    token: int = 0
    #: 1 for the first execution, and one more for each that died before this one. The death of a
    #: host before the first heartbeat, a third of the lease, does not count.
    attempt: int = 1
    #: The grant of the execution; None if it has no record.
    _protection: Protection | None = field(default=None, repr=False)
    #: Without a record: returns the value of a step as an execution with one would, given the name
    #: and the value of the step. None in a plain call.
    _restore_step: Callable[[str, Any], Any] | None = field(default=None, repr=False)
    #: The database transaction of the body, with its `connection`; `extensions.transaction` sets
    #: it.
    _transaction: Any = field(default=None, repr=False)
    #: Whether it took over from an execution whose lease had ended.
    _takes_over: bool = field(default=False, repr=False)

    @property
    def recovered(self) -> bool:
        """Whether this took over from an execution that may have left effects behind."""
        return self._takes_over or self.attempt > 1

    @property
    def protected(self) -> bool:
        """Whether duplicates are kept out.

        False in a plain call, in shadow mode, if the task or the call switches protection off, and
        if the store was unavailable under ``on_store_error="run"``.
        """
        return self._protection is not None

    @property
    def connection(self) -> Any:
        """The connection of the body's transaction (``idempotency_transaction``).

        A `sqlalchemy.Connection`, or Django's connection of the alias. Its statements are committed
        together with the outcome.

        Raises:
            TransactionError: if there is no transaction, or it has ended.
        """
        if self._transaction is None:
            raise TransactionError("there is no transaction: idempotency_transaction is not set")
        return self._transaction.connection

    def step(self, name: str, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`Execution.step`, and :meth:`AsyncExecution.step` for an event loop."""
        raise NotImplementedError

    def check(self) -> None:
        """Checks that no other execution can have begun; takes no round trip.

        Raises:
            LeaseLostError: if another execution has taken over, or may have. ReplacedError: if a
                newer call has.
        """
        lease = self._protection.lease if self._protection is not None else None
        if lease is None or lease.trusted:
            return
        lease.stopped = True
        if lease.error is not None:
            raise lease.error
        if lease.lost:
            raise LeaseLostError(f"{self.key}: another execution has taken over")
        raise LeaseLostError(f"{self.key}: the lease could not be extended in time")

    def _returned_by(self, name: str, value: Any) -> Any:
        """Returns the value of a step that is not stored."""
        value = step_that_has_run(name, value)
        return value if self._restore_step is None else self._restore_step(name, value)


class Execution(BaseExecution):
    """One execution in a thread: ``self.idempotency`` in a bound task."""

    __slots__ = ()

    def step(
        self,
        name: str,
        func: Callable[..., T],
        /,
        *args: Any,
        transaction: bool = False,
        **kwargs: Any,
    ) -> T:
        """Runs ``func(*args, **kwargs)`` once for the key, and returns its value.

        The value is stored in one round trip, and returned as the serializer restores it: under
        JSON, a tuple becomes a list. An execution that takes over, or that follows an error, gets
        the value without a second run of `func`. If the worker dies between the end of `func` and
        that round trip, the step runs again: use `key` or `token` to make it idempotent where you
        can.

        Args:
            name: of the step. An execution runs one step of a name.
            func: runs to its end; not a coroutine function.
            transaction: whether the effects of `func` belong to the body's transaction
                (``idempotency_transaction``): the value is not stored, and `func` runs again if
                that transaction is rolled back.

        Raises:
            IdempotencyError: if a step of this name has run in this execution, or is running.
            SettingsError: if `func` returns a coroutine or a generator, whose code has not run.
            TransactionError: with `transaction`, if the body has none.
            StoreUnavailableError: if Redis stays unavailable.
            LeaseLostError: before `func` runs, if another execution may have begun; afterwards, if
                one has taken over.
            ResultNotStoredError: if the step has finished, in this execution or an earlier one, and
                its value cannot be serialized or was too large to be stored.
        """
        if not isinstance(transaction, bool):
            raise TypeError(
                f"step {name!r}: transaction is True or False, not a database; name the database "
                "in idempotency_transaction"
            )
        if transaction and self._transaction is None:
            raise TransactionError(
                f"step {name!r}: the body has no transaction; set idempotency_transaction"
            )
        work = _work_of(name, func, *args, **kwargs)
        if self._protection is None:
            return self._returned_by(name, work())  # type: ignore[no-any-return]
        self.check()
        outcome = self._protection.step(name, work, in_transaction=transaction)
        return outcome.get()  # type: ignore[no-any-return]


class AsyncExecution(BaseExecution):
    """One execution on an event loop."""

    @overload
    async def step(
        self, name: str, func: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any
    ) -> T: ...

    @overload
    async def step(self, name: str, func: Callable[..., T], /, *args: Any, **kwargs: Any) -> T: ...

    async def step(self, name: str, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`Execution.step`, without `transaction`; an awaitable result is awaited."""
        work = _work_of(name, func, *args, **kwargs)
        if self._protection is None:
            value = work()
            return self._returned_by(name, await value if inspect.isawaitable(value) else value)
        self.check()
        outcome = await self._protection.step(name, work)
        return outcome.get()


def _work_of(name: str, func: Any, /, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """Returns the call of `func`, the function of a step.

    Raises:
        TypeError: if the name is not text, or `func` cannot be called.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a step must be text, not {type(name).__name__}")
    if not callable(func):
        usage = f"pass the function and its arguments, step({name!r}, f, x), not the value of f(x)"
        raise TypeError(f"step {name!r}: {usage}")
    return partial(func, *args, **kwargs)


def unprotected(key: str = "") -> Execution:
    """Returns the execution of a call that runs without a record."""
    return Execution(key)
