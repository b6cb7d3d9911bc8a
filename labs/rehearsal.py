"""Rehearses a release: ``make rehearsal``.

Builds the distributions as the release workflow does, installs each into an empty environment of
each Python that is installed here, and follows the tutorial there, with a stopwatch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from labs.matrix.__main__ import PYTHONS, ROOT, find_python, uv

SMOKE = """
import celery_idempotent
from celery_idempotent.core.store import scripts
print(celery_idempotent.__version__, scripts.load("begin").sha)
"""


def run(*command: str | Path, folder: Path = ROOT, **environment: str) -> None:
    """Runs a command, and ends the rehearsal with its output if it fails."""
    result = subprocess.run(
        [str(each) for each in command],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(f"{result.stdout}\n{' '.join(map(str, command))} exited with {result.returncode}")


def rehearse(distribution: Path, python: str, folder: Path) -> tuple[float, float]:
    """Returns the seconds of the installation of a distribution, and of the tutorial from it."""
    started = time.monotonic()
    uv("venv", "--python", str(find_python(python)), str(folder))
    interpreter = folder / "bin" / "python"
    uv("pip", "install", "--python", str(interpreter), f"{distribution}[cli]")
    uv("pip", "check", "--python", str(interpreter))
    installed = time.monotonic()
    run(interpreter, "-c", SMOKE, folder=folder)
    run(interpreter.with_name("celery"), "idempotency", "--help", folder=folder)
    tutorial = (sys.executable, "-m", "pytest", "-q", "tests/docs/test_tutorial.py")
    run(*tutorial, TUTORIAL_BIN=str(interpreter.parent))
    return installed - started, time.monotonic() - installed


def main() -> None:
    """Prints a line for each Python and distribution."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--outdir", folder / "dist")
        distributions = sorted((folder / "dist").iterdir())
        run(sys.executable, "-m", "twine", "check", "--strict", *distributions)
        for python in filter(find_python, PYTHONS):
            for number, distribution in enumerate(distributions):
                times = rehearse(distribution, python, folder / f"{python}-{number}")
                installation, tutorial = (f"{seconds:.0f} s" for seconds in times)
                print(
                    f"✓ Python {python}, {distribution.name}: installed in {installation},",
                    f"the tutorial works in {tutorial}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
