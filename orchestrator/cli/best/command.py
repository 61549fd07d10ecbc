"""The command `best`: the fastest layouts of each cell, and how sure their order is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.best.other_conditions import other_conditions, print_others
from orchestrator.cli.options import Db, FormatOption, Json, SweepArgument
from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.cli.terminal import trial_text
from orchestrator.cli.terminal.output import (
    Format,
    numbers,
    output_format,
    write,
    write_json,
    write_line,
    write_rows,
    write_table,
)
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report import quantities as show
from orchestrator.report import trial_line
from orchestrator.report.other_conditions import OtherConditions
from orchestrator.report.ranking import (
    DRIFT_TITLES,
    MAX_TIED_SHOWN,
    NOT_COMPARED,
    Ranking,
    rank_cell,
)
from orchestrator.report.remarks import (
    ended_early_text,
    failed_repeats_text,
    failed_text,
    implausible_text,
    load_text,
    unknown_interval_text,
    untried_text,
    waiting_text,
    why_no_best,
)
from orchestrator.report.software_change import SweepChanges, sweep_changes

if TYPE_CHECKING:
    from db.read.rows import (
        CellRow,
        CellStatus,
        EndedEarlyRow,
        FailedRepeatRow,
        ImplausibleRow,
        OtherClockRow,
        SweepRow,
        TrialRow,
    )
    from db.store_reads import StoreReads

# A median SM clock so far from the cell's median is of a device in another state.
OTHER_CLOCK = 0.03


def best(
    sweep: SweepArgument = None,
    top: Annotated[int, typer.Option("--top", "-n", min=1, help="Layouts to show per cell.")] = 1,
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto", help="Show the front: the layouts that none beats in every objective."
        ),
    ] = False,
    format: FormatOption = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Show the fastest layouts of each cell, or a front.

    Says how sure the order is. Results of other code, software or devices are shown apart.

    Examples:
      sweep best
      sweep best 8b --top 5
      sweep best 8b --pareto
      sweep best 8b --format csv > best.csv
    """
    show_best(sweep, top=top, pareto=pareto, format=output_format(format, as_json=as_json), db=db)


def show_best(
    sweep: str | None,
    *,
    top: int = 1,
    pareto: bool = False,
    format: Format,
    db: str | None,
    stands_alone: bool = True,
) -> None:
    """Write the fastest layouts, or a front.

    `stands_alone`: a table also says what changed and what failed, which `run` has said before.
    """
    if pareto:
        from orchestrator.cli.best import front_table  # needs numpy

        front_table.show_fronts(sweep, format, db, stands_alone=stands_alone)
        return
    with existing_store(db) as store:
        found = _read(store, select_sweep(store, sweep), top)
    match format:
        case Format.JSON:
            _write_json(found)
        case Format.CSV:
            _write_csv(found)
        case Format.MD:
            shown = [(t, cell.cell) for cell, s in found.by_cell for t in s.leading[:top]]
            trial_text.write_markdown(shown)
        case Format.TABLE:
            _print(found, stands_alone=stands_alone)


@dataclass(frozen=True, kw_only=True)
class _RankedSweep:
    """The cells of a sweep, each with its ranking, and what is said of them."""

    sweep: SweepRow
    # Layouts to show per cell.
    top: int
    by_cell: Sequence[tuple[CellStatus, Ranking]]
    others: OtherConditions
    changes: SweepChanges
    remarks: _Remarks


def _read(store: StoreReads, sweep: SweepRow, top: int) -> _RankedSweep:
    from orchestrator.core.trial.winner import CONSIDERED  # numpy

    cells, leading = store.status(sweep.id), store.best(sweep.id, max(top, CONSIDERED))
    rankings = {
        cell_id: rank_cell(store, sweep.id, cell_id, trials) for cell_id, trials in leading.items()
    }
    nothing = Ranking(leading=(), tied=(), text="", drift=None)
    return _RankedSweep(
        sweep=sweep,
        top=top,
        by_cell=[(cell, rankings.get(cell.cell.id, nothing)) for cell in cells],
        others=other_conditions(store, sweep.id, cells),
        changes=sweep_changes(store, sweep),
        remarks=_Remarks(
            implausible=store.implausible(sweep.id),
            failed_repeats=store.failed_repeats(
                [trial.id for trials in leading.values() for trial in trials]
            ),
            other_clocks=store.other_clocks(sweep.id, beyond=OTHER_CLOCK),
            ended_early=store.ended_early(sweep.id),
        ),
    )


def _best_records(found: _RankedSweep) -> list[dict[str, Any]]:
    """The fields of a machine-readable row of each layout shown."""
    from orchestrator.report import records  # every column

    return [
        {"place": place, "is_current": True, "is_tied": trial.id in of_cell.tied}
        | of_cell.record(trial.id)
        | records.trial_record(trial, cell.cell, found.sweep.name)
        for cell, of_cell in found.by_cell
        for place, trial in enumerate(of_cell.leading[: found.top], start=1)
    ]


def _write_json(found: _RankedSweep) -> None:
    from orchestrator.report import records  # every column

    by_cell, name = found.by_cell, found.sweep.name
    rows_by_id = {cell.cell.id: cell.cell for cell, _ in by_cell}
    fields = {
        "sweep": name,
        "top": found.top,
        "best": _best_records(found),
        "cells_without": [
            {**records.cell_record(cell.cell), "reason": why_no_best(cell)}
            for cell, of_cell in by_cell
            if not of_cell.leading
        ],
        "margins": {c.cell.cell.key: asdict(s.margin) for c, s in by_cell if s.margin is not None},
        "drift": {c.cell.cell.key: s.drift for c, s in by_cell if s.drift is not None},
        "software_changes": records.change_records(found.changes.by_cell, rows_by_id.values()),
        "other_fingerprints": [
            {"is_current": False, "changed": found.others.changed[trial.id]}
            | records.trial_record(trial, rows_by_id[trial.cell_id], name)
            for trial in found.others.trials
        ],
    }
    write_json("best", fields | asdict(found.remarks))


