"""A database of the workers, in the file that the test names; in memory in its own process."""

from __future__ import annotations

import os

import sqlalchemy as sa

from celery_idempotent.contrib.sqlalchemy import metadata

engine = sa.create_engine(f"sqlite:///{os.environ.get('SHOP_DATABASE', '')}")
with engine.begin() as connection:
    connection.exec_driver_sql("PRAGMA journal_mode=WAL")
metadata.create_all(engine)
