"""Judges a store by a log: nothing acknowledged is lost, counted twice or stuck.

The log is a file, with a line for each launch and each acknowledged end; the judge reads tables,
not the store's own answers.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from db import schema
from db.store import Store
from db.types import AttemptState
from orchestrator.core.trial.lifecycle import (
    INITIAL,
    UNDER_WAY,
    IllegalTransition,
    LogEvent,
    TrialEvent,
    TrialState,
    advance,
)

BEGUN = (TrialEvent.GANG_PLACED, TrialEvent.REPEATED)  # one attempt each
STANDING_STILL = (LogEvent.SUPERSEDED, LogEvent.REPEAT_FAILED)  # entries that change no state


class Seen(StrEnum):
    LAUNCHED = "launched"
    MEASURED = "measured"  # acknowledged, and it counts
    ENDED = "ended"  # at its end, without a number


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    seen: Seen
    trial_id: int
    attempt: int
    value: float | None = None  # tokens/s/GPU that were acknowledged
    at: float = 0.0  # unix seconds


class Log:
    """Lines that survive whoever writes them: one write() each, to a file opened for appending."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, seen: Seen, trial_id: int, attempt: int, value: float | None = None) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(
                file, json.dumps([seen, trial_id, attempt, value, time.time()]).encode() + b"\n"
            )
        finally:
            os.close(file)

    def entries(self) -> list[Entry]:
        if not self.path.exists():
            return []
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [
            Entry(seen=Seen(seen), trial_id=trial, attempt=attempt, value=value, at=at)
            for seen, trial, attempt, value, at in rows
        ]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Complaints by kind, each a sentence; none of any kind where all is well."""

    acknowledged: int
    max_attempts: int
    lost: Sequence[str]
    duplicated: Sequence[str]
    stuck: Sequence[str]
    broken: Sequence[str]  # events that contradict the rows

    @property
    def complaints(self) -> list[str]:
        kinds = [
            field.name for field in fields(self) if isinstance(getattr(self, field.name), Sequence)
        ]
        return [f"{kind}: {text}" for kind in kinds for text in getattr(self, kind)]


def judge(
    store: Store, sweep: str, entries: Sequence[Entry], *, num_trials: int | None = None
) -> Verdict:
    """Compare the log with the store. `num_trials`: how many must be at their end."""
    rows = _read(store, sweep)
    return Verdict(
        acknowledged=sum(entry.seen is not Seen.LAUNCHED for entry in entries),
        max_attempts=max((trial.num_attempts for trial in rows.trials.values()), default=0),
        lost=_lost(rows, entries),
        duplicated=_duplicated(rows, entries),
        stuck=_stuck(rows, num_trials),
        broken=_broken(rows, entries),
    )


@dataclass(frozen=True, kw_only=True)
class _Rows:
    trials: Mapping[int, Any]
    attempts: Mapping[tuple[int, int], Any]
    events: Mapping[int, list[Any]]
    sessions: Sequence[Any]  # the oldest first
    checks: Sequence[Any]  # of nodes, by the sweep's orchestrators
    faulty: frozenset[str]  # whose measurements no longer count

    def is_taken_out(self, trial_id: int, number: int) -> bool:
        """True if an attempt does not count since one of its nodes is faulty."""
        row = self.attempts.get((trial_id, number))
        return row is not None and row.superseded and not self.faulty.isdisjoint(row.nodes or ())


def _read(store: Store, sweep: str) -> _Rows:
    found = store._database.read(lambda connection: _select(connection, sweep))
    by_trial: dict[int, list[Any]] = defaultdict(list)
    for row in found["events"]:
        by_trial[row.trial_id].append(row)
    return _Rows(
        trials={row.id: row for row in found["trials"]},
        attempts={(row.trial_id, row.number): row for row in found["attempts"]},
        events=by_trial,
        sessions=found["sessions"],
        checks=found["checks"],
        faulty=frozenset(row.node for row in found["faulty"]),
    )


def _select(connection: sa.Connection, sweep: str) -> dict[str, Sequence[Any]]:
    """The rows of a sweep, of one moment."""
    trial, attempt, measurement, event = (
        schema.trial,
        schema.attempt,
        schema.measurement,
        schema.event,
    )
    session, check, bench = schema.session, schema.node_check, schema.node_bench
    sweep_id = connection.execute(
        sa.select(schema.sweep.c.id).where(schema.sweep.c.name == sweep)
    ).scalar_one()
    with_number = (
        sa.select(attempt, measurement.c.tokens_per_second_per_gpu)
        .join(trial, trial.c.id == attempt.c.trial_id)
        .outerjoin(measurement, measurement.c.attempt_id == attempt.c.id)
    )
    queries = {
        "trials": sa.select(trial).where(trial.c.sweep_id == sweep_id),
        "attempts": with_number.where(trial.c.sweep_id == sweep_id),
        "events": sa.select(event).where(event.c.sweep_id == sweep_id).order_by(event.c.id),
        "sessions": sa.select(session)
        .where(session.c.sweep_id == sweep_id)
        .order_by(session.c.epoch),
        "checks": sa.select(check).where(check.c.sweep_id == sweep_id).order_by(check.c.id),
        "faulty": sa.select(bench.c.node).where(
            bench.c.sweep_id == sweep_id, bench.c.is_remeasured
        ),
    }
    return {name: connection.execute(query).fetchall() for name, query in queries.items()}


def _lost(rows: _Rows, entries: Sequence[Entry]) -> list[str]:
    found = []
    for entry in entries:
        name = f"trial {entry.trial_id} attempt {entry.attempt}"
        attempt, trial = (
            rows.attempts.get((entry.trial_id, entry.attempt)),
            rows.trials.get(entry.trial_id),
        )
        if entry.seen is Seen.LAUNCHED or trial is None or attempt is None:
            if entry.seen is not Seen.LAUNCHED:
                found.append(f"{name} was acknowledged and is not there")
        elif rows.is_taken_out(entry.trial_id, entry.attempt):
            continue
        elif entry.seen is Seen.MEASURED:
            if (
                trial.state != TrialState.MEASURED
                or attempt.state != AttemptState.MEASURED
                or not attempt.pooled
            ):
                found.append(
                    f"{name} was measured, and is {attempt.state} of a trial that is {trial.state}"
                )
            elif attempt.tokens_per_second_per_gpu != entry.value:
                found.append(
                    f"{name} was measured at {entry.value}, and says "
                    f"{attempt.tokens_per_second_per_gpu}"
                )
        elif trial.state in {INITIAL, *UNDER_WAY}:
            found.append(f"{name} was at its end, and its trial is {trial.state}")
    return found


def _duplicated(rows: _Rows, entries: Sequence[Entry]) -> list[str]:
    found = []
    launches = Counter(
        (entry.trial_id, entry.attempt) for entry in entries if entry.seen is Seen.LAUNCHED
    )
    found += [
        f"trial {trial} attempt {number} was launched {times} times"
        for (trial, number), times in launches.items()
        if times > 1
    ]
    places = Counter((trial.cell_id, trial.layout_key) for trial in rows.trials.values())
    found += [
        f"layout {key} of cell {cell} has {times} trials"
        for (cell, key), times in places.items()
        if times > 1
    ]
    counting = Counter(
        trial
        for (trial, _), row in rows.attempts.items()
        if row.state == AttemptState.MEASURED and not row.superseded
    )
    found += [
        f"trial {trial} has {times} attempts that count"
        for trial, times in counting.items()
        if times > 1
    ]
    ends: dict[int, int] = {}
    for entry in entries:
        if entry.seen is not Seen.LAUNCHED and not rows.is_taken_out(entry.trial_id, entry.attempt):
            ends.setdefault(entry.trial_id, entry.attempt)
    begun_again = Counter(
        trial
        for trial, number in ends.items()
        for row in rows.events[trial]
        if row.event == TrialEvent.GANG_PLACED and (row.attempt or 0) > number
    )
    found += [
        f"trial {trial} was at its end, and was run again {times} times"
        for trial, times in begun_again.items()
    ]
    measured = Counter(
        row.trial_id
        for of in rows.events.values()
        for row in of
        if row.event == TrialEvent.MEASURED
        and row.from_state != row.to_state
        and not rows.is_taken_out(row.trial_id, row.attempt)
    )
    found += [
        f"trial {trial} was measured for the first time {times} times"
        for trial, times in measured.items()
        if times > 1
    ]
    return found


def _stuck(rows: _Rows, num_trials: int | None) -> list[str]:
    over = num_trials is not None
    never = {INITIAL, *UNDER_WAY} if over else UNDER_WAY
    found = [
        f"trial {trial.id} is {trial.state}"
        for trial in rows.trials.values()
        if trial.state in never
    ]
    found += [
        f"trial {trial} attempt {number} runs"
        for (trial, number), row in rows.attempts.items()
        if row.state == AttemptState.RUNNING
    ]
    if over and len(rows.trials) != num_trials:
        found.append(f"there are {len(rows.trials)} trials, of {num_trials}")
    return found


def _broken(rows: _Rows, entries: Sequence[Entry]) -> list[str]:
    found = []
    for trial in rows.trials.values():
        state, begun, trouble = _fold(rows.events[trial.id])
        if trouble is None and (state, begun) != (trial.state, trial.num_attempts):
            trouble = (
                f"its events lead to {state} after {begun} attempts, its row says "
                f"{trial.state} after {trial.num_attempts}"
            )
        numbers = sorted(number for of, number in rows.attempts if of == trial.id)
        if trouble is None and numbers != list(range(1, trial.num_attempts + 1)):
            trouble = f"it has the attempts {numbers} of {trial.num_attempts}"
        if trouble is not None:
            found.append(f"trial {trial.id}: {trouble}")
    for (trial_id, number), row in rows.attempts.items():
        has_number = row.tokens_per_second_per_gpu is not None
        if has_number != (row.state == AttemptState.MEASURED) and not row.superseded:
            found.append(
                f"trial {trial_id} attempt {number} is {row.state} "
                f"{'with' if has_number else 'without'} a measurement"
            )
    found += _stale(rows)
    unwritten = {
        (e.trial_id, e.attempt) for e in entries if e.seen is Seen.LAUNCHED
    } - rows.attempts.keys()
    found += [
        f"trial {trial} attempt {number} was launched, and nobody wrote it down"
        for trial, number in sorted(unwritten)
    ]
    return found


def _stale(rows: _Rows) -> list[str]:
    """Rows of an older epoch after the first row of a newer one, in any table."""
    events = sorted((row for of in rows.events.values() for row in of), key=lambda row: row.id)
    found = _after_a_later_epoch(
        [(row.epoch, f"trial {row.trial_id}: {row.event}") for row in events]
    )
    found += _after_a_later_epoch([(row.epoch, f"node {row.node}: a look") for row in rows.checks])
    # A session is one row that is written again and again: by the database's clock, as its
    # successor's beginning is.
    for old, new in pairwise(rows.sessions):
        if max(old.seen_at, old.ended_at or old.seen_at) > new.started_at:
            found.append(
                f"the session of epoch {old.epoch} was written after epoch {new.epoch} had begun"
            )
    return found


def _after_a_later_epoch(written: Sequence[tuple[int, str]]) -> list[str]:
    newest, found = 0, []
    for epoch, what in written:
        if epoch < newest:
            found.append(f"{what} of epoch {epoch} was written after epoch {newest} had begun")
        newest = max(newest, epoch)
    return found


def _fold(events: Sequence[Any]) -> tuple[str, int, str | None]:
    """The state that a trial's events lead to, the number of its attempts, and mistakes."""
    state, begun = INITIAL, 0
    if not events or events[0].event != LogEvent.ADDED:
        return state, begun, "its first event is not that it was added"
    for row in events[1:]:
        if row.from_state != state:
            return state, begun, f"{row.event} from {row.from_state}, when it was {state}"
        if row.event not in STANDING_STILL:
            try:
                state = advance(state, TrialEvent(row.event))
            except (ValueError, IllegalTransition) as exc:
                return state, begun, str(exc)
        begun += row.event in BEGUN
    return state, begun, None
