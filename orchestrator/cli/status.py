"""The command that says how far sweeps are: status. It reads the store, now or again and again, and prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import results as look
from orchestrator.cli.defaults import chosen_sweep, complete_names, existing_store
from orchestrator.cli.home import attempt_folders
from orchestrator.cli.output import (
    Column,
    DbOption,
    JsonOption,
    StyledText,
    examples,
    write,
    write_json,
    write_line,
    write_table,
)
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report import quantities as show
from orchestrator.report import records

if TYPE_CHECKING:
    from db.read.rows import CellStatus, ReservedBySweep, SessionRow, SweepRow
    from db.store import Store

WATCH_SECONDS = 2.0
MAX_HEARTBEAT_BYTES = 4096


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(epilog=examples("sweep status", "sweep status 8b --watch", "sweep status --json"))(
        status
    )


def status(
    sweep: Annotated[
        str | None,
        typer.Argument(
            metavar="SWEEP",
            help="The sweep's name. Default: all of the store.",
            show_default=False,
            autocompletion=complete_names,
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", "-w", help="Show it again every 2 s, until the sweep ends or Ctrl-C."
        ),
    ] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how far a sweep is.

    Trials by state, the best so far, what runs now. Without a name, all sweeps of the store.
    """
    if watch and as_json:
        raise UsageInvalid("--watch is for people; a program asks again: sweep status --json")
    with existing_store(db) as store:
        while True:
            is_over = _show_status(
                store, sweep, db, as_json=as_json, clear=watch and sys.stdout.isatty()
            )
            if not watch or is_over:
                return
            try:
                time.sleep(WATCH_SECONDS)
            except KeyboardInterrupt:
                return


def _show_status(
    store: Store, name: str | None, db: str | None, *, as_json: bool, clear: bool
) -> bool:
    """Show one sweep, or all; return whether all of them have ended. One whose orchestrator died has not: it may be started again."""
    sweeps = store.sweeps()
    chosen = [chosen_sweep(store, name)] if name is not None or len(sweeps) == 1 else sweeps
    if clear:
        write("\x1b[H\x1b[2J")
    cells = {row.id: store.status(row.id) for row in chosen}
    drifts: Sequence[str] = ()
    if len(chosen) == 1:
        cells[chosen[0].id], drifts = _without_drift(store, chosen[0], cells[chosen[0].id])
    running = {row.id: _running(db, row) for row in chosen}
    held = {row.id: store.held(row.id) for row in chosen}
    unwaited = (
        {row.id: _num_unwaited(db, row) for row in chosen} if as_json or len(chosen) == 1 else {}
    )
    sessions = {row.id: store.newest_session(row.id) for row in chosen}
    if as_json:
        told = [
            {
                **_status_record(
                    row, cells[row.id], running[row.id], held[row.id], sessions[row.id]
                ),
                "num_attempts_of_longer_steps": unwaited[row.id],
            }
            for row in chosen
        ]
        write_json("status", {"sweeps": told})
    elif not chosen:
        write_line(f"{store.url} holds no sweep yet; begin one: sweep run FILE")
    elif len(chosen) == 1:
        only = chosen[0].id
        _print_status(
            chosen[0],
            cells[only],
            running[only],
            held[only],
            sessions[only],
            unwaited[only],
            drifts,
        )
    else:
        _print_sweeps([(row, cells[row.id], held[row.id], sessions[row.id]) for row in chosen])
    return all(row.holder is None and row.state in ("finished", "stopped") for row in chosen)


def _running(db: str | None, sweep: SweepRow) -> list[dict[str, Any]]:
    """The trials in flight. By the index over states: reading every trial of a large sweep takes seconds."""
    from db.sql import readonly  # needs SQLAlchemy, which takes 0.3 s to import

    found = readonly.own_query(
        db,
        "SELECT trial_id, cell, layout, state, num_attempts AS attempt, updated_at FROM v_trial"
        f" WHERE sweep_id = {sweep.id} AND state IN ('launching', 'running') ORDER BY trial_id",
    )
    now = datetime.now(tz=UTC)
    rows = []
    for values in found.rows:
        row = dict(zip(found.columns, values, strict=True))
        seconds = max(show.age_seconds(_moment(row.pop("updated_at")), now), 0.0)
        phase, step = (
            _progress(sweep.run_folder, row["trial_id"], row["attempt"])
            if sweep.holder is not None
            else (None, None)
        )
        rows.append({**row, "phase": phase, "step": step, "seconds": seconds})
    return rows


def _num_unwaited(db: str | None, sweep: SweepRow) -> int:
    """How many measured attempts report more seconds of steps than they held their GPUs for (`core.held.step_seconds_within`)."""
    from db.sql import readonly  # as above

    found = readonly.own_query(
        db,
        "SELECT count(*) FROM attempt JOIN trial ON trial.id = attempt.trial_id JOIN cell ON cell.id = trial.cell_id"
        f" WHERE trial.sweep_id = {sweep.id} AND attempt.state = 'measured' AND attempt.gpu_seconds > 0"
        " AND attempt.timed_seconds * cell.num_gpus >= attempt.gpu_seconds * 0.999999",
    )
    return int(found.rows[0][0])


