"""The commands that look at what was measured: best, trials. They read the store and print; nothing here changes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.defaults import SweepArgument, chosen_sweep, existing_store
from orchestrator.cli.output import (
    Column,
    DbOption,
    Format,
    FormatOption,
    JsonOption,
    StyledText,
    chosen_format,
    examples,
    note,
    plain,
    write,
    write_csv,
    write_json,
    write_line,
    write_markdown,
    write_table,
)
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.layout import parse_key
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.machine_load import relative_sd, said_of, spoils
from orchestrator.report import quantities as show
from orchestrator.report import records

if TYPE_CHECKING:
    from db.read.rows import CellRow, CellStatus, SweepRow, TrialRow
    from db.store import Store
    from orchestrator.core.trial.drift import SpeedChange
    from orchestrator.core.trial.winner import Verdict

STATE_STYLES: Mapping[str, str] = {
    TrialState.MEASURED: "green",
    TrialState.OUT_OF_MEMORY: "yellow",
    TrialState.FAILED: "red",
    TrialState.LAUNCHING: "cyan",
    TrialState.RUNNING: "cyan",
    TrialState.PRUNED: "dim",
}


class Sort(StrEnum):
    SPEED = "speed"  # fastest first, then what was not measured
    ID = "id"
    MEMORY = "memory"
    UPDATED = "updated"  # newest first


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(
        epilog=examples(
            "sweep best", "sweep best 8b --top 5", "sweep best 8b --format csv > best.csv"
        )
    )(best)
    app.command(
        epilog=examples(
            "sweep trials --state out_of_memory --state failed",
            "sweep trials 8b --cell 8gpu --sort memory --limit 20",
            "sweep trials --json",
        )
    )(trials)


def best(
    sweep: SweepArgument = None,
    top: Annotated[int, typer.Option("--top", "-n", min=1, help="How many layouts per cell.")] = 1,
    format: FormatOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the fastest layouts of each cell.

    With how sure their numbers are. What was measured under other conditions (code, software, device) stands apart.
    """
    from orchestrator.core.trial.winner import CONSIDERED  # numpy

    chosen = chosen_format(format, as_json=as_json)
    with existing_store(db) as store:
        row = chosen_sweep(store, sweep)
        cells = store.status(row.id)
        standings = {
            cell_id: standing(store, row.id, cell_id, found)
            for cell_id, found in store.best(row.id, max(top, CONSIDERED)).items()
        }
        fastest = {cell_id: of_cell.leading[:top] for cell_id, of_cell in standings.items()}
        others = _other_fingerprints(db, row.id)
    found = [
        {
            "place": place,
            "is_current": True,
            "is_tied": trial.id in standings[trial.cell_id].tied,
            **records.trial_record(trial, cell.cell, row.name),
        }
        for cell in cells
        for place, trial in enumerate(fastest.get(cell.cell.id, ()), start=1)
    ]
    if chosen is Format.JSON:
        without = [
            {**records.cell_record(cell.cell), "reason": why_no_best(cell)}
            for cell in cells
            if not fastest.get(cell.cell.id)
        ]
        drifted = {
            cell.cell.cell.key: drift
            for cell in cells
            if (drift := _drift_of(standings.get(cell.cell.id))) is not None
        }
        told = {
            "sweep": row.name,
            "top": top,
            "best": found,
            "cells_without": without,
            "drift": drifted,
            "other_fingerprints": others,
        }
        write_json("best", told)
    elif chosen is Format.CSV:
        write_csv(_BEST_FIELDS, ([record[name] for name in _BEST_FIELDS] for record in found))
    elif chosen is Format.MD:
        write_markdown(
            _MARKDOWN_TITLES,
            [
                _markdown_row(trial, cell.cell)
                for cell in cells
                for trial in fastest.get(cell.cell.id, ())
            ],
        )
    else:
        shown = {cell_id: _with_tied(of_cell, top) for cell_id, of_cell in standings.items()}
        _print_best(row.name, cells, shown, standings, others)


