"""Prints the fronts of a sweep, for `sweep best --pareto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.cli.terminal import trial_text
from orchestrator.cli.terminal.output import (
    Column,
    Format,
    StyledText,
    numbers,
    write,
    write_json,
    write_line,
    write_rows,
    write_table,
)
from orchestrator.report import trial_line
from orchestrator.report.fronts import (
    ShownFront,
    ShownPoint,
    objective_text,
    objective_titles,
    read_fronts,
)
from orchestrator.report.remarks import failed_repeats_text
from orchestrator.report.software_change import sweep_changes

if TYPE_CHECKING:
    from orchestrator.core.sweepfile.objective import Objective

# Layouts that could be on a front, the likeliest; JSON and CSV have all of them.
MAX_POSSIBLE_SHOWN = 8


def show_fronts(
    sweep: str | None, format: Format, db: str | None, *, stands_alone: bool = True
) -> None:
    """Write the fronts of a sweep; `stands_alone`: a table also says what changed."""
    from orchestrator.report.records import change_records  # every column

    with existing_store(db) as store:
        row = select_sweep(store, sweep)
        fronts = read_fronts(store, row)
        changes, cells = sweep_changes(store, row), store.cells(row.id)
        failed = store.failed_repeats([one.trial.id for front in fronts for one in front.points])
    if format is Format.JSON:
        _write_json(row.name, fronts, change_records(changes.by_cell, cells))
    else:
        _write(format, row.name, fronts)
    if format is Format.TABLE:
        for front in fronts:
            for point in front.points:
                text = failed_repeats_text(point.trial, failed) if point.is_on_front else None
                if text is not None:
                    write_line(text, style="yellow")
        for change in changes.of_sweep if stands_alone else ():
            write_line(change.sentences(), style="yellow")


def _write_json(
    sweep: str, fronts: Sequence[ShownFront], changes: Sequence[dict[str, Any]]
) -> None:
    found = [front.record() for front in fronts]
    write_json("best", {"sweep": sweep, "fronts": found, "software_changes": changes})


def _write(format: Format, sweep: str, fronts: Sequence[ShownFront]) -> None:
    from orchestrator.report import records

    match format:
        case Format.CSV:
            objectives = fronts[0].objectives if fronts else ()
            names = ("is_on_front", *_value_names(objectives), *records.TRIAL_COLUMNS)
            rows: list[dict[str, Any]] = [
                point.record() | records.trial_record(point.trial, point.cell, sweep)
                for front in fronts
                for point in front.points
            ]
            write_rows(format, names, ([row[name] for name in names] for row in rows))
        case Format.MD:
            points = [point for front in fronts for point in front.points if point.is_on_front]
            trial_text.write_markdown([(point.trial, point.cell) for point in points])
        case Format.TABLE:
            if not fronts:
                write_line(f"Sweep {sweep} has no cells yet.")
            for number, front in enumerate(fronts):
                if number:
                    write()
                _print(front)


def _value_names(objectives: Sequence[Objective]) -> list[str]:
    return [f"{one}_{part}" for one in objectives for part in ("value", "low", "high")]


def _print(front: ShownFront) -> None:
    write_line(front.title, style="bold")
    if front.points:
        titles = [title for one in front.objectives for title in objective_titles(one)]
        has_cells = len(front.cells) > 1
        columns = [
            *numbers("trial", *(["GPUs"] if has_cells else []), *titles),
            Column("front"),
            Column("layout", wrap=True),
        ]
        on = [point for point in front.points if point.is_on_front]
        possible = [point for point in front.points if not point.is_on_front]
        shown = [*on, *possible[:MAX_POSSIBLE_SHOWN]]
        write_table(columns, [_row(point, front.objectives, has_cells) for point in shown])
        for line in trial_line.unchecked_lines([point.trial for point in shown]):
            write_line(f"  {line}", style="yellow")
    write_line(f"  {front.text}", style="dim")


def _row(
    point: ShownPoint, objectives: Sequence[Objective], has_cells: bool
) -> list[str | StyledText]:
    cells = [text for one in objectives for text in objective_text(one, point.values[one])]
    return [
        str(point.trial.id),
        *([str(point.cell.cell.num_gpus)] if has_cells else []),
        *cells,
        StyledText("yes", "green") if point.is_on_front else "could be",
        trial_line.layout_text(point.trial),
    ]
