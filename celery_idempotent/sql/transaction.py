"""The transaction of an execution: claims its row, and commits it with the outcome.

`extensions.transaction` begins it before the body and commits it after. The rule: the row of a key
is inserted or updated first, so a second execution waits in the database until the first has ended.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

from celery_idempotent.errors import IdempotencyError, StoreUnavailableError, TransactionError
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.errors import is_transient
from celery_idempotent.sql.outcomes import (
    CLAIMED,
    Claim,
    OutcomeValues,
    Row,
    committed_without_outcome,
)

#: Maximum attempts to claim a row, if deadlocks or lost connections end the others.
CLAIM_ATTEMPTS = 8
#: Seconds between two attempts: the first pause, which doubles, and the longest.
MIN_PAUSE, MAX_PAUSE = 0.01, 1.0
#: How often in one attempt the row may vanish or change between the claim that it has prevented and
#: its reading.
MAX_RACES = 50

logger = logging.getLogger(__name__)

#: The phases of a transaction. COMMITTING: the commit was sent, and no reply to it has been
#: processed.
CLOSED, OPEN, COMMITTING, COMMITTED = "closed", "open", "committing", "committed"


class Transaction:
    """Claims the row of a key, and commits it together with the effects.

    Args:
        may_replace: returns whether the execution may run although the row has this outcome, and
            replace it. An expired row is always replaced.
    """

    def __init__(
        self, database: Database, may_replace: Callable[[Row], bool] = lambda row: False
    ) -> None:
        self.database = database
        self._may_replace = may_replace
        self._session = database.engine.session()
        self._statements = database.statements
        #: The messages to commit with the outcome; `extensions.outbox` sets them.
        self.outbox: bytes | None = None
        self.phase = CLOSED

    @property
    def connection(self) -> Any:
        """The connection of the open transaction."""
        if self.phase is not OPEN:
            raise TransactionError("there is no open transaction: it has ended")
        return self._session.connection

    @property
    def committed(self) -> bool:
        """Whether the outcome is in the database."""
        return self.phase is COMMITTED

    @property
    def on_commit(self) -> list[Callable[[], Any]]:
        """The functions that the body registered for the commit."""
        return self._session.on_commit if self.phase is OPEN else []

    def begin(self, claim: Claim) -> Row | None:
        """Begins the transaction and claims the row, waiting for a transaction that holds it.

        Returns:
            None if the row is claimed and the transaction open, else the row that was committed
            before. That may be a replaceable row whose messages are still unpublished, or one
            without an outcome.

        Raises:
            StoreUnavailableError: if the database is unavailable or has no table.
            TransactionError: if called inside a transaction of the caller.
        """
        self.outbox = None
        row = self._claim(claim)
        self.phase = OPEN if row is None else CLOSED
        return row

    def find(self, claim: Claim) -> Row | None:
        """Returns the row with its outcome, waiting for another transaction that holds it.

        The wait is limited.

        Raises:
            StoreUnavailableError: if the database is unavailable or has no table.
            TransactionError: if the row has no outcome, or inside a transaction of the caller.
        """
        row = self._claim(claim, resolving=True)
        self._session.rollback()
        return row and row.with_outcome()

    def _claim(self, claim: Claim, *, resolving: bool = False) -> Row | None:
        """As `_claim_row`, repeated after deadlocks and lost connections.

        Args:
            resolving: claim the row only to find out whether another transaction has committed it:
                the wait for that is limited, no row is replaced, and no body follows.
        """
        for attempt in range(CLAIM_ATTEMPTS):
            try:
                return self._claim_row(claim._asdict(), resolving=resolving)
            except IdempotencyError:
                self._session.rollback()
                raise
            except Exception as error:
                self._session.rollback()
                if attempt + 1 == CLAIM_ATTEMPTS or not is_transient(error):
                    raise self.database.unavailable(error) from error
            except BaseException:
                self._session.discard()
                raise
            time.sleep(random.uniform(0.5, 1.0) * min(MIN_PAUSE * 2**attempt, MAX_PAUSE))
        raise AssertionError  # the last attempt returns or raises

    def _claim_row(self, values: dict[str, Any], *, resolving: bool) -> Row | None:
        """Claims the row; returns it if it was committed before."""
        seen = ""
        for _ in range(MAX_RACES):
            if self._try_to_claim({**values, "seen": seen}, resolving=resolving):
                if not resolving:
                    self._session.begin_body()
                return None
            self._session.rollback()
            row, seen = self._find(values), ""
            if row is None:
                continue  # it was deleted meanwhile, or another message of the key has the turn
            stays = resolving or row.state == CLAIMED or row.outbox is not None
            if stays or not self._replaces(row):
                return row
            seen = row.owner
        raise committed_without_outcome()

    def _try_to_claim(self, values: dict[str, Any], *, resolving: bool) -> bool:
        """Returns whether the row was claimed; if not, the transaction must be rolled back."""
        self._session.begin()
        if resolving and self._statements.limit_wait:
            self._session.execute(self._statements.limit_wait, {})
        statement = self._statements.take_over if values["seen"] else self._statements.claim
        try:
            answer = self._session.execute(statement, values)
        except self.database.engine.integrity_error:
            return False
        return not values["seen"] or answer.changed == 1

    def _find(self, values: dict[str, Any]) -> Row | None:
        self._session.begin()
        rows = self._session.execute(self._statements.find, values).rows
        self._session.rollback()
        return Row.read(rows[0]) if rows else None

    def _replaces(self, row: Row) -> bool:
        return row.expired or self._may_replace(row)

    def commit(self, claim: Claim, outcome: OutcomeValues) -> Row | None:
        """Writes the outcome into the claimed row, and commits.

        The row's outbox takes the place of the `on_commit` functions, which are dropped.

        If the reply to the commit is lost, the row is claimed again: that waits for the lost
        transaction to end, and shows whether it was committed. The same happens if this is called
        again because a signal handler has raised an error in the first call.

        Returns:
            None if the outcome is committed, else the row of another execution.

        Raises:
            TransactionError: if the body has ended the transaction.
            StoreUnavailableError: if it is unknown whether it is committed.
            Exception: the driver's error; nothing is committed.
        """
        if self.phase is COMMITTED:
            return None
        error: BaseException | None = None
        if self.phase is not COMMITTING:
            if self.phase is not OPEN:
                raise self.database.has_ended()
            self.database.end_body(self._session)
            ended = {**outcome._asdict(), "state": outcome.state.value}
            values = {**ended, "id": claim.id, "owner": claim.owner}
            if self._session.execute(self._statements.finish, values).changed != 1:
                raise self.database.has_ended()
            self._session.drop_on_commit()
            self.phase = COMMITTING
            try:
                self._session.commit()
            except Exception as raised:
                error = raised
            else:
                self.phase = COMMITTED
                return None
        return self._resolve(claim, error)

    def _resolve(self, claim: Claim, error: BaseException | None) -> Row | None:
        """Determines whether the commit took effect; raises `error` if it did not."""
        self._session.discard()
        row = self.find(claim)
        if row is not None and row.owner == claim.owner:
            self.phase = COMMITTED
            if error is not None:
                logger.warning("%s is committed, but: %r", claim.record_key, error)
            return None
        self.phase = CLOSED
        if row is not None and not self._replaces(row):
            return row
        raise error or StoreUnavailableError(f"{claim.record_key}: the commit was interrupted")

    def rollback(self, *, discard: bool = False) -> None:
        """Rolls back what is not committed. Never raises.

        Args:
            discard: whether to also close the connection, because a signal handler may have
                interrupted a statement by an error, and its reply may still arrive.
        """
        if self.phase in (CLOSED, COMMITTED):
            return
        session, interrupted = self._session, discard or self.phase is COMMITTING
        self.phase = CLOSED
        (session.discard if interrupted else session.rollback)()
