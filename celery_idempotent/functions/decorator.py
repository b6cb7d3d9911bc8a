"""The decorator of idempotent functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from celery_idempotent.errors import KeyRuleError, SettingsError
from celery_idempotent.events.report import About, refuse
from celery_idempotent.extensions.plan import plan_for
from celery_idempotent.extensions.transaction import run_plain
from celery_idempotent.flow import round_trip
from celery_idempotent.flow.active_call import ActiveCall
from celery_idempotent.flow.execution import unprotected
from celery_idempotent.functions.direct_call import (
    AsyncDirectHost,
    DirectHost,
    Engine,
    await_as_current,
    direct_call,
    outcome_of,
    run_as_current,
)
from celery_idempotent.key.label import Label
from celery_idempotent.key.rule import TASK_ID, KeyRule
from celery_idempotent.payload.value_codec import ValueCodec


def idempotent_function(
    engine: Engine,
    values: ValueCodec,
    name: str | None,
    key: Any,
    label: str | None,
    options: Mapping[str, Any],
    func: Callable[..., Any],
) -> Callable[..., Any]:
    """Returns `func` wrapped so that duplicate calls get the first call's outcome.

    Raises:
        SettingsError: if `func` is a generator, or for the first invalid option.
    """
    name = name or f"{func.__module__}.{func.__qualname__}"
    settings = engine.settings_for(options, name)
    if key is TASK_ID:
        raise SettingsError(
            f"{name}: the key TASK_ID is for tasks only; a function call has no message"
        )
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise SettingsError(
            f"{name} is a generator function, whose values cannot be replayed; return a list"
        )
    if settings.transaction is not None and inspect.iscoroutinefunction(func):
        raise SettingsError(
            f"{name}: idempotency_transaction needs a blocking function, since its connection "
            "blocks; make it one, and call it by asyncio.to_thread"
        )
    # No serializer changes the arguments between the caller and the function.
    rule = KeyRule(name, key, inspect.signature(func), lambda args, kwargs: (args, kwargs))
    labels = None if label is None else Label(rule, label)
    plan = plan_for(settings)

    def restored(value: Any) -> Any:
        """Returns `value` as a call with a record would return it."""
        _, outcome = round_trip.restored(value, settings, values, key=name)
        return outcome.get()

    def new_call(executor: Any, host: type[DirectHost], args: Any, kwargs: Any) -> ActiveCall:
        label = labels.of(args, kwargs) if labels else ""
        try:
            key = rule.derive(args, kwargs)
        except KeyRuleError as error:
            refuse(About(func, name, ""), error)
            raise
        data = direct_call(func, key, settings, label)
        work = functools.partial(func, *args, **kwargs)
        difference = functools.partial(rule.difference, args, kwargs, key)
        call: ActiveCall = executor.new_call(data, host(data, work, engine.app, difference), plan)
        return call

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        if not settings.enabled:
            work = functools.partial(func, *args, **kwargs)
            return restored(await await_as_current(unprotected(), work))
        executor = engine.async_executor
        call = new_call(executor, AsyncDirectHost, args, kwargs)
        return outcome_of(call, await executor.enter(call)).get()

    def call_blocking(*args: Any, **kwargs: Any) -> Any:
        if not settings.enabled:
            execution, work = unprotected(), functools.partial(func, *args, **kwargs)
            work = functools.partial(run_as_current, execution, work)
            return restored(run_plain(settings, execution, work))
        executor = engine.executor
        call = new_call(executor, DirectHost, args, kwargs)
        return outcome_of(call, executor.enter(call)).get()

    wrapper: Any = call_async if inspect.iscoroutinefunction(func) else call_blocking
    wrapper = functools.wraps(func)(wrapper)
    wrapper.idempotency_key_of = lambda *args, **kwargs: rule.derive(args, kwargs)
    return wrapper  # type: ignore[no-any-return]
