"""The transaction of a batch: claims the rows of many keys, and commits all their outcomes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from celery_idempotent.errors import TransactionError
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.outcomes import Claim, Ended, Row, committed_without_outcome
from celery_idempotent.sql.transaction import (
    CLOSED,
    COMMITTED,
    COMMITTING,
    MAX_RACES,
    OPEN,
    claim_repeatedly,
    ended_by_body,
)

logger = logging.getLogger(__name__)

#: What a row that was committed before holds, or that it has no outcome.
Found = Row | TransactionError


class BatchTransaction:
    """Claims the row of each key that is to run, and commits the effects of all together."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._session = database.engine.session()
        self._statements = database.statements
        #: The claims, and the values of their rows.
        self._claimed: list[tuple[Claim, dict[str, Any]]] = []
        self.phase = CLOSED

    @property
    def connection(self) -> Any:
        """The connection of the open transaction."""
        if self.phase is not OPEN:
            raise TransactionError("the batch has no open transaction: no key is to run any more")
        return self._session.connection

    @property
    def on_commit(self) -> list[Callable[[], Any]]:
        """The functions that the body has registered for the commit."""
        return self._session.on_commit if self.phase is OPEN else []

    def owner(self, claim: Claim) -> str:
        """The random id of the row of `claim`."""
        owners = {values["id"]: str(values["owner"]) for _, values in self._claimed}
        return owners[claim.id]

    def begin(self, claims: Sequence[Claim]) -> list[Found | None]:
        """Begins the transaction and claims the rows, after the end of others that have them.

        Returns:
            For each claim None if its row is claimed, else what was committed before: also an
            expired row, if its messages are still to be published. The transaction is open if a
            row is claimed.

        Raises:
            As :meth:`Transaction.begin`.
        """
        values = [(claim, claim.values) for claim in claims]
        # In one order, so that two batches never wait for each other.
        ordered = sorted(values, key=lambda each: each[1]["turn"] or each[1]["id"])
        work = partial(self._claim_rows, [each for _, each in ordered])
        found = claim_repeatedly(self.database, self._session, work)
        self._claimed = [each for each in values if each[1]["id"] not in found]
        if self._claimed:
            self.phase = OPEN
        return [found.get(each["id"]) for _, each in values]

    def _claim_rows(self, pending: Sequence[dict[str, Any]]) -> dict[str, Found]:
        """Returns what was committed before, by the id of the row; claims all others."""
        found: dict[str, Found] = {}
        expired: dict[str, str] = {}
        for _ in range(MAX_RACES + len(pending)):
            if not pending or self._claim_all(pending, expired):
                return found
            self._session.rollback()
            rows = self._find_all(pending)
            expired = {
                row_id: row.owner
                for row_id, row in rows.items()
                if isinstance(row, Row) and row.expired and row.outbox is None
            }
            found |= {row_id: row for row_id, row in rows.items() if row_id not in expired}
            pending = [values for values in pending if values["id"] not in found]
        raise committed_without_outcome()

    def _claim_all(self, pending: Sequence[dict[str, Any]], expired: Mapping[str, str]) -> bool:
        """Returns whether all rows are claimed; if not, nothing of the transaction counts."""
        self._session.begin()
        for values in pending:
            seen = expired.get(values["id"])
            if seen is None:
                try:
                    self._session.execute(self._statements.claim, values)
                except self.database.engine.integrity_error:
                    return False
                continue
            taken = {name: value for name, value in values.items() if name != "record_key"}
            answer = self._session.execute(self._statements.take_over, {**taken, "seen": seen})
            if answer.changed != 1:
                return False
        return True

    def _find_all(self, pending: Sequence[dict[str, Any]]) -> dict[str, Found]:
        rows: dict[str, Found] = {}
        self._session.begin()
        for values in pending:
            answer = self._session.execute(self._statements.find, {"id": values["id"]})
            for row in answer.rows:
                try:
                    rows[values["id"]] = Row.read(row)
                except TransactionError as error:
                    rows[values["id"]] = error
        self._session.rollback()
        return rows

    def commit(self, outcomes: Mapping[str, Ended]) -> None:
        """Writes the outcomes, removes the rows of all other keys, and commits.

        An outbox replaces `on_commit`.

        If the reply to the commit is lost, a row is claimed again, which shows whether it was
        committed.

        Args:
            outcomes: by the key.

        Raises:
            TransactionError: if the body has ended the transaction.
            StoreUnavailableError: if it cannot be determined whether they are committed.
            Exception: of the driver; nothing is committed.
        """
        for claim, values in self._claimed:
            if self.phase is not OPEN or not self._session.active:
                raise ended_by_body(claim.key)
            self._end(claim, values, outcomes.get(str(claim.key)))
        self._session.drop_on_commit()
        self.phase = COMMITTING
        try:
            self._session.commit()
        except Exception as error:
            self._resolve(error, outcomes)
        self.phase = COMMITTED

    def _end(self, claim: Claim, values: Mapping[str, Any], ended: Ended | None) -> None:
        row = {"id": values["id"], "owner": values["owner"]}
        if ended is None:
            answer = self._session.execute(self._statements.forget_shown, row)
        else:
            row |= {**ended._asdict(), "state": ended.state.value}
            answer = self._session.execute(self._statements.finish, row)
        if answer.changed != 1:
            raise ended_by_body(claim.key)

    def _resolve(self, error: Exception, outcomes: Mapping[str, Ended]) -> None:
        """Raises `error` unless the commit took effect; any of the rows shows it for all."""
        self._session.discard()
        claim, values = next(each for each in self._claimed if str(each[0].key) in outcomes)
        row = self.database.transaction(claim, lambda row: False).find()
        if row is None or row.owner != values["owner"]:
            raise error
        logger.warning("%s and its batch are committed, but: %r", claim.key, error)

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
