"""The transaction of one execution: claims the row, and commits it with the outcome."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from celery_idempotent.errors import IdempotencyError, StoreUnavailableError, TransactionError
from celery_idempotent.sql.errors import is_transient
from celery_idempotent.sql.outcomes import (
    Claim,
    Ended,
    Row,
    committed_without_outcome,
)

if TYPE_CHECKING:
    from celery_idempotent.sql.database import Database
    from celery_idempotent.sql.session import Session

T = TypeVar("T")

#: Claims that a deadlock or a lost connection has ended are repeated so often, with these pauses.
CLAIM_ATTEMPTS = 8
MIN_PAUSE, MAX_PAUSE = 0.01, 1.0
#: How often a row may be removed, or taken over by another execution, before it is claimed.
MAX_RACES = 50

logger = logging.getLogger(__name__)

CLOSED, OPEN, COMMITTING, COMMITTED = "closed", "open", "committing", "committed"


class Transaction:
    """Claims the row of a key, and commits it together with the effects of the body.

    Args:
        may_replace: whether the execution may run although the row has an outcome.
    """

    def __init__(
        self, database: Database, claim: Claim, may_replace: Callable[[Row], bool]
    ) -> None:
        self.database = database
        self.claim = claim
        self._may_replace = may_replace
        self._session = database.engine.session()
        self._statements = database.statements
        self._id = ""
        self._owner = ""
        #: The messages that are committed with the outcome.
        self.outbox: bytes | None = None
        self.phase = CLOSED

    @property
    def connection(self) -> Any:
        """The connection of the open transaction."""
        if self.phase is not OPEN:
            raise TransactionError(f"{self.claim.key}: the transaction has ended")
        return self._session.connection

    @property
    def committed(self) -> bool:
        """Whether the outcome is in the database."""
        return self.phase is COMMITTED

    @property
    def owner(self) -> str:
        """The random id of the row that this transaction has claimed."""
        return self._owner

    @property
    def on_commit(self) -> list[Callable[[], Any]]:
        """The functions that the body has registered for the commit."""
        return self._session.on_commit if self.phase is OPEN else []

    def begin(self, *, resolving: bool = False) -> Row | None:
        """Begins the transaction and claims the row, after the end of another one that has it.

        Args:
            resolving: replaces no row, and limits the time to wait for the other transaction.

        Returns:
            None if the row is claimed: the transaction is open. Else the row with its outcome;
            also one that may be replaced, if its messages are still to be published.

        Raises:
            StoreUnavailableError: if the database is unavailable, or has no table.
            TransactionError: inside a transaction of the caller.
        """
        work = partial(self._claim_row, resolving=resolving)
        owner, row = claim_repeatedly(self.database, self._session, work)
        if owner and not resolving:
            self._owner, self.outbox, self.phase = owner, None, OPEN
        return row

    def _claim_row(self, *, resolving: bool) -> tuple[str, Row | None]:
        """Returns the random owner of the claimed row; or "" and the row with an outcome."""
        values = self.claim.values
        owner: str = values["owner"]
        self._id = values["id"]
        for _ in range(MAX_RACES):
            self._session.begin()
            if resolving and self._statements.limit_wait:
                self._session.execute(self._statements.limit_wait, {})
            try:
                self._session.execute(self._statements.claim, values)
                return owner, None
            except self.database.engine.integrity_error:
                self._session.rollback()
            row = self._find()
            if row is None:
                continue  # purged or forgotten in the meantime
            if resolving or row.outbox is not None or not self.may_replace(row):
                return "", row
            self._session.begin()
            taken = {name: value for name, value in values.items() if name != "record_key"}
            answer = self._session.execute(self._statements.take_over, {**taken, "seen": row.owner})
            if answer.changed == 1:
                return owner, None
            self._session.rollback()
        raise committed_without_outcome()

    def find(self) -> Row | None:
        """Returns the row with its outcome, after the end of another transaction that has it.

        Raises:
            As :meth:`begin`.
        """
        row = self.begin(resolving=True)
        self._session.rollback()
        return row

    def _find(self) -> Row | None:
        self._session.begin()
        answer = self._session.execute(self._statements.find, {"id": self._id})
        self._session.rollback()
        return Row.read(answer.rows[0]) if answer.rows else None

    def commit(self, ended: Ended) -> Row | None:
        """Writes the outcome into the row and commits; the outbox replaces `on_commit`.

        If the reply to the commit is lost, the row is claimed again: that waits for the end of the
        lost transaction, and returns its row if it was committed. Called again after a signal
        handler has raised in it, it does the same.

        Returns:
            None if the outcome is committed. Else the row of another execution.

        Raises:
            TransactionError: if the body has ended the transaction.
            StoreUnavailableError: if it cannot be determined whether the outcome is committed.
            Exception: of the driver; nothing is committed.
        """
        if self.phase is COMMITTED:
            return None
        if self.phase is CLOSED:
            raise ended_by_body(self.claim.key)
        error: BaseException | None = None
        if self.phase is OPEN:
            self._finish(ended)
            self._session.drop_on_commit()
            self.phase = COMMITTING
            try:
                self._session.commit()
            except Exception as raised:
                error = raised
            else:
                self.phase = COMMITTED
                return None
        return self._resolve(error)

    def _finish(self, ended: Ended) -> None:
        if not self._session.active:
            raise ended_by_body(self.claim.key)
        values = {**ended._asdict(), "id": self._id, "owner": self._owner}
        values["state"] = ended.state.value
        if self._session.execute(self._statements.finish, values).changed != 1:
            raise ended_by_body(self.claim.key)

    def _resolve(self, error: BaseException | None) -> Row | None:
        """Determines whether the commit took effect; raises `error` if it did not."""
        self._session.discard()
        row = self.begin(resolving=True)
        if row is not None and row.owner == self._owner:
            self.phase = COMMITTED
            if error is not None:
                logger.warning("%s is committed, but: %r", self.claim.key, error)
            return None
        self._session.rollback()
        self.phase = CLOSED
        if row is not None and not self.may_replace(row):
            return row
        raise error or StoreUnavailableError(f"{self.claim.key}: the commit was interrupted")

    def may_replace(self, row: Row) -> bool:
        """Whether the execution may take over the row of an earlier one."""
        return row.expired or self._may_replace(row)

    def rollback(self, *, discard: bool = False) -> None:
        """Rolls back what is not committed. Never raises.

        Args:
            discard: closes the connection, too: an asynchronous error may have been raised in the
                middle of a statement.
        """
        if self.phase in (CLOSED, COMMITTED):
            return
        discard = discard or self.phase is COMMITTING
        self.phase = CLOSED
        if discard:
            self._session.discard()
        else:
            self._session.rollback()


def claim_repeatedly(database: Database, session: Session, claim: Callable[[], T]) -> T:
    """Calls `claim` again after a deadlock or a lost connection.

    Raises:
        StoreUnavailableError: if the database is unavailable, or has no table.
        TransactionError: inside a transaction of the caller.
    """
    for attempt in range(CLAIM_ATTEMPTS):
        try:
            return claim()
        except IdempotencyError:
            session.rollback()
            raise
        except Exception as error:
            session.rollback()
            if attempt + 1 == CLAIM_ATTEMPTS or not is_transient(error):
                raise database.unavailable(error) from error
        except BaseException:
            session.discard()
            raise
        time.sleep(random.uniform(0.5, 1.0) * min(MIN_PAUSE * 2**attempt, MAX_PAUSE))
    raise AssertionError  # the last attempt returns or raises


def ended_by_body(key: object) -> TransactionError:
    """Returns the error for a transaction that cannot be committed with the outcome of `key`."""
    return TransactionError(
        f"{key}: the body has ended its transaction, so that its outcome cannot be committed with "
        "it; use savepoints (begin_nested(), or a nested atomic()) for parts that may be rolled "
        "back"
    )


class PlainTransaction:
    """A transaction without an outcome, of a call that runs without protection.

    Inside a transaction of the caller, a part of that.
    """

    def __init__(self, database: Database) -> None:
        self._session = database.engine.session()

    @property
    def connection(self) -> Any:
        """The connection of the transaction."""
        return self._session.connection

    def __enter__(self) -> PlainTransaction:
        self._session.begin(durable=False)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._session.commit()
        else:
            self._session.rollback()
