"""Reads a store: its sweeps, cells, trials, attempts, nodes and links. It writes nothing."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection

from db import migrate
from db.connection import url
from db.connection.engine import Database
from db.read import (
    fingerprint_counts,
    nodes,
    observations,
    profiles,
    remarks,
    repeats,
    sweeps,
    trial_detail,
    trials,
)
from db.read.observations import ObservationRow
from db.read.rows import (
    BenchRow,
    CellRow,
    CellStatus,
    EndedEarlyRow,
    EventRow,
    FailedRepeatRow,
    FingerprintCounts,
    ImplausibleRow,
    LinkRow,
    NodeCheckRow,
    NoiseFloor,
    OtherClockRow,
    PeakRow,
    Repeats,
    ReservedBySweep,
    SessionRow,
    SweepRow,
    SweepSummary,
    TrialDetail,
    TrialRow,
    UnderWayRow,
)
from orchestrator.core.machines.node_run import NEWEST_RUNS, NodeRun
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint

_P = ParamSpec("_P")
_T = TypeVar("_T")


class StoreReads:
    """Open it with `Store.open`. Threads may share it. Any method may raise StoreUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(
        cls,
        database_url: str | None = None,
        *,
        patience_seconds: float | None = None,
        to_read: bool = False,
    ) -> Self:
        """Open the database of a URL, of SWEEP_DB, or .sweep/sweep.sqlite; make its tables if new.

        With `to_read` nothing is written, and the right to write is not needed.

        A call gives up when a database that was reached before has not answered for
        `patience_seconds` (None: a minute). Raises StoreUnavailable with one line if the database
        cannot be reached or written, or has another schema than this code.
        """
        database = Database(
            url.resolve(database_url), patience_seconds=patience_seconds, to_read=to_read
        )
        try:
            migrate.ensure_head(database, to_read=to_read)
        except BaseException:
            database.close()
            raise
        return cls(database)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def while_away(self, wait: Callable[[float], None]) -> None:
        """Call `wait` with seconds instead of sleeping, while the database is unavailable.

        What it raises ends the call.
        """
        self._database.wait = wait

    @property
    def url(self) -> str:
        """The address of the store for people, without password and query."""
        return url.display(self._database.url)

    @property
    def path(self) -> Path | None:
        """The file of a SQLite store; None for a server."""
        file = self._database.url.database
        return Path(file) if self._database.is_sqlite and file else None

    def _read(
        self, work: Callable[Concatenate[Connection, _P], _T], *args: _P.args, **named: _P.kwargs
    ) -> _T:
        return self._database.read(lambda connection: work(connection, *args, **named))

    # Sweeps, cells and trials.

    def sweeps(self) -> list[SweepRow]:
        """All sweeps, the newest first."""
        return self._read(sweeps.sweeps)

    def summaries(self) -> list[SweepSummary]:
        """All sweeps, the newest first, each with its numbers of trials and its best speeds."""
        return self._read(sweeps.summaries)

    def sweep_named(self, name: str) -> SweepRow:
        """Raises UsageInvalid, with the names that exist."""
        return self._read(sweeps.sweep_named, name)

    def newest_session(self, sweep_id: int) -> SessionRow | None:
        """The last `sweep run` that got the sweep; None: there was none, or it noted none."""
        return self._read(sweeps.newest_session, sweep_id)

    def cells(self, sweep_id: int) -> list[CellRow]:
        return self._read(sweeps.cells, sweep_id)

    def fingerprints(self, sweep_id: int) -> list[Fingerprint]:
        """The fingerprints under which a sweep was measured, oldest first."""
        return self._read(sweeps.fingerprints, sweep_id)

    def trials(self, sweep_id: int, cell_id: int | None = None) -> list[TrialRow]:
        """All trials of a sweep, or of one of its cells, oldest first."""
        return self._read(trials.trials, sweep_id, cell_id)

    def trial(self, trial_id: int) -> TrialDetail:
        """One trial with its attempts and events. Raises UsageInvalid if there is none."""
        return self._read(trial_detail.trial_detail, trial_id)

    def trial_details(self, sweep_id: int) -> list[TrialDetail]:
        """All trials of a sweep, each with its attempts and events, oldest first."""
        return self._read(trial_detail.trial_details, sweep_id)

    def sessions(self, sweep_id: int) -> list[SessionRow]:
        """Each `sweep run` that got the sweep, oldest first."""
        return self._read(sweeps.sessions, sweep_id)

    def trials_by_id(self, trial_ids: Sequence[int]) -> list[TrialRow]:
        """The trials of these ids, in their order."""
        return self._read(trials.trials_by_id, trial_ids) if trial_ids else []

    def best(self, sweep_id: int, top: int | None = 1) -> dict[int, list[TrialRow]]:
        """The fastest trials of each cell under its current fingerprint, the fastest first.

        `top`: how many of each cell; None: all that are measured.
        """
        return self._read(trials.best, sweep_id, top)

    def status(self, sweep_id: int) -> list[CellStatus]:
        """The number of trials in each state, and the best trial, of each cell."""
        return self._read(sweeps.status, sweep_id)

    def under_way(self, sweep_id: int) -> list[UnderWayRow]:
        """The attempts of a sweep that have not ended, oldest trial first."""
        return self._read(sweeps.under_way, sweep_id)

    def reserved(self, sweep_id: int) -> ReservedBySweep:
        """The GPU time that a sweep has reserved so far, and its uses."""
        return self._read(sweeps.reserved, sweep_id)

    def events(self, sweep_id: int, *, after_id: int = 0, limit: int = 1000) -> list[EventRow]:
        """The events of a sweep after an event id, oldest first."""
        return self._read(sweeps.events, sweep_id, after_id, limit)

    def newest_events(self, sweep_id: int, limit: int) -> list[EventRow]:
        """The last events of a sweep, newest first."""
        return self._read(sweeps.newest_events, sweep_id, limit)

    def events_of_kinds(
        self, sweep_id: int, kinds: Sequence[str], *, after_id: int = 0
    ) -> list[EventRow]:
        """The events of these kinds after an event id, oldest first."""
        return self._read(sweeps.events_of_kinds, sweep_id, after_id, kinds)

    def newest_event_id(self, sweep_id: int) -> int:
        """The id of a sweep's last event; 0: it has none."""
        return self._read(sweeps.newest_event_id, sweep_id)

    # Attempts and what they measured.

    def repeated_cells(self, sweep_id: int | None = None) -> dict[int, frozenset[int]]:
        """The cells with a repeated trial, by sweep id: of all sweeps, or of one."""
        return self._read(trials.repeated_cells, sweep_id)

    def repeats(self, cell_id: int) -> dict[int, Repeats]:
        """The repeats of each measured trial of a cell that was launched again, by trial id."""
        return self._read(repeats.repeats, cell_id)

    def nodes_of_ended_early(self, cell_id: int) -> dict[int, frozenset[str]]:
        """The waiting trials of a cell whose last attempt was ended early, and its nodes."""
        return self._read(trials.nodes_of_ended_early, cell_id)

    def trials_that_met(self, cell_id: int, kind: FailureKind) -> set[int]:
        """The trials of a cell with a failure of this kind since their last invalidation."""
        return self._read(trials.trials_that_met, cell_id, kind)

    def reused_by(self, sweep_name: str) -> frozenset[int]:
        """The trials of other sweeps whose measurements a sweep has taken over."""
        return self._read(trials.reused_by, sweep_name)

    def reusers(self, sweep_id: int) -> dict[str, int]:
        """Count the trials that other sweeps have taken over from a sweep, by their names."""
        return self._read(trials.reusers, sweep_id)

    def attempt_spans(self, cell_id: int) -> dict[int, tuple[dt.datetime, dt.datetime]]:
        """Start of the first and end of the last ended attempt, by trial id of a cell."""
        return self._read(trials.attempt_spans, cell_id)

    def failure_counts(self, trial_ids: Sequence[int]) -> dict[int, Counter[FailureKind]]:
        """The number of failed attempts of each trial, by kind, since its last invalidation."""
        return self._read(trials.failure_counts, trial_ids) if trial_ids else {}

    def out_of_memories(
        self, cell_id: int, *, trial_id: int | None = None
    ) -> dict[int, list[Failure]]:
        """The out-of-memories of each trial of a cell, or of one, since its last invalidation."""
        return self._read(trials.out_of_memories, cell_id, trial_id)

    def measured_peaks(self, sweep_id: int) -> list[PeakRow]:
        """The measured peaks that MFUs of a sweep use, each once."""
        return self._read(trials.measured_peaks, sweep_id)

    def observations(
        self,
        *,
        workload: str | None = None,
        is_relative: Callable[[Mapping[str, Any]], bool] | None = None,
        is_device: Callable[[str, Sequence[str]], bool] | None = None,
        sweep: str | None = None,
    ) -> list[ObservationRow]:
        """The measurements and out-of-memories of all sweeps, or of one.

        The newest few thousand, spread evenly over the trials of large cells.
        """
        return self._read(
            observations.observations,
            workload=workload,
            is_relative=is_relative,
            is_device=is_device,
            sweep_name=sweep,
        )

    def profiled_trials(self, sweep_id: int) -> frozenset[int]:
        """The trials of a sweep that have a profile that ended by itself, well or not."""
        return self._read(profiles.profiled_trials, sweep_id)

    # Remarks below a ranking or a status.

    def implausible(self, sweep_id: int) -> list[ImplausibleRow]:
        """The trials of a sweep whose numbers cannot be true, oldest first."""
        return self._read(remarks.implausible, sweep_id)

    def ended_early(self, sweep_id: int) -> list[EndedEarlyRow]:
        """The trials of a sweep that were ended before their last timed step, oldest first."""
        return self._read(remarks.ended_early, sweep_id)

    def failed_repeats(self, trial_ids: Collection[int]) -> list[FailedRepeatRow]:
        """The failed repeats of measured trials, oldest trial first."""
        return self._read(repeats.failed_repeats, trial_ids)

    def other_clocks(self, sweep_id: int, *, beyond: float) -> list[OtherClockRow]:
        """The runs whose GPUs had another clock than usual in their cell, by more than `beyond`."""
        return self._read(remarks.other_clocks, sweep_id, beyond)

    def best_of_other_fingerprints(self, sweep_id: int) -> list[TrialRow]:
        """The fastest trial of each cell and old fingerprint, by cell, the fastest first."""
        return self._read(remarks.best_of_other_fingerprints, sweep_id)

    def fingerprint_counts(self, sweep_id: int) -> list[FingerprintCounts]:
        """Count the measured trials of each cell by fingerprint, and the repeats kept apart."""
        return self._read(fingerprint_counts.fingerprint_counts, sweep_id)

    def noise_floors(self, sweep_id: int) -> dict[int, NoiseFloor]:
        """Return the noise floor of each cell that has repeats, by cell id."""
        return self._read(remarks.noise_floors, sweep_id)

    def num_with_longer_steps(self, sweep_id: int) -> int:
        """Count measured attempts that report more seconds of steps than they reserved GPUs for."""
        return self._read(remarks.num_with_longer_steps, sweep_id)

    # Nodes and links.

    def node_checks(self, sweep_id: int) -> dict[str, NodeCheckRow]:
        """The last check of each node of a sweep."""
        return self._read(nodes.newest_checks, sweep_id)

    def node_runs(self, sweep_id: int) -> list[NodeRun]:
        """The newest measurements of a sweep that count, oldest first, with their nodes."""
        return self._read(nodes.runs, sweep_id, NEWEST_RUNS)

    def node_faults(self, sweep_id: int) -> dict[str, int]:
        """The number of attempts of a sweep that failed by the machine's fault, by node."""
        return self._read(nodes.faults, sweep_id)

    def benches(self, sweep_id: int) -> list[BenchRow]:
        """The benches of the nodes of a sweep, the oldest first, ended ones included."""
        return self._read(nodes.benches, sweep_id)

    def links(self, run_token: str | None = None) -> list[LinkRow]:
        """The measurements of links by one `sweep netbench`, or by all, oldest first."""
        return self._read(nodes.links, run_token)
