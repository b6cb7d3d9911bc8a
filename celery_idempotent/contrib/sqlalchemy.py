"""The table of outcomes as SQLAlchemy metadata, for Alembic or ``metadata.create_all(engine)``."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Integer, LargeBinary, MetaData, String, Table, Text
from sqlalchemy.dialects.mysql import LONGBLOB

from celery_idempotent.sql.outcomes import TABLE

__all__ = ["metadata", "outcomes"]

metadata = MetaData()

#: The type of columns for bodies. MySQL's BLOB would hold only 64 KiB.
_Body = LargeBinary().with_variant(LONGBLOB(), "mysql", "mariadb")

#: The rows of finished keys; a row is claimed and finished in the transaction of the effects.
outcomes = Table(
    TABLE,
    metadata,
    Column("id", String(32), primary_key=True, comment="digest of prefix and key"),
    Column("turn", String(32), unique=True, comment="digest of a key that may run again"),
    Column("record_key", Text, nullable=False, comment="task:digest, as Record.key"),
    Column("owner", String(32), nullable=False, comment="random id of the transaction"),
    Column("state", String(16), nullable=False, comment="COMPLETED or FAILED"),
    Column("task_id", Text, nullable=False),
    Column("worker", Text, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("fingerprint", String(32), nullable=False),
    Column("format", String(255), nullable=False),
    Column("body", _Body, nullable=False),
    Column("outbox", _Body, comment="messages to publish after the commit"),
    Column("finished_at", BigInteger, comment="milliseconds since the epoch"),
    Column("expires_at", BigInteger, index=True, comment="milliseconds since the epoch"),
)
