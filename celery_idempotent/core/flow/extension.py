"""Base classes of what an option adds: `Option` to tasks and functions, `Extension` to the flow.

The flow calls the extensions of a call at fixed points, and names none of them.
`settings.EXTENSIONS` names the class of each option in `extensions/`, which is imported if a task
sets the option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.execution import BaseExecution
from celery_idempotent.core.flow.values import Admission, End, Outcome, Settlement
from celery_idempotent.core.key import Key
from celery_idempotent.core.payload.codec import PayloadCodec
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.settings import Settings


class Option:
    """What an option adds to tasks and functions. A subclass overrides what it needs."""

    #: Whether the class is also an `Extension`, of which each call gets an instance.
    in_flow = False

    @classmethod
    def resolve(cls, settings: Settings, where: str, app: Any) -> Settings:
        """Returns the settings with which calls run.

        Args:
            where: the task or function, for an error message.
            app: the Celery app; None for a function without one.

        Raises:
            SettingsError: if its option cannot be used, or not together with another one.
        """
        return settings

    @classmethod
    def extend_codec(cls, codec: PayloadCodec, settings: Settings, app: Any) -> None:
        """Adds what its payloads need to the codec of its tasks and functions."""

    @classmethod
    def configure(cls, configuration: Any) -> None:
        """Completes the configuration of a task, once its key rule is known.

        Raises:
            SettingsError: if its option does not fit the task.
        """

    @classmethod
    def reserving(cls, settings: Settings, publication: Any) -> dict[str, Any]:
        """Returns options of `commands.reserve` for a publish, if `Settings.takes_newest`.

        Args:
            publication: a `dedupe.Publication`.

        Raises:
            Exception: if the arguments cannot be serialized.
        """
        return {}

    @classmethod
    def summary(cls, settings: Settings) -> str:
        """Returns the option in words, for the log of a worker's start."""
        return ""

    @classmethod
    def explain(cls, sentence: str, settings: Settings) -> str:
        """Returns what would happen to a call, given what would happen without the option."""
        return sentence

    @classmethod
    def findings(cls, task: Any) -> Iterator[Sequence[str]]:
        """Yields what ``doctor`` reports about a task.

        Each is a name, a severity (note, warning or error), and sentences: what is wrong, what to
        set or change, and the consequence.
        """
        yield from ()


class Extension(Option):
    """The effect of an option on one call. A subclass overrides the points that it needs."""

    in_flow = True
    #: The name of the option, if its connection blocks, so that no coroutine or batch can have it.
    blocks = ""
    #: Whether it may know an outcome of a call whose record is poisoned.
    knows_poisoned = False

    def __init__(self, call: Call) -> None:
        self.call = call

    @classmethod
    def unprotected(
        cls, settings: Settings, execution: BaseExecution
    ) -> AbstractContextManager[Any]:
        """Returns the context of a body that runs without protection, outside the flow."""
        return nullcontext()

    @classmethod
    def forget(cls, settings: Settings, key: Key, forget_record: Callable[[], str]) -> str:
        """Forgets a call: calls `forget_record`, and returns its reply or another."""
        return forget_record()

    async def before_begin(self) -> End | None:
        """Called before the first begin; returns None, or an end in place of a begin."""
        return None

    async def admitted(self, admission: Admission) -> Admission:
        """Called after each begin; returns `admission`, or another one in its place."""
        return admission

    def replacing(self, publish: Callable[[], Any]) -> bool:
        """Called when the body replaces its task.

        Returns:
            Whether the extension will call `publish`, which publishes the replacement, later.
        """
        return False

    def ran_unprotected(self, outcome: Outcome) -> Outcome:
        """Called after a body without a record; returns `outcome`, or another one in its place."""
        return outcome

    async def settling(self, settlement: Settlement) -> Settlement | End:
        """Called before an outcome is stored or a key released.

        Returns:
            The settlement to carry out, or an end of the call in its place.
        """
        return settlement

    async def settled(self, settlement: Settlement, reply: Reply) -> None:
        """Called after the outcome was stored."""

    def ended(self) -> None:
        """Called at the end of the flow, however it ends. Never raises, and may be called again."""


def run_unprotected(settings: Settings, execution: BaseExecution, work: Callable[[], Any]) -> Any:
    """Runs `work` without protection, outside the flow."""
    with ExitStack() as stack:
        for extension in settings.extensions:
            stack.enter_context(extension.unprotected(settings, execution))
        return work()
