"""Debian's headless Chromium."""

from __future__ import annotations

import shutil
from pathlib import Path

#: The binary itself: the wrapper in /usr/bin leaves processes behind.
_DEBIAN = Path("/usr/lib/chromium/chromium-headless-shell")


def find_chromium() -> str | None:
    """Returns the path of the headless shell; None if there is none."""
    if _DEBIAN.exists():
        return str(_DEBIAN)
    return shutil.which("chromium-headless-shell") or shutil.which("chrome-headless-shell")
