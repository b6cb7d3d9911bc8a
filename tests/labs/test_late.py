"""Two programs of ``make late``, which must fail if commands have no deadline."""

from __future__ import annotations

import pytest
from redis.connection import AbstractConnection

from celery_idempotent.core.store.clock import Deadline
from labs.late.programs import PROGRAMS, play_at_a_site

pytestmark = [pytest.mark.worker, pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize("has_deadlines", [True, False])
@pytest.mark.parametrize("title", ["late reserve, started, the call fails", "late forget, force"])
def test_changes_nothing(monkeypatch: pytest.MonkeyPatch, title: str, has_deadlines: bool) -> None:
    name = "send_packed_command"  # the program replaces it
    monkeypatch.setattr(AbstractConnection, name, getattr(AbstractConnection, name))
    if not has_deadlines:
        pack = Deadline.__str__
        monkeypatch.setattr(Deadline, "__str__", lambda self: f"{pack(self)}000")
    program = next(each for each in PROGRAMS if each.title == title)

    broken = play_at_a_site(program, 1)

    assert bool(broken) is not has_deadlines, broken
