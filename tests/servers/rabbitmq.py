"""A private RabbitMQ: its own directory, ports and Erlang name service, gone with its owner.

    with RabbitMQ.start() as broker:
        app = Celery(broker=broker.url)

It is the RabbitMQ that the system installed, run without systemd, as whoever runs it, and without
anything that the system configured for its own. It listens on the loopback interface only. It
takes seconds to start, so share one between tests. It is ended when its owner stops it, drops it
or exits. On Linux it also dies with an owner that is killed; then its temporary directory stays
behind.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import amqp

from celery_idempotent.testing.ports import Ports
from celery_idempotent.testing.process import Program, ServerError, Stoppable

__all__ = ["RabbitMQ", "RabbitMQError", "find_rabbitmq"]

_START_SECONDS = 60.0
_CONNECT_SECONDS = 10.0
_CONTROL_SECONDS = 30.0
_POLL_SECONDS = 0.02
_NOT_YET = "requires the 'rabbit' app to be running"

# What packages put on PATH is a wrapper that wants to be root, to become the user rabbitmq. This
# is what it wraps; anybody can run it.
_BEHIND_THE_WRAPPER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

# One scheduler, and none that waits for work by spinning: tests need the processor.
# A name service that Erlang itself starts would be a daemon, which nobody ends.
_ERL_FLAGS = (
    "-noinput -start_epmd false -kernel inet_dist_use_interface {127,0,0,1} +S 1:1 +sbwt none"
)


class RabbitMQError(ServerError):
    """There is no RabbitMQ here, it did not start, or it did not do what it was told."""


def find_rabbitmq() -> Path | None:
    """The script that starts the installed RabbitMQ; None if it or Erlang's epmd is missing."""
    if shutil.which("epmd") is None:
        return None
    if _BEHIND_THE_WRAPPER.exists():
        return _BEHIND_THE_WRAPPER
    on_path = shutil.which("rabbitmq-server")
    return Path(on_path) if on_path else None


