"""Installs each contestant that must not share our environment into one of its own."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from labs.comparison.contestants import PEERS_IN_ENVIRONMENTS

#: Every environment has the same versions of these, as far as ours has them; labs.canvases imports
#: the last three.
SHARED = ("celery", "kombu", "redis", "hiredis", "django", "pymysql", "sqlalchemy")


def install_peers() -> None:
    """Creates the environments that do not exist yet.

    Raises:
        subprocess.CalledProcessError: if pip fails; its output is on standard error.
    """
    for peer in PEERS_IN_ENVIRONMENTS:
        requirements = [peer.requirement, "packaging"]  # kombu imports it with Redis
        for name in SHARED:
            with suppress(PackageNotFoundError):
                requirements.append(f"{name}=={version(name)}")
        installed = peer.folder / "requirements.txt"  # is written when all are installed
        if installed.exists() and installed.read_text() == "\n".join(requirements):
            continue
        print(f"installing {' '.join(requirements)} into {peer.folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", peer.folder], check=True)
        pip = [peer.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *requirements], check=True, stdout=sys.stderr)
        installed.write_text("\n".join(requirements))
