"""The transaction of one or more executions: claims their rows, commits them with outcomes."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
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

#: Attempts to claim after deadlocks or lost connections, and the pauses between them in seconds.
CLAIM_ATTEMPTS = 8
MIN_PAUSE, MAX_PAUSE = 0.01, 1.0
#: How often other executions may remove or take over rows before they are claimed.
MAX_RACES = 50

logger = logging.getLogger(__name__)

CLOSED, OPEN, COMMITTING, COMMITTED = "closed", "open", "committing", "committed"


class Transaction:
    """Claims the row of each key to run, and commits the rows together with the effects.

    Args:
        may_replace: returns whether an execution may run although its row has this outcome. An
            expired row is always replaced.
    """

    def __init__(
        self, database: Database, may_replace: Callable[[Row], bool] = lambda row: False
    ) -> None:
        self.database = database
        self._may_replace = may_replace
        self._session = database.engine.session()
        self._statements = database.statements
        self._claimed: Sequence[Claim] = ()
        #: The messages to commit with the outcome.
        self.outbox: bytes | None = None
        self.phase = CLOSED

    @property
    def connection(self) -> Any:
        """The connection of the open transaction."""
        if self.phase is not OPEN:
            raise TransactionError(
                "there is no open transaction: it has ended, or no key is left to run"
            )
        return self._session.connection

    @property
    def committed(self) -> bool:
        """Whether the outcomes are in the database."""
        return self.phase is COMMITTED

    @property
    def on_commit(self) -> list[Callable[[], Any]]:
        """The functions that the body registered for the commit."""
        return self._session.on_commit if self.phase is OPEN else []

    def begin(self, claims: Sequence[Claim]) -> list[Row | None]:
        """Begins the transaction and claims the rows, waiting for transactions that hold them.

        Returns:
            For each claim, None if its row is claimed, else the row that was committed before. That
            may be a replaceable row whose messages are still unpublished, or one without an
            outcome. The transaction is open if a row is claimed.

        Raises:
            StoreUnavailableError: if the database is unavailable or has no table.
            TransactionError: if called inside a transaction of the caller.
        """
        self.outbox = None
        found = self._claim(claims)
        self.phase = OPEN if len(found) < len(claims) else CLOSED
        self._claimed = [claim for claim in claims if claim.id not in found]
        return [found.get(claim.id) for claim in claims]

    def find(self, claim: Claim) -> Row | None:
        """Returns the row with its outcome, waiting for another transaction that holds it.

        The wait is limited.

        Raises:
            StoreUnavailableError: if the database is unavailable or has no table.
            TransactionError: if the row has no outcome, or inside a transaction of the caller.
        """
        found = self._claim([claim], resolving=True)
        self._session.rollback()
        row = found.get(claim.id)
        return row and row.with_outcome()

    def _claim(self, claims: Sequence[Claim], *, resolving: bool = False) -> dict[str, Row]:
        """As `_claim_rows`, repeated after deadlocks and lost connections."""
        # In a fixed order, so that two batches never wait for each other.
        values = [claim._asdict() for claim in claims]
        values.sort(key=lambda each: str(each["turn"] or each["id"]))
        for attempt in range(CLAIM_ATTEMPTS):
            try:
                return self._claim_rows(values, resolving=resolving)
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

    def _claim_rows(self, pending: Sequence[dict[str, Any]], *, resolving: bool) -> dict[str, Row]:
        """Claims the rows; returns those committed before, by row id."""
        found: dict[str, Row] = {}
        replaced: dict[str, str] = {}
        for _ in range(MAX_RACES + len(pending)):
            if not pending:
                return found
            if self._claim_all(pending, replaced, resolving=resolving):
                if not resolving:
                    self._session.begin_body()
                return found
            self._session.rollback()
            replaced = {}
            for row in self._find_all(pending):
                stays = resolving or row.state == CLAIMED or row.outbox is not None
                if stays or not self._replaces(row):
                    found[row.id] = row
                else:
                    replaced[row.id] = row.owner
            pending = [values for values in pending if values["id"] not in found]
        raise committed_without_outcome()

    def _claim_all(
        self, pending: Sequence[dict[str, Any]], replaced: Mapping[str, str], *, resolving: bool
    ) -> bool:
        """Returns whether all rows were claimed; if not, the transaction must be rolled back."""
        self._session.begin()
        if resolving and self._statements.limit_wait:
            self._session.execute(self._statements.limit_wait, {})
        for values in pending:
            seen = replaced.get(values["id"])
            statement = self._statements.take_over if seen else self._statements.claim
            try:
                answer = self._session.execute(statement, {**values, "seen": seen})
            except self.database.engine.integrity_error:
                return False
            if seen and answer.changed != 1:
                return False
        return True

    def _find_all(self, pending: Sequence[dict[str, Any]]) -> list[Row]:
        self._session.begin()
        answers = [self._session.execute(self._statements.find, values) for values in pending]
        self._session.rollback()
        return [Row.read(row) for answer in answers for row in answer.rows]

    def _replaces(self, row: Row) -> bool:
        return row.expired or self._may_replace(row)

    def commit(self, outcomes: Mapping[Claim, OutcomeValues]) -> Row | None:
        """Writes the outcomes, deletes the claimed rows that have none, and commits.

        Outboxes replace the `on_commit` functions.

        If the reply to the commit is lost, a row is claimed again. That waits for the lost
        transaction to end, and shows whether it was committed. A repeated call, after a signal
        handler raised in the first, does the same.

        Returns:
            None if the outcomes are committed, else the row of another execution.

        Raises:
            TransactionError: if the body has ended the transaction.
            StoreUnavailableError: if it is unknown whether they are committed.
            Exception: the driver's error; nothing is committed.
        """
        if self.phase is COMMITTED:
            return None
        error: BaseException | None = None
        if self.phase is not COMMITTING:
            if self.phase is not OPEN:
                raise self.database.has_ended()
            self.database.end_body(self._session)
            for claim in self._claimed:
                self._finish(claim, outcomes.get(claim))
            self._session.drop_on_commit()
            self.phase = COMMITTING
            try:
                self._session.commit()
            except Exception as raised:
                error = raised
            else:
                self.phase = COMMITTED
                return None
        # The rows are committed together, so any one is enough.
        return self._resolve(next(iter(outcomes)), error)

    def _finish(self, claim: Claim, ended: OutcomeValues | None) -> None:
        values: dict[str, Any] = {"id": claim.id, "owner": claim.owner}
        statement = self._statements.forget_shown
        if ended is not None:
            values |= {**ended._asdict(), "state": ended.state.value}
            statement = self._statements.finish
        if self._session.execute(statement, values).changed != 1:
            raise self.database.has_ended()

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
            discard: whether to also close the connection, because an asynchronous error may have
                interrupted a statement.
        """
        if self.phase in (CLOSED, COMMITTED):
            return
        session, interrupted = self._session, discard or self.phase is COMMITTING
        self.phase = CLOSED
        (session.discard if interrupted else session.rollback)()
