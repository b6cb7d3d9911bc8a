"""Functions as calls at the gate."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery_idempotent.errors import SettingsError
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.functions.call import DirectCall, current_execution
from celery_idempotent.key.key import Key
from celery_idempotent.key.rule import TASK_ID, KeyRule
from celery_idempotent.settings import Settings

if TYPE_CHECKING:
    from celery_idempotent.functions.engine import Idempotency


class FunctionCall(DirectCall):
    """A call of a function."""

    def __init__(self, sender: Any, key: Key, settings: Settings, work: Callable[[], Any]) -> None:
        super().__init__(sender, key, settings)
        self._work = work

    def run(self, execution: BaseExecution) -> Any:
        """Call the function."""
        mark = current_execution.set(execution)
        try:
            return self._work()
        finally:
            current_execution.reset(mark)


class AsyncFunctionCall(FunctionCall):
    """A call of an async function."""

    async def run(self, execution: BaseExecution) -> Any:
        """Await the function."""
        mark = current_execution.set(execution)
        try:
            return await self._work()
        finally:
            current_execution.reset(mark)


class IdempotentFunction:
    """What the gate knows of one function."""

    def __init__(
        self,
        engine: Idempotency,
        func: Callable[..., Any],
        name: str | None,
        key: Any,
        options: Mapping[str, Any],
    ) -> None:
        self.name = name or f"{func.__module__}.{func.__qualname__}"
        self.settings = engine.settings_for(options, self.name)
        if key is TASK_ID:
            raise SettingsError(f"{self.name}: TASK_ID is a key of messages; a function has none")
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise SettingsError(f"{self.name} is a generator: what it yields cannot be replayed")
        self.rule = KeyRule(self.name, key, inspect.signature(func), _as_they_are)
        self._engine = engine
        self._func = func

    def wrapped(self) -> Callable[..., Any]:
        """The function behind the gate."""
        func = self._func
        call: Any = self._async() if inspect.iscoroutinefunction(func) else self._blocking()
        call = functools.wraps(func)(call)
        call.idempotency_key_of = lambda *args, **kwargs: self.rule.derive(args, kwargs)
        return call  # type: ignore[no-any-return]

    def _blocking(self) -> Callable[..., Any]:
        func, rule, settings, engine = self._func, self.rule, self.settings, self._engine

        def call(*args: Any, **kwargs: Any) -> Any:
            work = functools.partial(func, *args, **kwargs)
            if not settings.enabled:
                return work()
            key = rule.derive(args, kwargs)
            return engine.executor.enter(FunctionCall(func, key, settings, work))

        return call

    def _async(self) -> Callable[..., Any]:
        func, rule, settings, engine = self._func, self.rule, self.settings, self._engine

        async def call(*args: Any, **kwargs: Any) -> Any:
            work = functools.partial(func, *args, **kwargs)
            if not settings.enabled:
                return await work()
            key = rule.derive(args, kwargs)
            return await engine.async_executor.enter(AsyncFunctionCall(func, key, settings, work))

        return call


def _as_they_are(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Nothing stands between the caller and the function that could change arguments."""
    return args, kwargs