def _progress(run_folder: str, trial_id: int, attempt: int) -> tuple[str | None, int | None]:
    """How far its least advanced rank on this machine is, by the ranks' heartbeats. Unknown where its nodes are others."""
    from orchestrator.core.trial.protocol import BadResult, Phase, decode_heartbeat

    beats = []
    for path in (
        path
        for folder in attempt_folders(run_folder, trial_id, attempt)
        for path in folder.glob("heartbeat-*.json")
    ):
        try:
            with path.open("rb") as file:
                beats.append(decode_heartbeat(file.read(MAX_HEARTBEAT_BYTES)))
        except (OSError, BadResult):
            continue
    if not beats:
        return None, None
    order = list(Phase)
    least = min(beats, key=lambda beat: (order.index(beat.phase), beat.step))
    return least.phase, least.step


def _moment(value: Any) -> datetime:
    """A time as the database's driver gives it: SQLite has only text."""
    return value if isinstance(value, datetime) else datetime.fromisoformat(str(value))


def _status_record(
    row: SweepRow,
    cells: Sequence[CellStatus],
    running: Sequence[Mapping[str, Any]],
    held: ReservedBySweep,
    session: SessionRow | None,
) -> records.Record:
    return {
        **records.sweep_record(row),
        "stop_reasons": list(session.stop_reasons) if session is not None else [],
        "num_trials": _totals(cells),
        **records.held_record(held, _price(session)),
        "cells": [
            records.cell_status_record(cell, row.name, held.by_cell[cell.cell.id]) for cell in cells
        ],
        "running": running,
    }


def _without_drift(
    store: Store, row: SweepRow, cells: Sequence[CellStatus]
) -> tuple[list[CellStatus], list[str]]:
    """The cells with the best that `sweep best` names, and how the machine has changed while each was measured, where it was seen to."""
    from orchestrator.core.trial.winner import CONSIDERED  # numpy
    from orchestrator.sweep.confirmation import confirmation_of_repeats  # needs SQLAlchemy

    drifted = {
        cell.cell.id
        for cell in cells
        if confirmation_of_repeats(store, cell.cell.id).change is not None
    }
    leading = store.best(row.id, CONSIDERED) if drifted else {}
    corrected, found = [], []
    for cell in cells:
        standing = (
            look.standing(store, row.id, cell.cell.id, leading[cell.cell.id])
            if cell.cell.id in drifted & leading.keys()
            else None
        )
        corrected.append(cell if standing is None else replace(cell, best=standing.leading[0]))
        if standing is not None and standing.drift is not None:
            found.append(
                f"{cell.cell.cell.key}: {standing.drift}" if len(cells) > 1 else standing.drift
            )
    return corrected, found


def _print_status(
    row: SweepRow,
    cells: Sequence[CellStatus],
    running: Sequence[Mapping[str, Any]],
    held: ReservedBySweep,
    session: SessionRow | None,
    num_unwaited: int,
    drifts: Sequence[str],
) -> None:
    write_line(f"Sweep {row.name}: {_state_text(row, session)}", style="bold")
    write_line(
        f"{show.counted(sum(_totals(cells).values()), 'trial')} in {show.counted(len(cells), 'cell')},"
        f" {show.gpu_hours(held.total.held)} GPU-hours held{_what_for(held, _price(session))}"
    )
    if num_unwaited:
        write_line(
            f"  {show.counted(num_unwaited, 'attempt')} reported more seconds of steps than {'its' if num_unwaited == 1 else 'their'} GPUs were held;"
            " all of that time counts as useful. Either the steps were not run in real time, or a clock is wrong",
            style="dim",
        )
    if not cells:
        return
    write()
    shown = _shown_counts(cells)
    columns = [
        Column(title="cell", wrap=True),
        *(Column(title=title, right=True) for title in shown),
        Column(title="GPU-hours", right=True),
    ]
    by_cell = {cell.cell.id: show.gpu_hours(held.by_cell[cell.cell.id].held) for cell in cells}
    write_table(
        columns,
        [[cell.cell.cell.key, *_count_cells(cell, shown), by_cell[cell.cell.id]] for cell in cells],
    )
    write()
    columns = [
        Column(title="best so far", right=True),
        Column(title="MFU", right=True),
        Column(title="layout", wrap=True),
        Column(title="cell", wrap=True),
    ]
    write_table(columns, [_best_so_far(cell) for cell in cells])
    for line in drifts:
        write_line(line, style="yellow")
    if not running:
        return
    write()
    columns = [
        Column(title="running", right=True),
        Column(title="phase"),
        Column(title="for", right=True),
    ]
    columns += [Column(title="layout", wrap=True), Column(title="cell", wrap=True)]
    write_table(
        columns,
        [
            [
                str(r["trial_id"]),
                _phase_text(r, is_held=row.holder is not None),
                show.duration(r["seconds"]),
                look.short(str(r["layout"])),
                str(r["cell"]),
            ]
            for r in running
        ],
    )


