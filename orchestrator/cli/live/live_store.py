"""The store of a screen or page: opened when it can be, read again, and opened anew when back.

It belongs to the thread that reads.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.store.heartbeats import phase_and_step
from orchestrator.core.errors import StoreUnavailable, SweepError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from db.read.rows import TrialDetail
    from db.store import Store
    from orchestrator.report.live_sweep import LiveRows, LiveSweep
    from orchestrator.report.sweep_status import PhaseAndStep

# A screen says at once that the store is away, and tries again itself.
PATIENCE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The result of one reading."""

    rows: LiveRows
    progress: Mapping[int, PhaseAndStep]  # by trial
    at: datetime
    # The seconds that it took, without opening the store.
    seconds: float


class LiveStore:
    """Reads one sweep of a store. Each method may raise SweepError."""

    def __init__(self, db: str | None, sweep: str) -> None:
        self._db, self._sweep = db, sweep
        self._opened: tuple[Store, LiveSweep] | None = None
        self._file: tuple[int, int] | None = None  # of a SQLite store

    def read(self) -> Reading:
        """Read the sweep and the heartbeats of what runs on this machine."""
        try:
            sweep = self._open()
            began = time.monotonic()
            rows = sweep.read(began)
        except SweepError:
            self.close()
            raise
        row = rows.status.row
        progress = {one.trial_id: phase_and_step(row, one) for one in rows.status.running}
        return Reading(
            rows=rows,
            progress=progress,
            at=datetime.now(tz=UTC),
            seconds=time.monotonic() - began,
        )

    def trial(self, trial_id: int) -> TrialDetail:
        """Read all that is known of a trial, as `sweep show`. For any thread."""
        from orchestrator.cli.store.defaults import existing_store

        with existing_store(self._db) as store:
            return store.trial(trial_id)

    def close(self) -> None:
        """Close the store; the next reading opens it again."""
        if self._opened is not None:
            store, self._opened = self._opened[0], None
            with suppress(SweepError):
                store.close()

    def _open(self) -> LiveSweep:
        from db.connection import url
        from db.store import Store
        from orchestrator.report.live_sweep import LiveSweep

        resolved = url.resolve(self._db)
        if resolved.drivername == "sqlite":
            # An open file can still be read after it was removed or replaced.
            file = _identity(Path(str(resolved.database)))
            if file != self._file:
                self.close()
            self._file = file
        if self._opened is None:
            store = Store.open(self._db, patience_seconds=PATIENCE_SECONDS, to_read=True)
            self._opened = store, LiveSweep(store, self._sweep)
        return self._opened[1]


def _identity(path: Path) -> tuple[int, int]:
    """Return the identity of a file, which differs if another one has its name.

    Raises StoreUnavailable.
    """
    try:
        found = path.stat()
    except OSError as exc:
        raise StoreUnavailable(f"the store {path} cannot be read: {exc.strerror}") from None
    return found.st_dev, found.st_ino
