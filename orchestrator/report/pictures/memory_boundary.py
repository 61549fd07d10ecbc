"""The boundary of memory: which micro-batches fit, for each way to divide the model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report import quantities as show
from orchestrator.report.pictures.picture import (
    BLUE,
    GREY,
    HOVER_TRIAL,
    ORANGE,
    VERMILION,
    Picture,
    PictureAxis,
    Trace,
    figure,
)
from orchestrator.report.sweep_rows import SweepRows

if TYPE_CHECKING:
    from db.read.rows import TrialDetail

MOST_ROWS = 40
_STATES = {
    TrialState.MEASURED: ("fits", "circle", BLUE),
    TrialState.OUT_OF_MEMORY: ("out of memory", "x", ORANGE),
    TrialState.PRUNED: ("pruned: needs at least as much", "circle-open", GREY),
}


@dataclass(frozen=True, kw_only=True)
class BoundaryPoint:
    """A trial that fits or does not, by its micro-batch and by the rest of its layout."""

    trial_id: int
    rest: str
    micro_batch_size: int
    state: TrialState
    # Predicted bytes over those of the device. None: nothing was predicted, or no limit is known.
    predicted_share: float | None

    @property
    def is_predicted_to_fit(self) -> bool | None:
        """True if predicted memory is at most the device's; None: one of them is not known."""
        return None if self.predicted_share is None else self.predicted_share <= 1

    @property
    def is_wrong(self) -> bool:
        """True if the prediction was tried, and did not come true."""
        if self.is_predicted_to_fit is None or self.state is TrialState.PRUNED:
            return False
        return self.is_predicted_to_fit is not (self.state is TrialState.MEASURED)


@dataclass(frozen=True, kw_only=True)
class Foretold:
    """Counts of right and wrong predictions of which trials fit. Pruned trials were not tried."""

    fits: int = 0  # predicted to fit, and did
    # Predicted to fit, and ran out of memory.
    missed: int = 0
    wrongly_too_large: int = 0  # predicted not to fit, and did
    # Predicted not to fit, and ran out of memory.
    caught: int = 0


def points(sweeps: Sequence[SweepRows]) -> tuple[BoundaryPoint, ...]:
    """Return a point for each trial that fits or does not."""
    cells = {one.cell.id for sweep in sweeps for one in sweep.trials}
    limits = {sweep.name: _largest_limit(sweep) for sweep in sweeps}
    return tuple(
        BoundaryPoint(
            trial_id=one.trial.id,
            rest=_rest(one, with_cell=len(cells) > 1),
            micro_batch_size=one.trial.layout.micro_batch_size,
            state=one.trial.state,
            predicted_share=_predicted_share(one, limits[sweep.name]),
        )
        for sweep in sweeps
        for one in sweep.trials
        if one.trial.state in _STATES
    )


def _largest_limit(sweep: SweepRows) -> int | None:
    """The memory of a device, for trials that did not live to tell it."""
    known = (one.trial.device_memory_bytes for one in sweep.trials)
    return max((limit for limit in known if limit), default=None)


def _predicted_share(one: TrialDetail, usual_limit: int | None) -> float | None:
    predicted, limit = one.trial.predicted_memory_bytes, one.trial.device_memory_bytes
    limit = limit or usual_limit
    return None if predicted is None or limit is None else predicted / limit


def _rest(one: TrialDetail, *, with_cell: bool) -> str:
    """The layout without its micro-batch and accumulation, which follow from each other."""
    words = [
        word
        for word in one.trial.layout.short.split()
        if not word.startswith(("mbs", "ga")) or "=" in word
    ]
    cell = one.cell.cell
    return " ".join(
        [
            f"{cell.model.name} {cell.num_gpus} GPUs s{cell.sequence_length}:" if with_cell else "",
            *words,
        ]
    ).strip()


def foretold(found: Sequence[BoundaryPoint]) -> Foretold:
    """Return the confusion counts of predicted memory, where a prediction and a limit are known."""
    counts = Counter(
        (one.is_predicted_to_fit, one.state) for one in found if one.is_predicted_to_fit is not None
    )
    return Foretold(
        fits=counts[True, TrialState.MEASURED],
        missed=counts[True, TrialState.OUT_OF_MEMORY],
        wrongly_too_large=counts[False, TrialState.MEASURED],
        caught=counts[False, TrialState.OUT_OF_MEMORY],
    )