def _price(session: SessionRow | None) -> float | None:
    return session.price_per_gpu_hour if session is not None else None


def _what_for(held: ReservedBySweep, price: float | None) -> str:
    """In money, what they went into, and what the cluster had."""
    if not held.total.held:
        return ""
    money = f", ${held.total.held / 3600 * price:,.2f}" if price is not None else ""
    of = (
        f"; the cluster had {show.gpu_hours(held.capacity)} GPU-hours meanwhile"
        if held.capacity is not None
        else ""
    )
    return f"{money}: {show.shares(held.total.parts)}{of}"


_COUNTED: Mapping[str, tuple[TrialState, ...]] = {
    "measured": (TrialState.MEASURED,),
    "OOM": (TrialState.OUT_OF_MEMORY,),
    "failed": (TrialState.FAILED,),
    "pruned": (TrialState.PRUNED,),
    "in flight": (TrialState.LAUNCHING, TrialState.RUNNING),
    "waiting": (TrialState.QUEUED,),
}
_ALWAYS_SHOWN = ("measured", "OOM", "failed")


def _shown_counts(cells: Sequence[CellStatus]) -> list[str]:
    """The states worth a column: a sweep in which nothing was pruned needs none for it."""
    totals = _totals(cells)
    return [
        title
        for title, states in _COUNTED.items()
        if title in _ALWAYS_SHOWN or any(totals[state] for state in states)
    ]


def _count_cells(status: CellStatus, titles: Sequence[str]) -> list[StyledText]:
    counts = {
        title: sum(status.num_trials.get(state, 0) for state in _COUNTED[title]) for title in titles
    }
    return [
        StyledText(
            text=f"{n:,}", style=look.STATE_STYLES.get(_COUNTED[title][0], "") if n else "dim"
        )
        for title, n in counts.items()
    ]


def _best_so_far(status: CellStatus) -> list[str | StyledText]:
    best = status.best
    if best is None:
        return [
            show.UNKNOWN,
            show.UNKNOWN,
            StyledText(text=look.why_no_best(status), style="yellow"),
            status.cell.cell.key,
        ]
    speed = f"{show.tokens_rate(best.tokens_per_second_per_gpu)} tokens/s/GPU"
    return [
        StyledText(text=speed, style="green"),
        show.percent(best.mfu),
        look.layout_text(best),
        status.cell.cell.key,
    ]


def _print_sweeps(
    rows: Sequence[tuple[SweepRow, Sequence[CellStatus], ReservedBySweep, SessionRow | None]],
) -> None:
    shown = _shown_counts([cell for _, cells, _, _ in rows for cell in cells])
    columns = [
        Column(title="sweep", wrap=True),
        Column(title="cells", right=True),
        *(Column(title=title, right=True) for title in shown),
    ]
    columns += [Column(title="GPU-hours", right=True), Column(title="state", wrap=True)]
    lines = []
    for row, cells, held, session in rows:
        totals = _totals(cells)
        counts = [f"{sum(totals[state] for state in _COUNTED[title]):,}" for title in shown]
        lines.append(
            [
                row.name,
                str(len(cells)),
                *counts,
                show.gpu_hours(held.total.held),
                _state_text(row, session),
            ]
        )
    write_table(columns, lines)


def _totals(cells: Sequence[CellStatus]) -> dict[TrialState, int]:
    return {state: sum(cell.num_trials.get(state, 0) for cell in cells) for state in TrialState}


def _state_text(row: SweepRow, session: SessionRow | None) -> str:
    from db.read.holder import holder_is_gone  # needs SQLAlchemy

    if row.holder is None:
        # Its last owner died without giving it back: the same command goes on.
        if row.state == "running":
            return "nobody works on it now (its orchestrator is gone)"
        why = "; ".join(session.stop_reasons) if session is not None else ""
        return f"{row.state} ({why})" if why else str(row.state)
    if holder_is_gone(row.holder):
        return f"nobody works on it now: its orchestrator (pid {row.holder.pid}) is dead; the same `sweep run` goes on"
    asked = f", asked to {row.stop_requested}" if row.stop_requested else ""
    return f"running on host {row.holder.host}, pid {row.holder.pid}, since {show.at(row.holder.since)} UTC{asked}"


def _phase_text(row: Mapping[str, Any], *, is_held: bool) -> str:
    if not is_held:
        return "left in flight"  # the next `sweep run` gives it back first
    if row["phase"] is not None:
        step = f", step {row['step']}" if row["step"] else ""
        return f"{str(row['phase']).replace('_', ' ')}{step}"
    return "before its first step" if row["state"] == TrialState.LAUNCHING else "taking steps"
