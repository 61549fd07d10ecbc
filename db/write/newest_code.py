"""Tells which of two codes measured a cell last, by the attempts that began last with them."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.read import records
from db.types import AttemptState
from db.write.software import Completed
from orchestrator.core.trial.fingerprint import Fingerprint

_attempt, _trial = schema.attempt, schema.trial


class NewestCode:
    """Compares codes within one write. Reads each cell and each fingerprint at most once.

    Ids of attempts grow with the time when they began. `completed`: what stored fingerprints become
    by this write.
    """

    def __init__(self, connection: Connection, completed: Completed) -> None:
        self._connection, self._completed = connection, completed
        self._fingerprints: dict[str, Fingerprint] = {}
        # By cell and digest: the last stored attempt, and the last one of this write.
        self._stored: dict[tuple[int, str], int] = {}
        self._written: dict[tuple[int, str], int] = {}

    def note(self, cell_id: int, digest: str | None, attempt_id: int) -> None:
        """Note that this write measures an attempt of a cell with a fingerprint."""
        if digest is not None:
            key = cell_id, digest
            self._written[key] = max(attempt_id, self._written.get(key, 0))

    def began_last(
        self, cell_id: int, of_cell: str, attempt_id: int, fingerprint: Fingerprint
    ) -> bool:
        """Return whether no attempt with the code of the cell began after this one.

        True, too, if its fingerprint has the code of the cell. `of_cell`: the digest of the cell.
        """
        if self._fingerprint(of_cell).has_code_of(fingerprint):
            return True
        key = cell_id, of_cell
        return attempt_id > max(self._newest_stored(key), self._written.get(key, 0))

    def _fingerprint(self, digest: str) -> Fingerprint:
        if digest not in self._fingerprints:
            row = self._connection.execute(
                sa.select(schema.fingerprint).where(schema.fingerprint.c.digest == digest)
            )
            self._fingerprints[digest] = records.fingerprint_of(row.mappings().one())
        return self._fingerprints[digest]

    def _newest_stored(self, key: tuple[int, str]) -> int:
        if key not in self._stored:
            cell_id, digest = key
            # Superseded runs count, too: whatever became of their numbers, the code was there then.
            # Stored attempts get their whole fingerprint only after all ends are judged.
            parts = [part for part, whole in self._completed.replaced.items() if whole == digest]
            statement = (
                sa.select(sa.func.max(_attempt.c.id))
                .join(_trial, _trial.c.id == _attempt.c.trial_id)
                .where(
                    _trial.c.cell_id == cell_id,
                    _attempt.c.state == AttemptState.MEASURED,
                    _attempt.c.fingerprint_digest.in_([digest, *parts]),
                )
            )
            self._stored[key] = self._connection.scalar(statement) or 0
        return self._stored[key]
