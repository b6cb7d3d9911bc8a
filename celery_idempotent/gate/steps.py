"""Recovery points: parts of an execution that run once for a key, whoever runs the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery_idempotent.errors import LeaseLostError
from celery_idempotent.record import steps
from celery_idempotent.store import commands
from celery_idempotent.store.payload import Payload

if TYPE_CHECKING:
    from celery_idempotent.gate.running import Running


class Steps:
    """The finished steps of the execution that `running` is, those of its forerunners included."""

    def __init__(self, running: Running, body: bytes) -> None:
        self._running = running
        self._body = body
        self._values: dict[str, Any] = {}

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """The value of the step: `work`'s, or the one that is kept."""
        if name in self._values:
            return self._values[name]
        running = self._running
        if self._body:
            kept = steps.read(self._body, running.execution.key).get(name)
            if kept is not None:
                whose = f"step {name!r} of {running.execution.key}"
                self._values[name] = running.payloads.load(Payload(*kept), whose)
                return self._values[name]
        steps.write(name, "", b"")  # a name that cannot be kept is refused before the work
        value = work()
        self._keep(name, value)
        self._values[name] = value
        return value

    def _keep(self, name: str, value: Any) -> None:
        running = self._running
        payload = running.payload(value, part=f":{name}")
        answer = running.persist(
            commands.step(
                running.call.key,
                running.execution.token,
                steps.write(name, payload.format, payload.body),
                lease_ms=running.call.settings.lease_ms,
                retention_ms=running.call.settings.result_ms,
            )
        )
        if answer.case == "lost":
            running.tell_loss()
            raise LeaseLostError(f"{running.execution.key}: another execution has taken over")
