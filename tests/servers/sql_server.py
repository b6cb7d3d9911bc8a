"""Private PostgreSQL, PgBouncer and MariaDB servers, on a free port of the loopback interface.

    with PostgreSQL.start() as server:
        engine = create_engine(server.create_database())

They refuse to run as root, so that they are started as the user of their package then. Like the
other private servers, they end with their owner.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from tests.servers.program import Ports, Program, Server, ServerError


def find_postgres() -> Path | None:
    """Returns the directory of the newest installed PostgreSQL's programs."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=_version)
    if versions:
        return versions[-1].parent
    on_path = shutil.which("postgres")
    return Path(on_path).resolve().parent if on_path else None


def _version(program: Path) -> int:
    return int(program.parts[-3])


def find_mariadb() -> Path | None:
    """Returns MariaDB's server program."""
    program = shutil.which("mariadbd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    return Path(program) if program and shutil.which("mariadb-install-db") else None


def find_pgbouncer() -> Path | None:
    """Returns PgBouncer's program."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    return Path(program) if program else None


class SQLServer(Server):
    """A running server; the end of a `with` block stops it."""

    #: The user of the package.
    user: ClassVar[str]

    def __init__(self) -> None:
        ports = Ports(1)
        (self.port,) = ports.numbers
        self.directory = Path(tempfile.mkdtemp(prefix=f"{self.user}-", dir="/tmp"))
        self.directory.chmod(0o711)
        self.data = self.directory / "data"
        self.data.mkdir()
        self._names = (f"test_{number}" for number in count())
        if os.getuid() == 0:
            account = pwd.getpwnam(self.user)
            os.chown(self.data, account.pw_uid, account.pw_gid)
        self._initialize()
        program = Program(self.directory, "server", self._as_user(self._command()))
        super().__init__(ports, program)

    @classmethod
    def start(cls, *args: Any) -> Any:
        """Starts a server and returns when a client can log in."""
        return cls(*args)

    def launch(self) -> None:
        """Starts the server's process, and waits until a client can log in."""
        self._program.launch()
        self._program.wait_until(self._lets_clients_in)

    def _lets_clients_in(self) -> bool:
        try:
            self.execute("SELECT 1")
        except Exception as error:
            if type(error).__name__ != "OperationalError":
                raise
            return False
        return True

    def create_database(self) -> str:
        """Creates a database and returns its URL, as SQLAlchemy reads it."""
        name = next(self._names)
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, statement: str) -> None:
        """Executes a statement as the superuser."""
        raise NotImplementedError

    def url(self, database: str) -> str:
        """Returns the URL of a database."""
        raise NotImplementedError

    def _initialize(self) -> None:
        raise NotImplementedError

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _as_user(self, command: list[str]) -> list[str]:
        if os.getuid() != 0:
            return command
        switch = [str(shutil.which("setpriv")), f"--reuid={self.user}", f"--regid={self.user}"]
        # A change of the user clears the signal at the parent's death.
        return [*switch, "--clear-groups", "--pdeathsig", "KILL", "--", *command]

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(self._as_user(command), capture_output=True, text=True, cwd="/")
        if done.returncode:
            raise ServerError(f"{command[0]}: {done.stdout}{done.stderr}")


class PostgreSQL(SQLServer):
    """A PostgreSQL server."""

    user = "postgres"

    def _initialize(self) -> None:
        self._run([str(self._bin / "initdb"), "-N", "--auth=trust", "-U", "postgres", *self._data])

    @property
    def _bin(self) -> Path:
        directory = find_postgres()
        if directory is None:
            raise ServerError("PostgreSQL is not installed: apt-get install postgresql")
        return directory

    @property
    def _data(self) -> list[str]:
        return ["-D", str(self.data)]

    def _command(self) -> list[str]:
        options = {"fsync": "on", "max_connections": "60", "shared_buffers": "16MB"}
        switches = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        address = ["-h", "127.0.0.1", "-p", str(self.port), "-k", str(self.data)]
        return [str(self._bin / "postgres"), *self._data, *address, *switches]

    def execute(self, statement: str) -> None:
        """Executes a statement as the superuser."""
        import psycopg

        conninfo = f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres"
        # PgBouncer in transaction mode has no prepared statements.
        with psycopg.connect(conninfo, autocommit=True, prepare_threshold=None) as connection:
            connection.execute(statement.encode())

    def url(self, database: str) -> str:
        """Returns the URL of a database."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"


class MariaDB(SQLServer):
    """A MariaDB server."""

    user = "mysql"

    @property
    def _directories(self) -> list[str]:
        # In /tmp, servers that start would remove each other's temporary files.
        return [f"--datadir={self.data}", f"--tmpdir={self.data}"]

    def _initialize(self) -> None:
        options = ["--skip-test-db", "--auth-root-authentication-method=normal"]
        program = str(shutil.which("mariadb-install-db"))
        self._run([program, "--no-defaults", *self._directories, *options])

    def _command(self) -> list[str]:
        return [
            str(find_mariadb()),
            *("--no-defaults", *self._directories, f"--socket={self.data}/socket"),
            *("--bind-address=127.0.0.1", f"--port={self.port}", "--skip-name-resolve"),
            *("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M"),
        ]

    def execute(self, statement: str) -> None:
        """Executes a statement as the superuser."""
        import pymysql

        with pymysql.connect(host="127.0.0.1", port=self.port, user="root") as connection:
            connection.cursor().execute(statement)

    def url(self, database: str) -> str:
        """Returns the URL of a database."""
        return f"mysql+pymysql://root@127.0.0.1:{self.port}/{database}"


class PgBouncer(PostgreSQL):
    """PgBouncer in transaction mode, in front of `server`.

    It has fewer connections to a database than clients do, so that consecutive transactions of a
    client run on different ones.
    """

    def __init__(self, server: PostgreSQL) -> None:
        self._server = server
        super().__init__()

    def _initialize(self) -> None:
        self._configuration.write_text(
            f"""
            [databases]
            * = host=127.0.0.1 port={self._server.port} user=postgres
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {self.port}
            unix_socket_dir =
            auth_type = any
            pool_mode = transaction
            default_pool_size = 3
            """
        )

    @property
    def _configuration(self) -> Path:
        return self.data / "pgbouncer.ini"

    def _command(self) -> list[str]:
        return [str(find_pgbouncer()), str(self._configuration)]
