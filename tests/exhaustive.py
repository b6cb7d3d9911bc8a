"""The tests that only ``make test-all`` runs: those with the mark `exhaustive`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


def exhaustive_except(names: Iterable[str], *kept: str) -> list[Any]:
    """Returns `names` as parameters; those that are not in `kept` are marked exhaustive."""
    return [
        name if name in kept else pytest.param(name, marks=pytest.mark.exhaustive) for name in names
    ]


class LeftOut:
    """A plugin that reports how many exhaustive tests were left out."""

    def __init__(self) -> None:
        self._by_folder: Counter[str] = Counter()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._by_folder.update(
            item.path.relative_to(TESTS).parts[0]
            for item in items
            if item.get_closest_marker("exhaustive")
        )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """In a process of pytest-xdist, sends the counts to the main process."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = dict(self._by_folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receives the counts; each process has the same ones."""
        self._by_folder = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        if self._by_folder and "not exhaustive" in config.option.markexpr:
            folders = ", ".join(f"{name} {n:,}" for name, n in self._by_folder.most_common())
            terminalreporter.section("left out")
            terminalreporter.write_line(
                f"{self._by_folder.total():,} tests of further deployments, brokers, pools and "
                f"databases, and long ones: {folders}."
            )
            terminalreporter.write_line("`make test-all` also runs them.")
