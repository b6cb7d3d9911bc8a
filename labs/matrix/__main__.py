"""Installs each combination of Python and Celery, and runs the core tests in it.

Environments are kept in ``.matrix`` and reused. A missing Python is downloaded; if that fails, its
combinations are reported and skipped. ``--corners`` downloads nothing and runs two combinations,
without the tests marked rare: the oldest Celery on the oldest installed Python, and the newest on
the newest. It skips the combination that the command itself runs under.
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

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
CELERYS = ("5.3", "5.4", "5.5", "5.6", "5.7")
#: Celery, kombu and redis-py of projects that have pinned them beyond what kombu's extra accepts.
PINNED = (("5.5", "5.5.4", "7.4.1"), ("5.6", "5.6.2", "8.0.1"))
#: The packages whose versions are reported.
REPORTED = ("celery", "kombu", "redis")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".matrix"
#: uv does not search pyenv's folder, and pyenv's shims on PATH find one version only.
PYENV = sorted((Path.home() / ".pyenv" / "versions").glob("*/bin"))
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([*map(str, PYENV), os.environ["PATH"]]),
    "UV_PYTHON_INSTALL_DIR": str(FOLDER / "pythons"),
}


@dataclass(frozen=True)
class Combination:
    """A combination of versions and its environment."""

    python: str
    celery: str
    #: Empty: the newest ones that Celery's and kombu's extras accept.
    kombu: str = ""
    redis: str = ""

    @property
    def folder(self) -> Path:
        pins = f"-kombu{self.kombu}-redis{self.redis}" if self.kombu else ""
        return FOLDER / f"python{self.python}-celery{self.celery}{pins}"

    @property
    def requirements(self) -> list[str]:
        if self.kombu:
            return [f"celery=={self.celery}.*", f"kombu=={self.kombu}", f"redis=={self.redis}"]
        return [f"celery[redis]=={self.celery}.*", "kombu[redis]"]

    @property
    def interpreter(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def is_running(self) -> bool:
        """Whether this command runs under these versions."""
        python = "{}.{}".format(*sys.version_info)
        return (self.python, self.celery) == (python, version("celery").rpartition(".")[0])

    def install(self) -> str:
        """Creates or updates the environment; returns its versions."""
        if not self.folder.exists():
            uv("venv", "--python", str(find_python(self.python)), str(self.folder))
        uv(
            *("pip", "install", "--python", self.interpreter, *self.requirements),
            *("--editable", str(ROOT), "--group", f"{ROOT}/pyproject.toml:test"),
        )
        installed = uv("pip", "freeze", "--python", self.interpreter).splitlines()
        pairs = (line.split("==") for line in installed if "==" in line)
        return ", ".join(f"{name} {number}" for name, number in pairs if name in REPORTED)

    def test(self, markers: str, arguments: list[str]) -> tuple[bool, str]:
        """Returns whether the tests pass, and pytest's last line; prints the output if not."""
        command = [self.interpreter, "-m", "pytest", "-q", "-m", markers, *arguments, *core_files()]
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
            print(*lines[-60:], f"pytest exited with {run.returncode}", sep="\n")
        return run.returncode == 0, lines[-1]


@cache
def core_files() -> list[str]:
    """Returns the files that have core tests; importing all others would take longer."""
    files = (ROOT / "tests").glob("**/test_*.py")
    return sorted(str(file) for file in files if "pytest.mark.core" in file.read_text("utf-8"))


def uv(*arguments: str) -> str:
    """Runs uv and returns its output.

    Raises:
        UvError: if it fails.
    """
    command = [sys.executable, "-m", "uv", *arguments]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise UvError(run.stderr.strip())
    return run.stdout.strip()


class UvError(Exception):
    """uv failed; the message is its standard error."""


@cache
def find_python(python: str) -> str | None:
    """Returns the path of an installed interpreter of this version."""
    try:
        return uv("python", "find", "--no-python-downloads", python)
    except UvError:
        return None


def download_python(python: str) -> bool:
    """Installs an interpreter of this version; returns whether that succeeded."""
    try:
        uv("python", "install", python)
    except UvError:
        return False
    find_python.cache_clear()
    return True


def all_combinations() -> list[Combination]:
    """Returns the combinations whose Python is installed or can be downloaded."""
    combinations = []
    for python in PYTHONS:
        if find_python(python) or download_python(python):
            combinations += [Combination(python, celery) for celery in CELERYS]
        else:
            print(f"– Python {python} is not installed, download failed: skipped", flush=True)
    return combinations + [Combination(combinations[-1].python, *pins) for pins in PINNED]


def corners() -> list[Combination]:
    """Returns the combinations of the oldest versions and of the newest versions."""
    pythons = [python for python in PYTHONS if find_python(python)]
    oldest, newest = Combination(pythons[0], CELERYS[0]), Combination(pythons[-1], CELERYS[-1])
    return [corner for corner in (oldest, newest) if not corner.is_running]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m labs.matrix", description=__doc__)
    parser.add_argument("--corners", action="store_true", help="oldest and newest versions only")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest")
    arguments = parser.parse_args()
    combinations = corners() if arguments.corners else all_combinations()
    markers = "core and not rare" if arguments.corners else "core"
    all_passed = True
    for combination in combinations:
        started = time.monotonic()
        try:
            versions = combination.install()
            passed, line = combination.test(markers, arguments.pytest)
        except UvError as error:
            versions, passed, line = f"celery {combination.celery}", False, str(error)
        all_passed &= passed
        seconds = time.monotonic() - started
        print(
            f"{'✓' if passed else '✗'} Python {combination.python}, {versions}: {line}",
            f"({seconds:.0f} s)",
            flush=True,
        )
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
