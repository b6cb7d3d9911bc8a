"""The databases under test: each kind by SQLAlchemy and by Django, with a table of effects.

Also runs modules of this folder in processes of their own, such as one with Django.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import make_url

from celery_idempotent.contrib.sqlalchemy import metadata, outcomes
from tests.waiting import SOON

REPOSITORY = Path(__file__).parents[2]

KINDS = ("sqlite", "postgresql", "mariadb")
LIBRARIES = ("sqlalchemy", "django")

#: What task bodies write: one row for each effect.
effects = sa.Table(
    "effects",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.String(64), nullable=False, index=True),
    sa.Column("pid", sa.Integer, nullable=False),
)


def new_engine(url: str, **options: Any) -> sa.Engine:
    """Returns an engine; that of SQLite waits for locks as long as a server would."""
    if url.startswith("sqlite"):
        options.setdefault("connect_args", {"timeout": 60})
    engine = sa.create_engine(url, **options)
    if url.startswith("sqlite"):
        sa.event.listen(engine, "connect", _use_wal)
    return engine


def _use_wal(connection: Any, _: object) -> None:
    connection.execute("PRAGMA journal_mode=WAL")


def django_database(url: str) -> dict[str, Any]:
    """Returns the entry of Django's DATABASES for this database."""
    parts = make_url(url)
    name = parts.get_backend_name()
    engine = {"sqlite": "sqlite3", "postgresql": "postgresql", "mysql": "mysql"}[name]
    database = {"ENGINE": f"django.db.backends.{engine}", "NAME": parts.database}
    if name == "sqlite":
        return {**database, "OPTIONS": {"timeout": 60}}
    return {**database, "HOST": parts.host, "PORT": parts.port, "USER": parts.username}


_MIGRATE = """
import sys
from tests.sql.databases import set_up_django
set_up_django(sys.argv[1])
from django.core.management import call_command
call_command("migrate", "celery_idempotent", database="default", verbosity=0)
"""


def set_up_django(url: str) -> None:
    """Sets up Django in this process, with the database as its default."""
    import django
    import pymysql
    from django.conf import settings

    pymysql.install_as_MySQLdb()
    settings.configure(
        DATABASES={"default": django_database(url)},
        INSTALLED_APPS=["celery_idempotent.contrib.django"],
        USE_TZ=True,
    )
    django.setup()


def migrate(url: str) -> None:
    """Creates the table of outcomes by the migration of the Django app."""
    subprocess.run([sys.executable, "-c", _MIGRATE, url], cwd=REPOSITORY, check=True)


@dataclass
class TestDatabase:
    """One database with the tables of outcomes and effects."""

    __test__ = False

    kind: str
    url: str
    #: The library whose migration creates the table of outcomes.
    library: str = "sqlalchemy"

    def __post_init__(self) -> None:
        #: By PgBouncer, if there is one.
        self.pooled_url = self.url
        self.engine = new_engine(self.url, poolclass=sa.NullPool)
        if self.library == "django":
            migrate(self.url)
        else:
            metadata.create_all(self.engine)
        effects.metadata.create_all(self.engine)

    def effects(self, name: str) -> int:
        """Returns the number of committed effects of that name."""
        query = sa.select(sa.func.count()).where(effects.c.name == name)
        with self.engine.connect() as connection:
            return connection.execute(query.select_from(effects)).scalar_one()

    def rows(self, key: str) -> list[Any]:
        """Returns the committed outcomes of a key."""
        with self.engine.connect() as connection:
            query = outcomes.select().where(outcomes.c.record_key == key)
            return list(connection.execute(query))


CreateDatabase = Callable[..., TestDatabase]


def run_module(module: str, *arguments: str, cwd: Path = REPOSITORY, **environment: str) -> Any:
    """Runs a Python module in a process of its own, and returns the process once it has ended."""
    command, env = [sys.executable, "-m", module, *arguments], os.environ | environment
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    return subprocess.run(command, cwd=cwd, env=env, timeout=SOON, **options)


def output_of(module: str, *arguments: str) -> Any:
    """Runs a module of this folder; returns what it has passed to `dump`."""
    done = run_module(f"tests.sql.{module}", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def dump(value: Any) -> None:
    """Prints a value as JSON, for the process of the test."""
    print(json.dumps(value, default=str))


def names_of_tests(module: str) -> list[str]:
    """Returns the names of the tests in a module of this folder, which is not imported."""
    text = (Path(__file__).parent / f"{module}.py").read_text("utf-8")
    return re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)


def dump_failures(module: dict[str, Any]) -> None:
    """Calls all tests of a module; prints the traceback of each that fails, by its name."""
    failures = {}
    for name in [name for name in module if name.startswith("test_")]:
        try:
            module[name]()
        except Exception:
            failures[name] = traceback.format_exc()
    dump(failures)