def _write_csv(found: _RankedSweep) -> None:
    from orchestrator.report import records  # every column

    names = ("place", "is_current", "is_tied", *NOT_COMPARED, *records.TRIAL_COLUMNS)
    rows = ([record[name] for name in names] for record in _best_records(found))
    write_rows(Format.CSV, names, rows)


def _print(found: _RankedSweep, *, stands_alone: bool) -> None:
    from orchestrator.report.fronts import asks_for_front  # numpy

    sweep = found.sweep
    if not found.by_cell:
        write_line(f"Sweep {sweep.name} has no cells yet.")
    elif asks_for_front(sweep):
        more = f"sweep best {sweep.name} --pareto"
        write_line(f"The fastest layouts. The front of the objectives: {more}", style="yellow")
    shown = []
    for number, (cell, of_cell) in enumerate(found.by_cell):
        if number:
            write()
        write_line(trial_line.cell_title(cell.cell), style="bold")
        if of_cell.leading:
            in_table = _print_cell(found, cell.cell, of_cell)
            found.remarks.print_failed_repeats(in_table)
            shown += in_table
        else:
            write_line(f"  {why_no_best(cell)}", style="yellow")
        # While a call goes on, it is not known what it will leave.
        if of_cell.leading and cell.cell.num_untried and sweep.state != "running":
            write_line(f"  {untried_text(cell.cell)}", style="dim")
        num_waiting = cell.num_trials[TrialState.QUEUED]
        if num_waiting and sweep.state != "running":
            write_line(f"  {waiting_text(cell.cell, num_waiting)}", style="yellow")
        num_failed = cell.num_trials[TrialState.FAILED]
        if stands_alone and of_cell.leading and num_failed:
            write_line(f"  {failed_text(sweep.name, num_failed)}", style="yellow")
        found.remarks.print(cell.cell.id)
        shown += print_others(found.others, cell.cell.id)
    # Once: its command is for all cells.
    for change in found.changes.of_sweep if stands_alone else ():
        write_line(change.sentences(), style="yellow")
    trial_text.print_doubts(shown)


def _print_cell(of_sweep: _RankedSweep, cell: CellRow, of_cell: Ranking) -> list[TrialRow]:
    """Print the fastest layouts and those that the text below them names; return them."""
    named, top = of_cell.tied[:MAX_TIED_SHOWN], of_sweep.top
    found = [t for place, t in enumerate(of_cell.leading) if place < top or t.id in named]
    # A repeat with the newer code would be kept apart too.
    may_repeat = not any(change.is_apart for change in of_sweep.changes.by_cell.get(cell.id, ()))
    without_drift = of_cell.without_drift(found)
    rows = [
        [
            str(trial.id),
            *(without_drift.texts[trial.id] if without_drift is not None else ()),
            *trial_text.speed_cells(trial),
            trial_line.layout_text(trial),
        ]
        for trial in found
    ]
    first, *others = trial_text.SPEED_COLUMNS
    added = numbers(*DRIFT_TITLES) if without_drift is not None else ()
    write_table([first, *added, *others], rows)
    write_line(f"  {of_cell.text}", style="dim")
    if len(of_cell.tied) > 1 and may_repeat:
        # `--help` needs no layouts.
        from orchestrator.report.tie_advice import tie_advice

        write_line(f"  {tie_advice(of_sweep.sweep, of_cell, cell.stop_reason)}", style="dim")
    for remark in (load_text(found), of_cell.drift):
        if remark is not None:
            write_line(f"  {remark}", style="yellow")
    if without_drift is not None:
        for remark in (unknown_interval_text(of_cell, found), without_drift.remark):
            if remark is not None:
                write_line(f"  {remark}", style="yellow")
    return found


@dataclass(frozen=True, kw_only=True)
class _Remarks:
    """Trials that are named below the table of their cell."""

    implausible: Sequence[ImplausibleRow]
    failed_repeats: Sequence[FailedRepeatRow]
    other_clocks: Sequence[OtherClockRow]
    ended_early: Sequence[EndedEarlyRow]

    def print_failed_repeats(self, shown: Sequence[TrialRow]) -> None:
        """Print which trials of a table have fewer runs, since repeats of them failed."""
        for trial in shown:
            text = failed_repeats_text(trial, self.failed_repeats)
            if text is not None:
                write_line(f"  {text}", style="yellow")

    def print(self, cell_id: int) -> None:
        _print_implausible([one for one in self.implausible if one.cell_id == cell_id])
        _print_other_clocks([one for one in self.other_clocks if one.cell_id == cell_id])
        _print_ended_early([one for one in self.ended_early if one.cell_id == cell_id])


def _print_implausible(found: Sequence[ImplausibleRow]) -> None:
    if found:
        why = {one.trial_id: one.implausible for one in found}
        write_line(f"  {implausible_text(why)}", style="yellow")


def _print_other_clocks(found: Sequence[OtherClockRow]) -> None:
    if not found:
        return
    which = show.numbered("trial", list(dict.fromkeys(one.trial_id for one in found)))
    most = max((one.gpu_clock_off for one in found), key=abs)
    text = f"  Measured at another clock than usual in this cell: {which} ({most:+.1%} at most)"
    write_line(text, style="yellow")


def _print_ended_early(found: Sequence[EndedEarlyRow]) -> None:
    if found:
        write_line(f"  {ended_early_text([one.trial_id for one in found])}", style="dim")
