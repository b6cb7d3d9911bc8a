"""Creating the table: by Alembic, and what a worker says where it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from celery_idempotent.contrib.sqlalchemy import metadata, outcomes
from tests.servers.redis_server import RedisServer
from tests.sql.conftest import each_kind_in_full, run_celery
from tests.sql.databases import LIBRARIES, REPOSITORY, CreateDatabase, TestDatabase, run_module

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, each_kind_in_full]

ENV = """
import os
from alembic import context
from sqlalchemy import MetaData, create_engine
from celery_idempotent.contrib.sqlalchemy import metadata as idempotency_metadata

own_metadata = MetaData()
target_metadata = [own_metadata, idempotency_metadata]
with create_engine(os.environ["DATABASE"]).connect() as connection:
    context.configure(connection=connection, target_metadata=target_metadata)
    with context.begin_transaction():
        context.run_migrations()
"""


def test_alembic_generates_the_migration(database: TestDatabase, tmp_path: Path) -> None:
    metadata.drop_all(database.engine)
    with database.engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE IF EXISTS effects"))
        connection.execute(sa.text("DROP TABLE IF EXISTS alembic_version"))

    environment = {"DATABASE": database.url, "PYTHONPATH": str(REPOSITORY)}

    def alembic(*arguments: str) -> str:
        done = run_module("alembic", *arguments, cwd=tmp_path, **environment)
        assert done.returncode == 0, done.stderr
        stdout: str = done.stdout
        return stdout

    alembic("init", "migrations")
    (tmp_path / "migrations" / "env.py").write_text(ENV)
    alembic("revision", "--autogenerate", "-m", "outcomes")
    alembic("upgrade", "head")

    columns = {column["name"] for column in sa.inspect(database.engine).get_columns(outcomes.name)}
    assert columns == set(outcomes.columns.keys())
    assert "No new upgrade operations" in alembic("check")


def test_a_worker_without_the_table_exits_with_the_remedy(
    server: RedisServer, database: TestDatabase, create_database: CreateDatabase
) -> None:
    empty = create_database(database.kind)
    metadata.drop_all(empty.engine)
    for library, remedy in zip(LIBRARIES, ("metadata", "migrate celery_idempotent"), strict=True):
        done = run_celery(server, empty, library, "worker", "--pool", "solo")
        assert done.returncode == 1
        (line,) = (each for each in done.stderr.splitlines() if each.startswith("Error: "))
        assert outcomes.name in line
        assert remedy in line
