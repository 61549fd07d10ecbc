"""The heat map of the best layouts: each problem by number of GPUs, with the layout to use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from orchestrator.core.trial.lifecycle import UNFINISHED, TrialState
from orchestrator.report import quantities as show
from orchestrator.report.pictures.picture import SCALE, Picture, PictureAxis, figure
from orchestrator.report.remarks import why_no_best
from orchestrator.report.sweep_rows import SweepRows

if TYPE_CHECKING:
    from db.read.rows import CellStatus

# Pixels, and characters of a line within a cell.
ROW_HEIGHT, MARGIN = 96, 120
MOST_CHARACTERS = 15


class Found(StrEnum):
    """The result of a problem on a number of GPUs: a best layout, or why there is none."""

    BEST = "best"
    NOTHING_FITS = "nothing fits"
    NOTHING_WORKED = "nothing could be measured"
    NOT_TRIED = "not measured yet"
    # No cell has this number of GPUs.
    EMPTY = "not asked for"


@dataclass(frozen=True, kw_only=True)
class HeatCell:
    """One cell of a sweep, with its fastest layout. Unknown is None."""

    problem: str
    num_gpus: int
    found: Found
    why: str = ""  # there is no best layout
    trial_id: int | None = None
    layout: str = ""
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    num_tied: int = 1


def heat_cells(sweeps: Sequence[SweepRows]) -> tuple[HeatCell, ...]:
    """Return what was found in each cell. Problems of several sweeps have the sweep's name."""
    cells = [(sweep, status) for sweep in sweeps for status in sweep.cells]
    asked = Counter((problem_of(status), status.cell.cell.num_gpus) for _, status in cells)
    repeated = {problem for (problem, _), count in asked.items() if count > 1}
    return tuple(
        _heat_cell(sweep, status, in_several=problem_of(status) in repeated)
        for sweep, status in cells
    )


def problem_of(status: CellStatus) -> str:
    """Return the problem of a cell: `llama-8b, sequence 4,096, batch 256`."""
    cell = status.cell.cell
    return f"{cell.model.name}, sequence {cell.sequence_length:,}, batch {cell.global_batch_size:,}"


def _heat_cell(sweep: SweepRows, status: CellStatus, *, in_several: bool) -> HeatCell:
    cell, ranking = status.cell.cell, sweep.rankings.get(status.cell.id)
    problem = problem_of(status) + (f" ({sweep.name})" if in_several else "")
    if ranking is None or not ranking.leading:
        return HeatCell(
            problem=problem,
            num_gpus=cell.num_gpus,
            found=_without_best(status.num_trials),
            why=why_no_best(status),
        )
    best = ranking.leading[0]
    return HeatCell(
        problem=problem,
        num_gpus=cell.num_gpus,
        found=Found.BEST,
        trial_id=best.id,
        layout=best.layout.short,
        tokens_per_second_per_gpu=best.tokens_per_second_per_gpu,
        mfu=best.mfu,
        num_tied=max(len(ranking.tied), 1),
    )


def _without_best(num_trials: Mapping[TrialState, int]) -> Found:
    count = num_trials.get
    if any(count(state, 0) for state in UNFINISHED | {TrialState.MEASURED}):
        return Found.NOT_TRIED
    if count(TrialState.FAILED, 0):
        return Found.NOTHING_WORKED
    if count(TrialState.OUT_OF_MEMORY, 0) or count(TrialState.PRUNED, 0):
        return Found.NOTHING_FITS
    return Found.NOT_TRIED


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw a row for each problem, and a column for each number of GPUs."""
    found = heat_cells(sweeps)
    blank = Picture(
        name="best-layouts",
        title="The best layout of each cell",
        question="What do I run tomorrow?",
    )
    if not found:
        return replace(blank, why_empty="The sweep has no cells yet; `sweep run` makes them.")
    problems = list(dict.fromkeys(one.problem for one in found))
    numbers = sorted({one.num_gpus for one in found})
    at = {(one.problem, one.num_gpus): one for one in found}
    by_mfu = any(one.mfu is not None for one in found)
    colors, texts, ids = [], [], []
    for problem in problems:
        row = [at.get((problem, number)) for number in numbers]
        colors.append([None if one is None else _color(one, by_mfu=by_mfu) for one in row])
        texts.append([Found.EMPTY.value if one is None else _text(one) for one in row])
        ids.append([None if one is None else one.trial_id for one in row])
    bar = {"title": {"text": "MFU"}, "tickformat": ".0%", "thickness": 12}
    if not by_mfu:
        bar = {"title": {"text": "tokens/s/GPU"}, "thickness": 12}
    trace = {
        "type": "heatmap",
        "x": [_gpus(number) for number in numbers],
        "y": problems,
        "z": colors,
        "customdata": ids,
        "colorscale": SCALE,
        "colorbar": bar,
        "xgap": 3,
        "ygap": 3,
        "hovertemplate": "%{y}<br>%{x}<extra></extra>",
    }
    labels = [
        _label(_gpus(number), problem, text, is_colored=color is not None)
        for problem, row, row_colors in zip(problems, texts, colors, strict=True)
        for number, text, color in zip(numbers, row, row_colors, strict=True)
    ]
    return replace(
        blank,
        caption=_caption(found),
        figure=figure(
            [trace],
            x=PictureAxis(title="GPUs", names=[_gpus(number) for number in numbers]),
            y=PictureAxis(title="", names=list(reversed(problems))),
            height=MARGIN + ROW_HEIGHT * len(problems),
            annotations=labels,
        ),
    )


def _label(x: str, y: str, text: str, *, is_colored: bool) -> dict[str, Any]:
    """Return the text of a field as one of plotly's annotations, readable on a color."""
    label = {"x": x, "y": y, "text": text, "showarrow": False, "font": {"size": 11}}
    if is_colored:
        label |= {"bgcolor": "rgba(255,255,255,0.85)", "font": {"size": 11, "color": "#111111"}}
    return label


def _gpus(number: int) -> str:
    return show.counted(number, "GPU")


def _color(one: HeatCell, *, by_mfu: bool) -> float | None:
    return one.mfu if by_mfu else one.tokens_per_second_per_gpu


def _text(one: HeatCell) -> str:
    if one.found is not Found.BEST:
        return f"<i>{one.found.value}</i>"
    rate = f"{show.tokens_rate(one.tokens_per_second_per_gpu)} tok/s/GPU"
    first = rate if one.mfu is None else f"MFU {show.percent(one.mfu)}"
    lines = [f"<b>{first}</b>", *map(escape, wrap(one.layout, MOST_CHARACTERS))]
    if one.num_tied > 1:
        lines.append(f"<i>{one.num_tied} tied</i>")
    return "<br>".join(lines)


def _caption(found: Sequence[HeatCell]) -> str:
    alone = Counter(one.found for one in found if one.num_tied == 1)
    tied = sorted(one.num_tied for one in found if one.num_tied > 1)
    parts = [f"{alone[kind]} {kind.value}" for kind in Found if alone[kind]]
    if tied:
        most = f" to {tied[-1]}" if tied[-1] > tied[0] else ""
        parts.insert(0, f"{len(tied)} with {tied[0]}{most} tied layouts, the fastest of them shown")
    return f"{show.counted(len(found), 'cell')}: {', '.join(parts)}."
