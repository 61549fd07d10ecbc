"""Brings trackers up to date with a sweep: pass by pass, each of what a tracker lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from orchestrator.report.mirrors.tracker_run import TrackerRun, runs_of

if TYPE_CHECKING:
    from db.read.rows import SweepRow
    from db.store_reads import StoreReads


class Mirror(Protocol):
    """A tracker that takes runs. It may raise anything."""

    name: str

    def known(self) -> dict[str, str]:
        """Return the version of each run that the tracker has, by its key."""

    def write(self, run: TrackerRun) -> None:
        """Create a run, or bring it up to date."""

    def close(self) -> None:
        """Release what the tracker holds."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The result of one pass for one tracker."""

    tracker: str
    num_written: int
    num_left: int
    # Why runs are left, without secrets; None: none is.
    why: str | None = None


def read_runs(store: StoreReads, sweep: SweepRow) -> list[TrackerRun]:
    """Read the trials of a sweep that have ended."""
    cells = store.cells(sweep.id)
    spans = {
        trial_id: span for cell in cells for trial_id, span in store.attempt_spans(cell.id).items()
    }
    return runs_of(sweep, cells, store.trials(sweep.id), spans)


class Mirroring:
    """One tracker, what it has, and how to reach it."""

    def __init__(
        self, name: str, opened: Callable[[], Mirror], redact: Callable[[str], str]
    ) -> None:
        """`opened` connects to the tracker; it is called again until it succeeds."""
        self.name, self._opened, self._redact = name, opened, redact
        self._mirror: Mirror | None = None
        self._known: dict[str, str] | None = None

    def catch_up(
        self, runs: Sequence[TrackerRun], is_late: Callable[[], bool] = lambda: False
    ) -> Pass:
        """Write what the tracker lacks, until it refuses or `is_late` says so."""
        num = 0
        try:
            if self._mirror is None:
                self._mirror = self._opened()
            if self._known is None:
                self._known = self._mirror.known()
            lacking = [run for run in runs if self._known.get(run.key) != run.version]
            for run in lacking:
                if is_late():
                    left = len(lacking) - num
                    return Pass(
                        tracker=self.name, num_written=num, num_left=left, why="no time was left"
                    )
                self._mirror.write(run)
                self._known[run.key] = run.version
                num += 1
        # A tracker may raise anything, and hurts no sweep.
        except Exception as exc:  # noqa: BLE001
            known = self._known or {}
            left = sum(known.get(run.key) != run.version for run in runs)
            # A tracker that was lost may have lost runs too: they are asked for again.
            self._known = None
            text = self._redact(f"{type(exc).__name__}: {exc}".splitlines()[0])[:300]
            return Pass(tracker=self.name, num_written=num, num_left=left, why=text)
        return Pass(tracker=self.name, num_written=num, num_left=0)

    def close(self) -> None:
        """Release what the tracker holds; errors are ignored."""
        if self._mirror is not None:
            try:
                self._mirror.close()
            # A tracker may raise anything, and no run is lost if it does so here.
            except Exception:  # noqa: BLE001
                pass
