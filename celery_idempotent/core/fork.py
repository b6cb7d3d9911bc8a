"""Hooks for a fork, on the systems that have one."""

from __future__ import annotations

import os
from collections.abc import Callable


def at_fork(**hooks: Callable[[], object]) -> None:
    """Registers `hooks` as os.register_at_fork does; Windows cannot fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**hooks)
