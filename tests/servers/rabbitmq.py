"""Starts a private RabbitMQ with its own directory, ports and Erlang name service.

    with RabbitMQ.start() as broker:
        app = Celery(broker=broker.url)

The installed RabbitMQ is started without systemd, as the current user, and without the system's
configuration. It listens on the loopback interface only. It takes seconds to start: share one
between tests. It ends when its owner stops it, drops it or exits. On Linux it also ends when its
owner is killed; its temporary directory then remains.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import amqp

from tests.servers.program import Ports, Program, Server, ServerError

_CONNECT_SECONDS = 10.0
_CONTROL_SECONDS = 60.0
_NOT_YET = "requires the 'rabbit' app to be running"

# The program on PATH is a wrapper that must run as root, to switch to the user rabbitmq. This is
# the script that it calls; any user can run it.
_SERVER_SCRIPT = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

# One scheduler, without busy waiting: tests need the processor. Erlang must not start a name
# service itself, because that would be a daemon that nothing stops.
_ERL_FLAGS = (
    "-noinput -start_epmd false -kernel inet_dist_use_interface {127,0,0,1} +S 1:1 +sbwt none"
)


def find_rabbitmq() -> Path | None:
    """Returns the script that starts RabbitMQ; None if it or Erlang's epmd is missing."""
    if shutil.which("epmd") is None:
        return None
    if _SERVER_SCRIPT.exists():
        return _SERVER_SCRIPT
    on_path = shutil.which("rabbitmq-server")
    return Path(on_path) if on_path else None


class RabbitMQ(Server):
    """A running broker, returned by `start`. The end of a `with` block stops it.

    Attributes:
        url: the URL for Celery's broker; unchanged by a restart.
    """

    url: str

    def __init__(self) -> None:
        script = find_rabbitmq()
        if script is None:
            raise ServerError("RabbitMQ is not installed: apt-get install rabbitmq-server")
        ports = Ports(3)
        port, epmd_port, distribution_port = ports.numbers
        self.url = f"amqp://guest:guest@127.0.0.1:{port}//"
        self._address = f"127.0.0.1:{port}"
        self._epmd_address = ("127.0.0.1", epmd_port)
        self._control = script.resolve().with_name("rabbitmqctl")
        directory = Path(tempfile.mkdtemp(prefix="rabbitmq-"))
        (directory / "rabbitmq.conf").write_text(f"listeners.tcp.1 = {self._address}\n")
        (directory / "enabled_plugins").write_text("[].\n")
        self._environment = _environment(directory, epmd_port, distribution_port)
        epmd = [str(shutil.which("epmd")), "-port", str(epmd_port), "-address", "127.0.0.1"]
        self._epmd = Program(directory, "epmd", epmd, self._environment)
        server = Program(directory, "server", [str(script)], self._environment)
        super().__init__(ports, server, self._epmd)

    @classmethod
    def start(cls) -> RabbitMQ:
        """Starts a broker and returns when a client can log in.

        Raises:
            ServerError: RabbitMQ is not installed, or no client could log in within 60 s.
        """
        return cls()

    def launch(self) -> None:
        """Starts the broker, and returns when a client can log in."""
        if self._epmd.ended():
            self._epmd.launch()
            self._epmd.wait_until(self._epmd_is_ready)
        self._program.launch()
        self._program.wait_until(self._server_is_ready)

    def restart(self) -> None:
        """Shuts the broker down, if it runs, and starts it on the same URL.

        Durable queues survive, with the persistent messages that the broker had confirmed.
        """
        self._program.end(signal.SIGTERM)
        self.launch()

    def close_connections(self) -> None:
        """Closes every connection from the broker's side, with CONNECTION_FORCED."""
        deadline = time.monotonic() + _CONTROL_SECONDS
        while error := self._control_error("close_all_connections", "--global", "for a test"):
            # It accepts clients shortly before it counts as started.
            if _NOT_YET not in error or time.monotonic() > deadline:
                raise ServerError(f"The connections were not closed: {error}")

    def block_publishers(self) -> None:
        """Stops accepting messages, as when memory or disk space runs out.

        Deliveries to consumers continue. Publishers block until `unblock_publishers`.
        """
        self._set_memory_limit("0")

    def unblock_publishers(self) -> None:
        """Accepts messages again."""
        self._set_memory_limit("0.4")  # RabbitMQ's default

    def _set_memory_limit(self, fraction: str) -> None:
        if error := self._control_error("set_vm_memory_high_watermark", fraction):
            raise ServerError(f"The memory limit was not set: {error}")

    def _control_error(self, *arguments: str) -> str:
        """Runs rabbitmqctl and returns its error message, or "" on success."""
        command = [str(self._control), *arguments]
        result = subprocess.run(
            command, env=self._environment, timeout=_CONTROL_SECONDS, capture_output=True, text=True
        )
        return " ".join(result.stderr.split("\n\n")[0].split()) if result.returncode else ""

    def _epmd_is_ready(self) -> bool:
        try:
            socket.create_connection(self._epmd_address, _CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    def _server_is_ready(self) -> bool:
        options = {"login_method": "PLAIN", "connect_timeout": _CONNECT_SECONDS}
        connection = amqp.Connection(self._address, **options)
        try:
            with connection:
                return True
        except (OSError, amqp.AMQPError):  # not listening yet
            return False


def _environment(directory: Path, epmd_port: int, distribution_port: int) -> dict[str, str]:
    """Returns this process's variables without those that would configure RabbitMQ or Erlang."""
    excluded = ("RABBITMQ_", "ERL_", "NOTIFY_SOCKET")
    inherited = {name: v for name, v in os.environ.items() if not name.startswith(excluded)}
    own = {
        "HOME": str(directory),  # Erlang stores its cookie there
        "LC_ALL": "C.UTF-8",
        "ERL_CRASH_DUMP_SECONDS": "0",  # no crash dumps
        "ERL_EPMD_PORT": str(epmd_port),
        "ERL_FLAGS": _ERL_FLAGS,
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(directory / "advanced.config"),  # does not exist
        "RABBITMQ_ALLOW_INPUT": "1",  # no shell between this process and Erlang
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
        "RABBITMQ_CONFIG_FILES": str(directory / "conf.d"),  # does not exist
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_DIST_PORT": str(distribution_port),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(directory),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_LOG_BASE": str(directory),
        "RABBITMQ_MNESIA_BASE": str(directory),
        "RABBITMQ_NODENAME": f"{directory.name}@localhost",
        "RABBITMQ_PID_FILE": str(directory / "server.pid"),
    }
    return inherited | own