class RabbitMQ(Stoppable):
    """A running broker; `start` makes one. Leaving the `with` block stops it.

    Attributes:
        url: what Celery takes as broker; the same after a restart.
        version: of the broker, such as "3.10.8".
    """

    url: str
    version: str

    def __init__(self, script: Path, port: int | None, config: Mapping[str, str]) -> None:
        ports = Ports(3)
        own_port, epmd_port, distribution_port = ports.numbers
        port = port or own_port
        self.url = f"amqp://guest:guest@127.0.0.1:{port}//"
        self._address = f"127.0.0.1:{port}"
        self._epmd_address = ("127.0.0.1", epmd_port)
        self._control = script.resolve().with_name("rabbitmqctl")
        directory = Path(tempfile.mkdtemp(prefix="rabbitmq-"))
        self._name = directory.name  # of the node: no other on this machine has it
        _write_configuration(directory, {"listeners.tcp.1": self._address, **config})
        self._environment = _environment(directory, epmd_port, distribution_port)
        epmd = [str(shutil.which("epmd")), "-port", str(epmd_port), "-address", "127.0.0.1"]
        self._epmd = Program(directory, "epmd", epmd, self._environment)
        self._server = Program(directory, "server", [str(script)], self._environment)
        self._discard = weakref.finalize(self, _discard, ports, self._server, self._epmd)
        try:
            self._epmd.launch()
            self._await(self._epmd, self._epmd_answers)
            self._server.launch()
            self._await(self._server, self._server_answers)
        except BaseException:
            self.stop()
            raise

    @classmethod
    def start(cls, *, port: int | None = None, config: Mapping[str, str] | None = None) -> RabbitMQ:
        """Start a broker and return when a client can log in.

        Args:
            port: TCP port on 127.0.0.1; a free one if None.
            config: settings as rabbitmq.conf has them, such as `{"consumer_timeout": "60000"}`.

        Raises:
            RabbitMQError: RabbitMQ is not installed, or no client could log in within 60 s.
        """
        script = find_rabbitmq()
        if script is None:
            raise RabbitMQError(
                "No RabbitMQ here: apt-get install rabbitmq-server, "
                "or put rabbitmq-server and Erlang's epmd on PATH."
            )
        return cls(script, port, config or {})

    def stop(self) -> None:
        """End the broker and remove its directory. Twice is once."""
        self._discard()

    def kill(self) -> None:
        """End the broker as a crash would (SIGKILL); `restart` brings it back."""
        self._ours().end(signal.SIGKILL)

    def restart(self) -> None:
        """Shut the broker down in order, if it runs, and start it on the same URL.

        Durable queues live on, with the persistent messages that the broker had confirmed.
        """
        server = self._ours()
        server.end(signal.SIGTERM)
        server.launch()
        self._await(server, self._server_answers)

    def close_connections(self) -> None:
        """Close every connection from the broker's side: clients are told CONNECTION_FORCED.

        Raises:
            RabbitMQError: the broker does not run.
        """
        self._ours()
        deadline = time.monotonic() + _CONTROL_SECONDS
        while complaint := self._tell("close_all_connections", "--global", "for a test"):
            # It takes clients in a moment before it counts as started.
            if _NOT_YET not in complaint or time.monotonic() > deadline:
                raise RabbitMQError(f"The connections were not closed: {complaint}")

    def block_publishers(self) -> None:
        """Take no messages from now on, as when memory or disk space runs out.

        Consumers are still served. A publisher waits, until `unblock_publishers`.

        Raises:
            RabbitMQError: the broker does not run.
        """
        self._set_memory_limit("0")

    def unblock_publishers(self) -> None:
        """Take messages again.

        Raises:
            RabbitMQError: the broker does not run.
        """
        self._set_memory_limit("0.4")  # RabbitMQ's default

    def _set_memory_limit(self, fraction: str) -> None:
        self._ours()
        if complaint := self._tell("set_vm_memory_high_watermark", fraction):
            raise RabbitMQError(f"The memory limit was not set: {complaint}")

    def _tell(self, *words: str) -> str:
        """What rabbitmqctl has to say against it; "" if it is done."""
        done = subprocess.run(
            [str(self._control), *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CONTROL_SECONDS,
            check=False,
        )
        return " ".join(done.stderr.split("\n\n")[0].split()) if done.returncode else ""

    def _ours(self) -> Program:
        if not self._discard.alive:
            raise RabbitMQError("This broker was stopped for good.")
        return self._server

    def _await(self, program: Program, answers: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not answers():
            if program.ended() or time.monotonic() > deadline:
                raise RabbitMQError(f"RabbitMQ did not start: {_complaint(program)}")
            time.sleep(_POLL_SECONDS)

    def _epmd_answers(self) -> bool:
        try:
            socket.create_connection(self._epmd_address, _CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    def _server_answers(self) -> bool:
        connection = amqp.Connection(
            self._address, login_method="PLAIN", connect_timeout=_CONNECT_SECONDS
        )
        try:
            with connection:
                about: dict[str, str] = connection.server_properties
        except (OSError, amqp.AMQPError):  # not yet listening, or somebody else is
            return False
        if not about["cluster_name"].startswith(f"{self._name}@"):
            raise RabbitMQError(f"Another broker answers at {self.url}.")
        self.version = about["version"]
        return True


def _environment(directory: Path, epmd_port: int, distribution_port: int) -> dict[str, str]:
    """The owner's variables, and nothing from elsewhere that RabbitMQ or Erlang listens to."""
    foreign = ("RABBITMQ_", "ERL_", "NOTIFY_SOCKET")
    inherited = {name: v for name, v in os.environ.items() if not name.startswith(foreign)}
    own = {
        "HOME": str(directory),  # of Erlang's cookie
        "LC_ALL": "C.UTF-8",
        "ERL_CRASH_DUMP_SECONDS": "0",  # none
        "ERL_EPMD_PORT": str(epmd_port),
        "ERL_FLAGS": _ERL_FLAGS,
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(directory / "advanced.config"),  # there is none
        "RABBITMQ_ALLOW_INPUT": "1",  # no shell above Erlang that would hide its process
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
        "RABBITMQ_CONFIG_FILES": str(directory / "conf.d"),  # there is none
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


def _write_configuration(directory: Path, settings: Mapping[str, str]) -> None:
    lines = [f"{name} = {value}\n" for name, value in settings.items()]
    (directory / "rabbitmq.conf").write_text("".join(lines), encoding="utf-8")
    (directory / "enabled_plugins").write_text("[].\n", encoding="utf-8")


def _discard(ports: Ports, *programs: Program) -> None:
    for program in programs:
        program.discard()
    ports.stop()


def _complaint(program: Program) -> str:
    """Its first three errors: what follows them is Erlang's account of how it all came down."""
    errors = (re.search(r"\[error\] <[\d.]+> +(\S.*)", line) for line in program.output())
    return " ".join([error[1] for error in errors if error][:3]) or program.output_tail()