def crossings(found: Sequence[BoundaryPoint]) -> dict[str, float]:
    """Return the micro-batch at which predicted memory reaches the device's, by row.

    It is interpolated linearly between the largest trial that was predicted to fit and the next one
    of its row. A row that lacks one of the two has none.
    """
    rows: defaultdict[str, list[BoundaryPoint]] = defaultdict(list)
    for one in found:
        if one.predicted_share is not None:
            rows[one.rest].append(one)
    places = {}
    for rest, some in rows.items():
        some.sort(key=lambda one: one.micro_batch_size)
        for low, high in pairwise(some):
            below, above = low.predicted_share or 0.0, high.predicted_share or 0.0
            if below <= 1 < above:
                share = (1 - below) / (above - below)
                size = low.micro_batch_size
                places[rest] = size + share * (high.micro_batch_size - size)
    return places


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw rows of layouts that differ in the micro-batch alone, those with a boundary first."""
    found = points(sweeps)
    blank = Picture(
        name="memory-boundary",
        title="How large a micro-batch fits",
        question="How far can I push?",
    )
    if not found:
        return replace(blank, why_empty="No trial has ended yet; `sweep run` measures some.")
    rows: defaultdict[str, set[TrialState]] = defaultdict(set)
    for one in found:
        rows[one.rest].add(one.state)
    if all(states == {TrialState.MEASURED} for states in rows.values()):
        return replace(
            blank,
            why_empty=f"All {len(found):,} layouts that were tried fit. Larger values of"
            " axes.micro_batch_size would show the boundary.",
        )
    # Rows in which something fits and something does not tell most.
    names = sorted(rows, key=lambda name: (-len(rows[name]), name))[:MOST_ROWS]
    sizes = sorted({one.micro_batch_size for one in found})
    traces = []
    for state, (name, symbol, color) in _STATES.items():
        some = [one for one in found if one.state is state and one.rest in names]
        if some:
            traces.append(_trace(some, name, symbol, color, size=9))
    wrong = [one for one in found if one.is_wrong and one.rest in names]
    if wrong:
        traces.append(_trace(wrong, "the prediction was wrong", "circle-open", VERMILION, size=16))
    limits = {rest: size for rest, size in crossings(found).items() if rest in names}
    if limits:
        traces.append(_limit_marks(limits))
    caption = _caption(foretold(found))
    if limits:
        caption += (
            " A vertical line marks the micro-batch at which predicted memory reaches the device's."
        )
    if len(rows) > len(names):
        caption += f" Shown are {len(names)} of {len(rows):,} rows, those with a boundary first."
    return replace(
        blank,
        caption=caption,
        figure=figure(
            traces,
            x=PictureAxis(
                title="micro-batch size (sequences)",
                is_log=True,
                ticks=sizes,
                texts=[f"{size:,}" for size in sizes],
            ),
            y=PictureAxis(title="", names=list(reversed(names))),
            height=160 + 20 * len(names),
        ),
    )


def _trace(
    some: Sequence[BoundaryPoint], name: str, symbol: str, color: str, *, size: int
) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [one.micro_batch_size for one in some],
        "y": [one.rest for one in some],
        "customdata": [one.trial_id for one in some],
        "hovertemplate": HOVER_TRIAL,
        "marker": {"symbol": symbol, "size": size, "color": color},
    }


def _limit_marks(limits: Mapping[str, float]) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "predicted limit",
        "x": [round(size, 3) for size in limits.values()],
        "y": list(limits),
        "hovertemplate": "predicted limit: micro-batch %{x:.3g}<extra></extra>",
        "marker": {"symbol": "line-ns", "size": 15, "line": {"width": 2, "color": VERMILION}}
        | {"color": VERMILION},
    }


def _caption(it: Foretold) -> str:
    if not it.fits + it.missed + it.wrongly_too_large + it.caught:
        return "No memory was predicted."
    oom, fit = it.missed + it.caught, it.fits + it.wrongly_too_large
    return (
        f"Of {show.counted(oom, 'trial')} that ran out of memory, the prediction found"
        f" {it.caught:,} and missed {it.missed:,}; of {fit:,} that fit, it called"
        f" {it.wrongly_too_large:,} too large."
    )
