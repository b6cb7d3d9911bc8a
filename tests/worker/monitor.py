"""Receives a shop's events, as Flower does."""

from __future__ import annotations

import threading
from typing import Any

from tests.waiting import SOON, eventually
from tests.worker.harness import Shop


class Monitor:
    """Receives a shop's events, as Flower does."""

    def __init__(self, shop: Shop) -> None:
        self.state = shop.app.events.State()
        self.received: list[dict[str, Any]] = []
        ready = threading.Event()
        self._connection = shop.app.connection()
        self._receiver = shop.app.events.Receiver(self._connection, handlers={"*": self._on_event})
        self._receiver.on_consume_ready = lambda *_, **__: ready.set()
        self._thread = threading.Thread(target=self._receiver.capture, args=(None, None, False))
        self._thread.start()
        assert ready.wait(SOON)

    def _on_event(self, event: dict[str, Any]) -> None:
        self.state.event(dict(event))
        self.received.append(event)

    def wait_for(self, name: str, task_id: str) -> dict[str, Any]:
        """Waits for an event about a task, and returns it."""
        return eventually(
            lambda: next(
                (e for e in self.received if e["type"] == name and e.get("uuid") == task_id), None
            ),
            f"{name} of {task_id}; received: {[e['type'] for e in self.received]}",
        )

    def stop(self) -> None:
        self._receiver.should_stop = True
        self._thread.join(SOON)
        self._connection.release()
