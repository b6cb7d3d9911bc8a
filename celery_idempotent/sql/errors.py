"""Decides which errors of database drivers a repeated transaction may avoid."""

from __future__ import annotations

from typing import Any

#: SQLSTATE of PostgreSQL: lock not available, shutdowns, too many connections, and the timeouts of
#: idle transactions, transactions and idle sessions, which end the connection.
_STATES = frozenset({"55P03", "57P01", "57P02", "57P03", "53300", "25P03", "25P04", "57P05"})
#: The first two characters of SQLSTATE: lost connections, and transactions that the server has
#: rolled back.
_CLASSES = ("08", "40")
#: Errors of MySQL and MariaDB: deadlocks, lock timeouts, changed rows, shutdowns, lost connections.
_NUMBERS = frozenset(
    {1213, 1205, 1020, 1040, 1053, 1180, 1317, 1927, 2002, 2003, 2006, 2013, 2055, 4031}
)
_MYSQL_DRIVERS = frozenset({"pymysql", "MySQLdb", "mysql", "mariadb"})
_CONNECTION_ERRORS = frozenset({"OperationalError", "InterfaceError"})


def is_transient(error: BaseException) -> bool:
    """Returns whether `error` is a database error that repeating the transaction may avoid.

    These include deadlocks, serialization failures, lock timeouts and lost connections.
    """
    if getattr(error, "connection_invalidated", False):
        return True
    # SQLAlchemy and Django wrap the error of the driver.
    cause: Any = getattr(error, "orig", None) or error.__cause__ or error
    driver = type(cause).__module__.partition(".")[0]
    if driver in ("psycopg", "psycopg2"):
        state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        if state is None:  # no reply from the server
            return _connection_failed(cause)
        return state in _STATES or state.startswith(_CLASSES)
    if driver in _MYSQL_DRIVERS:
        number = cause.args[0] if cause.args else 0
        return number in _NUMBERS or (number == 0 and _connection_failed(cause))
    if driver == "sqlite3":
        return "locked" in str(cause) or "busy" in str(cause)
    return False


def _connection_failed(error: BaseException) -> bool:
    return any(cls.__name__ in _CONNECTION_ERRORS for cls in type(error).__mro__)
