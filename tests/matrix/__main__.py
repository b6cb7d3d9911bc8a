"""Installs each combination of Python and Celery, and runs the core tests in it.

Environments stay in ``.matrix`` and are used again. A Python that is not on PATH (nor in pyenv) is
named and left out; ``--corners`` keeps to the running one, with the oldest Celery and the newest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
#: Celery's version, and what an old one needs beside it.
CELERYS = {
    "5.3": ("celery[redis]==5.3.*", "kombu<5.6"),
    "5.4": ("celery[redis]==5.4.*", "kombu<5.6"),
    "5.5": ("celery[redis]==5.5.*", "kombu==5.5.*"),
    "5.6": ("celery[redis]==5.6.*",),
    "newest": ("celery[redis]",),
}
CORNER_CELERYS = ("5.3", "newest")
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".matrix"


@dataclass(frozen=True)
class Combination:
    """One environment."""

    python: str
    interpreter: str
    celery: str

    @property
    def folder(self) -> Path:
        return FOLDER / f"python{self.python}-celery{self.celery}"

    def install(self) -> None:
        """Make the environment, unless it is there from an earlier run."""
        done = self.folder / "installed"
        if done.exists():
            return
        subprocess.run([self.interpreter, "-m", "venv", "--clear", self.folder], check=True)
        pip = [self.folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
        quiet = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        wanted = [*CELERYS[self.celery], "--editable", f"{ROOT}[test]"]
        subprocess.run([*pip, *wanted], check=True, env=quiet)
        done.touch()

    def test(self, arguments: list[str]) -> tuple[bool, str]:
        """Whether the core tests pass, and pytest's last line."""
        command = [self.folder / "bin" / "python", "-m", "pytest", "-q", "-m", "core", *arguments]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        lines = run.stdout.strip().splitlines() or run.stderr.strip().splitlines() or [""]
        if run.returncode != 0:
            print("\n".join(lines[-60:]))
        return run.returncode == 0, lines[-1]


def find_python(version: str) -> str | None:
    """An interpreter of this version: the running one, on PATH, or pyenv's."""
    if version == "{}.{}".format(*sys.version_info):
        return sys.executable
    installed = Path.home() / ".pyenv" / "versions"
    by_pyenv = sorted(installed.glob(f"{version}.*/bin/python"))
    return str(by_pyenv[-1]) if by_pyenv else shutil.which(f"python{version}")


def combinations(corners: bool) -> list[Combination]:
    """Those that can be tried here."""
    found = []
    running = "{}.{}".format(*sys.version_info)
    for python in (running,) if corners else PYTHONS:
        interpreter = find_python(python)
        if interpreter is None:
            print(f"Python {python} is not here: left out", flush=True)
            continue
        celerys = CORNER_CELERYS if corners else CELERYS
        found += [Combination(python, interpreter, celery) for celery in celerys]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--corners", action="store_true", help="the oldest and the newest Celery")
    parser.add_argument("pytest", nargs="*", help="passed on to pytest")
    options = parser.parse_args()
    passed = True
    for combination in combinations(options.corners):
        started = time.monotonic()
        combination.install()
        good, line = combination.test(options.pytest)
        passed &= good
        seconds = time.monotonic() - started
        mark = "✓" if good else "✗"
        print(f"{mark} {combination.folder.name}: {line} ({seconds:.0f} s)", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
