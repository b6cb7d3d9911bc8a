"""Installs each contestant that must not share our environment into one of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from labs.comparison.contestants import PEERS_IN_ENVIRONMENTS, PeerInEnvironment

#: Every environment has the same versions of these, as far as ours has them; labs.canvases imports
#: the last three.
SHARED = ("celery", "kombu", "redis", "hiredis", "django", "pymysql", "sqlalchemy")


def install_peers(peers: Iterable[PeerInEnvironment] = PEERS_IN_ENVIRONMENTS) -> None:
    """Creates the environments that do not exist yet.

    Raises:
        subprocess.CalledProcessError: if pip fails; its output is on standard error.
    """
    for peer in peers:
        _install(peer)


def _install(peer: PeerInEnvironment) -> None:
    # kombu imports packaging with Redis. Its extra `redis`, which relier needs, pins the version.
    requirements = [peer.requirement, "packaging"]
    for name in SHARED:
        with suppress(PackageNotFoundError):
            requirements.append(f"{name}=={version(name)}")
    if peer.is_installed and peer.installed.read_text() == "\n".join(requirements):
        return
    print(f"installing {' '.join(requirements)} into {peer.folder}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", peer.folder], check=True)
    pip = [peer.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *requirements], check=True, stdout=sys.stderr)
    peer.installed.write_text("\n".join(requirements))
