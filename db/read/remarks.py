"""The statements behind the remarks of `best` and `status`: what is not ranked or looks unusual."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.portions import portions
from db.read import trials
from db.read.rows import EndedEarlyRow, ImplausibleRow, NoiseFloor, OtherClockRow, TrialRow

cell, trial, attempt = schema.cell, schema.trial, schema.attempt
measurement = schema.measurement


def implausible(connection: Connection, sweep_id: int) -> list[ImplausibleRow]:
    """The trials of a sweep whose numbers cannot be true, oldest first."""
    statement = (
        _NOT_RANKED.add_columns(measurement.c.tokens_per_second_per_gpu, measurement.c.implausible)
        .where(trial.c.sweep_id == sweep_id, measurement.c.implausible.is_not(None))
        .order_by(trial.c.id)
    )
    return [ImplausibleRow(**row) for row in connection.execute(statement).mappings()]


def num_implausible(connection: Connection, cell_ids: Collection[int]) -> dict[int, int]:
    """Count the trials of each of these cells whose numbers cannot be true."""
    counts = dict.fromkeys(cell_ids, 0)
    for some in portions(sorted(cell_ids)):
        statement = (
            sa.select(trial.c.cell_id, sa.func.count().label("num"))
            .join(attempt, sa.and_(attempt.c.trial_id == trial.c.id, ~attempt.c.superseded))
            .join(measurement, measurement.c.attempt_id == attempt.c.id)
            .where(trial.c.cell_id.in_(some), measurement.c.implausible.is_not(None))
            .group_by(trial.c.cell_id)
        )
        counts |= {row.cell_id: row.num for row in connection.execute(statement)}
    return counts


def ended_early(connection: Connection, sweep_id: int) -> list[EndedEarlyRow]:
    """The trials of a sweep that were ended before their last timed step, oldest first."""
    statement = (
        _NOT_RANKED.add_columns(measurement.c.step_seconds_bound)
        .where(trial.c.sweep_id == sweep_id, measurement.c.step_seconds_bound.is_not(None))
        .order_by(trial.c.id)
    )
    return [EndedEarlyRow(**row) for row in connection.execute(statement).mappings()]


def other_clocks(connection: Connection, sweep_id: int, beyond: float) -> list[OtherClockRow]:
    """The runs whose GPUs had another clock than usual in their cell, oldest trial first.

    `beyond` is relative to the usual clock.
    """
    statement = sa.text(
        "SELECT cell_id, trial_id, attempt, gpu_clock_mhz, gpu_clock_off FROM v_run"
        " WHERE sweep_id = :sweep_id AND abs(gpu_clock_off) > :beyond ORDER BY trial_id, attempt"
    )
    rows = connection.execute(statement, {"sweep_id": sweep_id, "beyond": beyond}).mappings()
    return [OtherClockRow(**row) for row in rows]


def best_of_other_fingerprints(connection: Connection, sweep_id: int) -> list[TrialRow]:
    """The fastest trial of each cell and old fingerprint, by cell, the fastest first."""
    statement = sa.text(
        "SELECT trial_id FROM v_best WHERE sweep_id = :sweep_id AND NOT is_current"
        " ORDER BY cell_id, tokens_per_second_per_gpu DESC, trial_id"
    )
    found = connection.execute(statement, {"sweep_id": sweep_id}).scalars()
    return trials.trials_by_id(connection, [int(trial_id) for trial_id in found])


def noise_floors(connection: Connection, sweep_id: int) -> dict[int, NoiseFloor]:
    """Return the noise floor of each cell that has repeats, by cell id."""
    statement = sa.text(
        "SELECT cell_id, noise_floor, num_repeats FROM v_cell"
        " WHERE sweep_id = :sweep_id AND num_repeats > 0"
    )
    return {
        int(row.cell_id): NoiseFloor(relative=float(row.noise_floor), num_repeats=row.num_repeats)
        for row in connection.execute(statement, {"sweep_id": sweep_id})
    }


def num_with_longer_steps(connection: Connection, sweep_id: int) -> int:
    """Count measured attempts that report more seconds of steps than they reserved GPUs for.

    See `step_seconds_within` in `orchestrator/core/trial/reserved_time.py`.
    """
    statement = (
        sa.select(sa.func.count())
        .select_from(attempt)
        .join(trial, trial.c.id == attempt.c.trial_id)
        .join(cell, cell.c.id == trial.c.cell_id)
        .where(
            trial.c.sweep_id == sweep_id,
            attempt.c.state == sa.literal_column("'measured'"),
            attempt.c.gpu_seconds > 0,
            # A sum of rounded numbers may be a little less.
            attempt.c.timed_seconds * cell.c.num_gpus >= attempt.c.gpu_seconds * 0.999999,
        )
    )
    return int(connection.execute(statement).scalar_one())


# Trials with the measurement that counts for each.
_NOT_RANKED = (
    sa.select(trial.c.cell_id, trial.c.id.label("trial_id"), trial.c.layout_key.label("layout"))
    .join(attempt, sa.and_(attempt.c.trial_id == trial.c.id, sa.not_(attempt.c.superseded)))
    .join(measurement, measurement.c.attempt_id == attempt.c.id)
)