MOST_TIED = 8  # that are named and shown
MUCH = 1.5  # times what runs vary by without drift and load


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How sure the first place of a cell is."""

    leading: Sequence[TrialRow]  # the fastest first, as the machine is now
    tied: Sequence[int]
    text: str
    drift: str | None  # how the machine has changed meanwhile; None: by no more than noise


def standing(store: Store, sweep_id: int, cell_id: int, leading: Sequence[TrialRow]) -> Standing:
    """How sure the first place of a cell is. `leading`: its fastest layouts by their stored numbers."""
    from orchestrator.core.trial.winner import USUAL_VARIATION
    from orchestrator.sweep.confirmation import leading_confirmation  # needs SQLAlchemy

    confirmation, rows = leading_confirmation(store, sweep_id, cell_id, leading)
    verdict = confirmation.verdict()
    if verdict is None:
        return Standing(leading=leading, tied=(), text="", drift=None)
    num_runs = confirmation.num_runs(verdict.best)
    repeats = show.counted(verdict.num_repeats, "repeat")
    usual = f"runs of one layout usually vary by {USUAL_VARIATION} (nothing was repeated here)"
    varies = (
        usual
        if verdict.spread is None
        else f"runs of one layout vary by {verdict.spread:.1%} ({repeats}){_left_over(verdict)}"
    )
    if not verdict.is_settled:
        shown = ", ".join(map(str, verdict.tied[:MOST_TIED])) + (
            " and others" if len(verdict.tied) > MOST_TIED else ""
        )
        text = f"No single winner: trials {shown} are tied; {varies}, and with that any of them could be the fastest"
    elif len(rows) == 1:
        text = f"Trial {verdict.best} is the only layout that was measured"
    elif num_runs == 1:
        text = f"Trial {verdict.best} is ahead after one run; {varies}; not confirmed by another (search.confirm)"
    else:
        text = f"Winner: trial {verdict.best}, confirmed by {num_runs} runs; {varies}, and with that no other could be faster"
    # Layouts that are not compared follow in the store's order.
    compared = {row.id for row in rows}
    behind = [row for row in leading if row.id not in compared]
    return Standing(
        leading=[*rows, *behind], tied=verdict.tied, text=text, drift=drift_text(verdict.change)
    )


def _with_tied(standing: Standing, top: int) -> list[TrialRow]:
    """The fastest `top`, and those besides that are named as tied."""
    named = standing.tied[:MOST_TIED]
    return [
        trial for place, trial in enumerate(standing.leading) if place < top or trial.id in named
    ]


def _left_over(verdict: Verdict) -> str:
    """How much of the spread of runs is left without drift and the load of others, where they have part in it."""
    assert verdict.spread is not None
    return (
        f", and by {verdict.run_sd:.1%} without drift and the load of others"
        if verdict.spread > MUCH * verdict.run_sd
        else ""
    )


def _busy_text(trials: Sequence[TrialRow]) -> str | None:
    """A line about the load that trials were measured under, at its worst; None: under none that matters."""
    busy = [trial for trial in trials if spoils(trial.load)]
    if not busy:
        return None
    worst = max(busy, key=lambda trial: relative_sd(trial.load))
    if len(busy) == 1:
        return f"trial {worst.id}: {said_of(worst.load)} while it was measured"
    named = show.numbered("trial", [trial.id for trial in busy])
    return (
        f"{named}: {said_of(worst.load)} while they were measured, at the worst (trial {worst.id})"
    )


def _drift_of(of_cell: Standing | None) -> str | None:
    return None if of_cell is None else of_cell.drift


def drift_text(change: SpeedChange | None) -> str | None:
    """A line about how the machine drifted; None: it stayed as it was."""
    if change is None:
        return None
    later = (
        "later" if change.apart_seconds is None else f"{show.duration(change.apart_seconds)} later"
    )
    return (
        f"The machine drifted: trial {change.key} took {show.step_time(change.first_seconds)} at first and"
        f" {show.step_time(change.then_seconds)} {later}; where layouts are compared, what was measured"
        f" meanwhile is corrected by up to {change.largest_correction:.0%}, and its intervals are wider"
    )


_BEST_FIELDS = ("place", "is_current", "is_tied", *records.TRIAL_COLUMNS)
_MARKDOWN_TITLES = (
    "cell",
    "trial",
    "state",
    "tokens/s/GPU",
    "±95%",
    "runs",
    "MFU",
    "step",
    "peak memory",
    "layout",
)


def _markdown_row(trial: TrialRow, cell: CellRow) -> list[str]:
    """What stands in a table for people, to be pasted into a document; CSV and JSON have every field."""
    return [
        cell.cell.key,
        str(trial.id),
        trial.state.replace("_", " "),
        *(_text(part) for part in (*_speed_cells(trial), _explained(trial))),
    ]


def _text(cell: str | StyledText) -> str:
    return cell.text if isinstance(cell, StyledText) else cell


def _other_fingerprints(db: str | None, sweep_id: int) -> list[dict[str, Any]]:
    """Per cell and fingerprint that is not the current one, the fastest layout."""
    from db.sql import readonly  # needs SQLAlchemy

    found = readonly.own_query(
        db,
        "SELECT cell_id, cell, fingerprint_digest, trial_id, layout, tokens_per_second_per_gpu, relative_confidence, mfu, step_seconds_median,"
        f" peak_memory_allocated_bytes, device_memory_bytes FROM v_best WHERE sweep_id = {sweep_id} AND NOT is_current"
        " ORDER BY cell_id, tokens_per_second_per_gpu DESC",
    )
    return [
        {"is_current": False, **dict(zip(found.columns, values, strict=True))}
        for values in found.rows
    ]


_SPEED_COLUMNS = (
    Column(title="trial", right=True),
    Column(title="tokens/s/GPU", right=True),
    Column(title="±95%", right=True),
    Column(title="runs", right=True),
    Column(title="MFU", right=True),
    Column(title="step", right=True),
    Column(title="peak memory", right=True),
    Column(title="layout", wrap=True),
)
_MAX_OTHERS = 5  # per cell: every commit of the measured code is a fingerprint


def _print_best(
    sweep: str,
    cells: Sequence[CellStatus],
    fastest: Mapping[int, Sequence[TrialRow]],
    standings: Mapping[int, Standing],
    others: Sequence[Mapping[str, Any]],
) -> None:
    if not cells:
        write_line(f"Sweep {sweep} has no cells yet.")
    for number, cell in enumerate(cells):
        if number:
            write()
        write_line(_cell_title(cell.cell), style="bold")
        found = fastest.get(cell.cell.id, ())
        if found:
            write_table(
                _SPEED_COLUMNS,
                [[str(trial.id), *_speed_cells(trial), layout_text(trial)] for trial in found],
            )
            write_line(f"  {standings[cell.cell.id].text}", style="dim")
            if (busy := _busy_text(found)) is not None:
                write_line(f"  {busy}", style="yellow")
            if (drift := standings[cell.cell.id].drift) is not None:
                write_line(f"  {drift}", style="yellow")
            speeds = [trial.tokens_per_second_per_gpu or 0.0 for trial in found]
            if speeds != sorted(speeds, reverse=True):
                write_line(
                    "  The order is that of speeds without drift and the load of others; the numbers are as they were measured",
                    style="yellow",
                )
        else:
            write_line(f"  {why_no_best(cell)}", style="yellow")
        elsewhere = [other for other in others if other["cell_id"] == cell.cell.id]
        if elsewhere:
            write_line(
                "  Measured under other conditions (code, software or device), not comparable with the above:",
                style="dim",
            )
            columns = [*_SPEED_COLUMNS, Column(title="fingerprint")]
            write_table(columns, [_other_cells(other) for other in elsewhere[:_MAX_OTHERS]])
            if len(elsewhere) > _MAX_OTHERS:
                write_line(
                    f"  and {len(elsewhere) - _MAX_OTHERS} more: sweep sql 'select * from v_best'",
                    style="dim",
                )
    _print_why_unsure([trial for found in fastest.values() for trial in found])


def _print_why_unsure(shown: Sequence[TrialRow]) -> None:
    """Explain the `?` of a table; where there are several reasons, name the trials of each."""
    unsure: dict[str, list[int]] = {}
    for trial in shown:
        if (why := _why_unsure(trial)) is not None:
            unsure.setdefault(why, []).append(trial.id)
    for why, ids in unsure.items():
        of = f", of {show.numbered('trial', ids)}" if len(unsure) > 1 else ""
        write_line(f"?: {why}{of}", style="dim")


def _why_unsure(trial: TrialRow) -> str | None:
    from orchestrator.core.trial.measurement import why_unsure  # pydantic, 0.05 s

    return why_unsure(
        confident=trial.confident,
        num_steps=trial.num_steps,
        relative_confidence=trial.relative_confidence,
    )


def _cell_title(row: CellRow) -> str:
    cell = row.cell
    under = (
        f", fingerprint {show.short_digest(row.fingerprint_digest)}"
        if row.fingerprint_digest
        else ""
    )
    gpus = f"{cell.num_gpus} GPU{'s' if cell.num_gpus > 1 else ''}"
    return f"{cell.key}  ({cell.model.name} on {gpus}, sequence {cell.sequence_length:,}, global batch {cell.global_batch_size:,}{under})"


def _speed_cells(trial: TrialRow) -> list[str | StyledText]:
    sure = show.confidence(trial.relative_confidence)
    return [
        StyledText(text=show.tokens_rate(trial.tokens_per_second_per_gpu), style="green"),
        sure if trial.confident in (None, True) else StyledText(text=f"{sure}?", style="yellow"),
        str(trial.num_measurements or "-"),
        show.percent(trial.mfu),
        show.step_time(trial.step_seconds_median),
        show.memory_of(trial.peak_memory_allocated_bytes, trial.device_memory_bytes),
    ]


def layout_text(trial: TrialRow) -> str:
    """The layout in the form for tables, marked where its number is not to be trusted."""
    marks = ["at the memory edge: thrashing"] if trial.thrashing else []
    marks += ["disturbed"] if spoils(trial.load) else []
    return f"{trial.layout.short}{''.join(f'  ({mark})' for mark in marks)}"


def _other_cells(other: Mapping[str, Any]) -> list[str]:
    return [
        str(other["trial_id"]),
        show.tokens_rate(other["tokens_per_second_per_gpu"]),
        show.confidence(other["relative_confidence"]),
        "",
        show.percent(other["mfu"]),
        show.step_time(other["step_seconds_median"]),
        show.memory_of(other["peak_memory_allocated_bytes"], other["device_memory_bytes"]),
        short(str(other["layout"])),
        show.short_digest(other["fingerprint_digest"]),
    ]


def short(key: str) -> str:
    """A stored layout key in the form for tables."""
    try:
        return parse_key(key).short
    except ValueError:  # written by a later version
        return key


def why_no_best(status: CellStatus) -> str:
    """Say of a cell without a best layout whether nothing fits, nothing worked, or nothing is known yet."""
    count = status.num_trials
    oom, pruned, failed = (
        count.get(s, 0) for s in (TrialState.OUT_OF_MEMORY, TrialState.PRUNED, TrialState.FAILED)
    )
    open_trials = sum(
        count.get(s, 0) for s in (TrialState.QUEUED, TrialState.LAUNCHING, TrialState.RUNNING)
    )
    if count.get(TrialState.MEASURED, 0):
        return "nothing is measured under the current conditions"
    if open_trials or not (oom or pruned or failed):
        return "nothing measured yet"
    if failed:
        return f"nothing could be measured: {oom} out of memory, {pruned} pruned with them, {failed} failed"
    return f"nothing has fitted: {oom} out of memory, {pruned} pruned with them"


def trials(
    sweep: SweepArgument = None,
    state: Annotated[
        list[TrialState] | None,
        typer.Option("--state", "-s", help="Only these states; may be repeated."),
    ] = None,
    cell: Annotated[
        str | None,
        typer.Option("--cell", help="Only cells whose name has this in it.", show_default=False),
    ] = None,
    sort: Annotated[Sort, typer.Option("--sort", help="What comes first.")] = Sort.SPEED,
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=1, help="At most so many rows.", show_default=False),
    ] = None,
    format: FormatOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the trials of a sweep, one row each."""
    chosen = chosen_format(format, as_json=as_json)
    with existing_store(db) as store:
        row = chosen_sweep(store, sweep)
        cells = {found.id: found for found in _matching_cells(store, row, cell)}
        found = [
            trial
            for cell_id in cells
            for trial in store.trials(row.id, cell_id=cell_id)
            if not state or trial.state in state
        ]
    found.sort(key=_sort_key(sort))
    total, found = len(found), found[:limit]
    match chosen:
        case Format.JSON:
            rows = [records.trial_record(trial, cells[trial.cell_id], row.name) for trial in found]
            write_json("trials", {"sweep": row.name, "num_matching": total, "trials": rows})
        case Format.CSV:
            in_order = (
                records.trial_record(trial, cells[trial.cell_id], row.name) for trial in found
            )
            write_csv(
                records.TRIAL_COLUMNS,
                ([record[name] for name in records.TRIAL_COLUMNS] for record in in_order),
            )
        case Format.MD:
            write_markdown(
                _MARKDOWN_TITLES, [_markdown_row(trial, cells[trial.cell_id]) for trial in found]
            )
        case Format.TABLE:
            _print_trials(found, cells)
    if len(found) < total:
        note(f"{len(found)} of {total} trials; a higher --limit shows more")


