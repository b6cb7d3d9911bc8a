"""Versions of this library, installed from wheels into folders of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Library:
    """An installed version of this library; its dependencies are those of this environment."""

    name: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process imports it, and the tests and laboratories."""
        return {"PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)])}

    def formats(self) -> list[str]:
        """Returns the versions of its records and its keys."""
        code = (
            "from celery_idempotent.core.key import canonical\n"
            "from celery_idempotent.core.record import layout\n"
            "print(getattr(layout, 'VERSION', 1), canonical.VERSION.decode())"
        )
        return run([sys.executable, "-c", code], cwd=self.folder).split()


def run(command: list[Any], **how: Any) -> str:
    """Returns the output of a command."""
    return subprocess.run(command, check=True, capture_output=True, text=True, **how).stdout


def previous_commit() -> str:
    """Returns the newest release before this commit or, before the first one, its parent.

    The environment can name another one: ``PREVIOUS_VERSION=main``.

    Raises:
        LookupError: if it is not here.
    """
    if not (ROOT / ".git").exists():
        raise LookupError("this is not a clone, so the version before is not here")
    git = ["git", "-C", ROOT]
    if named := os.environ.get("PREVIOUS_VERSION"):
        return run([*git, "rev-parse", "--verify", named]).strip()
    try:
        tag = [*git, "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD~1"]
        return run(tag).strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    try:
        changed = run([*git, "status", "--porcelain", "--", "celery_idempotent", "lua"])
        return run([*git, "rev-parse", "--verify", "HEAD" if changed else "HEAD~1"]).strip()
    except (OSError, subprocess.CalledProcessError):
        raise LookupError("the commit before this one is not here: git fetch --unshallow") from None


def install(name: str, source: Path, folder: Path) -> Library:
    """Builds the wheel of a source tree, and installs it without its dependencies."""
    build = [*("-m", "build", "--no-isolation", "--wheel", "--outdir"), folder / "dist", source]
    run([sys.executable, *build])
    (wheel,) = (folder / "dist").glob("*.whl")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--target", folder / "library"]
    run([sys.executable, "-m", "pip", "install", *options, wheel])
    return Library(name, folder / "library")


def install_commit(name: str, commit: str, folder: Path) -> Library:
    """Installs a commit of this repository."""
    source, archive = folder / "source", folder / "source.tar"
    source.mkdir(parents=True)
    run(["git", "-C", ROOT, "archive", "--output", archive, commit])
    run(["tar", "--extract", "--file", archive, "--directory", source])
    return install(name, source, folder)
