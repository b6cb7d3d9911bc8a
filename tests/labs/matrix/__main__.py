"""Installs each combination of Python and Celery, and runs the core tests in it.

Environments stay in ``.matrix`` and are used again. A Python that is not here is downloaded; one
that cannot be had is named and left out. ``--corners`` downloads none and keeps to two: the oldest
Celery on the oldest Python that is here, and the newest on the newest, without the rarer ways to
reach Redis. What all the tests run under anyway is no corner.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
CELERYS = ("5.3", "5.4", "5.5", "5.6", "5.7")
#: Each is told, since a result depends on them as much as on Celery's version.
TOLD = ("celery", "kombu", "redis")

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".matrix"
#: uv does not look into pyenv's folder, and the shims that pyenv has on PATH find one version only.
PYENV = sorted((Path.home() / ".pyenv" / "versions").glob("*/bin"))
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([*map(str, PYENV), os.environ["PATH"]]),
    "UV_PYTHON_INSTALL_DIR": str(FOLDER / "pythons"),
}


@dataclass(frozen=True)
class Combination:
    """One environment."""

    python: str
    celery: str

    @property
    def folder(self) -> Path:
        return FOLDER / f"python{self.python}-celery{self.celery}"

    @property
    def interpreter(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def is_running(self) -> bool:
        """Whether this is what the command itself runs under, and so do all the tests."""
        here = "{}.{}".format(*sys.version_info)
        return (self.python, self.celery) == (here, version("celery").rpartition(".")[0])

    def install(self) -> str:
        """Make the environment, or bring it up to date; the versions that it has."""
        if not self.folder.exists():
            uv("venv", "--python", str(find_python(self.python)), str(self.folder))
        uv(
            *("pip", "install", "--python", self.interpreter),
            *(f"celery[redis]=={self.celery}.*", "--editable", f"{ROOT}[test]"),
        )
        installed = uv("pip", "freeze", "--python", self.interpreter).splitlines()
        pairs = (line.split("==") for line in installed if "==" in line)
        return ", ".join(f"{name} {number}" for name, number in pairs if name in TOLD)

    def test(self, chosen: str, arguments: list[str]) -> tuple[bool, str]:
        """Whether the chosen tests pass, and pytest's last line; the others are printed if not."""
        command = [self.interpreter, "-m", "pytest", "-q", "-m", chosen, *arguments, *core_files()]
        run = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = run.stdout.strip().splitlines() or [""]
        if run.returncode != 0:
            print(*lines[-60:], f"pytest ended with {run.returncode}", sep="\n")
        return run.returncode == 0, lines[-1]


@cache
def core_files() -> list[str]:
    """Files with core tests: to import all the others takes longer than to run many of these."""
    files = (ROOT / "tests").glob("**/test_*.py")
    return sorted(str(file) for file in files if "pytest.mark.core" in file.read_text("utf-8"))


def uv(*arguments: str) -> str:
    """What uv prints; what it complains of is shown if it fails."""
    command = [sys.executable, "-m", "uv", *arguments]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise UvError(run.stderr.strip())
    return run.stdout.strip()


class UvError(Exception):
    """What uv said when it failed."""


@cache
def find_python(python: str) -> str | None:
    """Where an interpreter of this version is, if one is here."""
    try:
        return uv("python", "find", "--no-python-downloads", python)
    except UvError:
        return None


def download_python(python: str) -> bool:
    """Get an interpreter of this version; whether that went well."""
    try:
        uv("python", "install", python)
    except UvError:
        return False
    find_python.cache_clear()
    return True


def all_combinations() -> list[Combination]:
    """Those that can be tried, or be made so."""
    found = []
    for python in PYTHONS:
        if find_python(python) or download_python(python):
            found += [Combination(python, celery) for celery in CELERYS]
        else:
            print(f"– Python {python} is not here and cannot be downloaded: left out", flush=True)
    return found


def corners() -> list[Combination]:
    """The oldest of both, and the newest."""
    pythons = [python for python in PYTHONS if find_python(python)]
    oldest, newest = Combination(pythons[0], CELERYS[0]), Combination(pythons[-1], CELERYS[-1])
    return [corner for corner in (oldest, newest) if not corner.is_running]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.labs.matrix", description=__doc__)
    parser.add_argument("--corners", action="store_true", help="the oldest and the newest of both")
    parser.add_argument("pytest", nargs="*", help="passed on to pytest")
    options = parser.parse_args()
    combinations = corners() if options.corners else all_combinations()
    chosen = "core and not rare" if options.corners else "core"
    passed = True
    for combination in combinations:
        started = time.monotonic()
        try:
            versions = combination.install()
            good, line = combination.test(chosen, options.pytest)
        except UvError as error:
            versions, good, line = f"celery {combination.celery}", False, str(error)
        passed &= good
        told = f"Python {combination.python}, {versions}: {line}"
        seconds = time.monotonic() - started
        print("✓" if good else "✗", told, f"({seconds:.0f} s)", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