def _matching_cells(store: Store, sweep: SweepRow, part: str | None) -> list[CellRow]:
    cells = store.cells(sweep.id)
    matching = [row for row in cells if part is None or part in row.cell.key]
    if part is not None and not matching:
        raise UsageInvalid(
            f"no cell of {sweep.name} has {part!r} in its name; there are {', '.join(row.cell.key for row in cells) or 'none yet'}"
        )
    return matching


def _sort_key(sort: Sort) -> Callable[[TrialRow], tuple[float, ...]]:
    match sort:
        case Sort.SPEED:  # what other conditions gave comes after what it cannot be compared with
            return lambda trial: (
                trial.is_current_fingerprint is False,
                -(trial.tokens_per_second_per_gpu or 0.0),
                trial.id,
            )
        case Sort.MEMORY:
            return lambda trial: (-(trial.peak_memory_allocated_bytes or 0), trial.id)
        case Sort.UPDATED:
            return lambda trial: (-trial.updated_at.timestamp(), -trial.id)
        case Sort.ID:
            return lambda trial: (trial.id,)


def _print_trials(found: Sequence[TrialRow], cells: Mapping[int, CellRow]) -> None:
    """A table per cell: their speeds are not to be compared."""
    if not found:
        write_line("No trial matches.")
    columns = [_SPEED_COLUMNS[0], Column(title="state"), *_SPEED_COLUMNS[1:]]
    for number, cell_id in enumerate(dict.fromkeys(trial.cell_id for trial in found)):
        if number:
            write()
        write_line(_cell_title(cells[cell_id]), style="bold")
        own = [trial for trial in found if trial.cell_id == cell_id]
        write_table(
            columns,
            [
                [str(trial.id), state_cell(trial.state), *_speed_cells(trial), _explained(trial)]
                for trial in own
            ],
        )
    _print_why_unsure(found)


def _explained(trial: TrialRow) -> str:
    """The layout, and beneath it why there is no number, or none to compare."""
    if trial.tokens_per_second_per_gpu is not None:
        other = trial.is_current_fingerprint is False
        return (
            f"{layout_text(trial)}\nother conditions: fingerprint {show.short_digest(trial.fingerprint_digest)}"
            if other
            else layout_text(trial)
        )
    if trial.state is TrialState.PRUNED:
        reason = (
            f"needs at least the memory of trial {trial.condemned_by}"
            if trial.condemned_by is not None
            else trial.why
        )
    else:
        reason = plain(trial.failure_message) if trial.failure_message else None
    return f"{trial.layout.short}\n{reason[:200]}" if reason else trial.layout.short


def state_cell(state: TrialState) -> StyledText:
    """A state as a cell in its colour."""
    return StyledText(text=state.replace("_", " "), style=STATE_STYLES.get(state, ""))
