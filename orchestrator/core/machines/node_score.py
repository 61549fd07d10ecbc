"""Estimates from trials how much slower each node is than the others.

A trial takes as long as the slowest node of its gang. What its layout explains is taken out first.
Nodes are then judged slow one after another, the clearest case first; no node is judged by slowness
that another one explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.machines.node_run import NEWEST_RUNS, NodeRun
from orchestrator.core.physics.robust_fit import robust_sd
from orchestrator.core.problem.arrays import Floats, Mask

# Relative, of runs of one layout on equal nodes: published repeats differ by 0.7 to 4 %.
RUN_SD = 0.02
RUN_PRIOR_COUNT = 8.0  # runs that outweigh it
# Relative error of a search's prediction of a layout, before the sweep has shown it.
PREDICTION_SD = 0.15
# Layouts that outweigh it; in a cell, layouts that outweigh the error of all cells' predictions.
PREDICTION_PRIOR_COUNT = 5.0
# Log: how far all predictions of a cell may be off together; no limit in practice.
CELL_SD = 3.0
CLIP = 3.0  # standard deviations, for one disturbed run
SLOWER = 0.05  # relative: less does not matter
# Standard errors, among few nodes. Every node is tested after every trial, and still a healthy node
# is judged slow only once in thousands of trials.
SURE = 4.5
# Nodes. Among more of them it takes more: by chance alone the worst of thousands is three and a
# half standard errors off.
FEW = 8
FEWEST_RUNS = 4  # of a node


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeScore:
    """The slowness of one node, as the runs show it."""

    num_runs: int
    slower: float  # relative, than healthy nodes; negative: faster
    standard_error: float
    is_slow: bool  # clearly, and by enough to matter
    # Nodes with exactly the same runs, which cannot be told apart from it.
    twins: tuple[str, ...] = ()


def score_nodes(runs: Sequence[NodeRun]) -> dict[str, NodeScore]:
    """Return the score of every node that took part; the error is infinite without a comparison.

    Generalised least squares: a run is the sum of its cell's level, its layout's departure from the
    prediction, its slowest node's slowness, and noise. Each node's slowness is estimated as if it
    alone were slow. The clearest case is accepted, then the others are estimated given that one.
    """
    runs = runs[-NEWEST_RUNS:]
    if not runs:
        return {}
    names = sorted({name for run in runs for name in run.nodes})
    member, sure = _membership(runs, names), how_sure(len(names))
    model = _Model.of(runs)
    twins = _twins(names, member)
    slow: dict[int, tuple[float, float]] = {}
    explained = np.zeros(len(runs))
    while True:
        # A gang with a slow node shows nothing of its other nodes.
        open_to = member * (explained == 0)[:, None]
        slowness, error = model.effects(explained, open_to)
        clearest = _clearest(slowness, error, open_to, model, explained, sure)
        if clearest is None:
            break
        whole, its_error = model.effects(explained, open_to[:, [clearest]], clip=False)
        slow[clearest] = (float(whole[0]), float(its_error[0]))
        explained = np.maximum(explained, member[:, clearest] * whole[0])
    scores: dict[str, NodeScore] = {}
    for i, name in enumerate(names):
        log_slower, standard_error = slow.get(i, (float(slowness[i]), float(error[i])))
        scores[name] = NodeScore(
            num_runs=int(member[:, i].sum()),
            slower=float(np.expm1(log_slower)),
            standard_error=standard_error,
            is_slow=i in slow and not twins[i],
            twins=twins[i],
        )
    return scores


def how_sure(num_nodes: int) -> float:
    """Return the standard errors that show a slow node among `num_nodes`.

    It is as unlikely as among few nodes that any healthy one is judged slow (Bonferroni).
    """
    normal = NormalDist()
    return -normal.inv_cdf(normal.cdf(-SURE) * FEW / max(num_nodes, FEW))


def _membership(runs: Sequence[NodeRun], names: Sequence[str]) -> Floats:
    """Runs x nodes: 1 if the node took part in the run."""
    place = {name: i for i, name in enumerate(names)}
    member = np.zeros((len(runs), len(names)))
    for row, run in enumerate(runs):
        member[row, [place[name] for name in run.nodes]] = 1.0
    return member


def _twins(names: Sequence[str], member: Floats) -> list[tuple[str, ...]]:
    """Return for each node the other nodes that took part in exactly the same runs."""
    same: dict[bytes, list[str]] = {}
    columns = [bits.tobytes() for bits in np.packbits(member.T != 0, axis=1)]
    for name, column in zip(names, columns, strict=True):
        same.setdefault(column, []).append(name)
    return [
        tuple(other for other in same[column] if other != name)
        for name, column in zip(names, columns, strict=True)
    ]


def _clearest(
    slowness: Floats, error: Floats, member: Floats, model: _Model, explained: Floats, sure: float
) -> int | None:
    """The node that is most clearly slow; None: none is by `sure` standard errors."""
    errors_off = np.where(np.isfinite(error), slowness / error, 0.0)
    matters = (slowness >= np.log1p(SLOWER)) & (member.sum(axis=0) >= FEWEST_RUNS)
    enough = matters & (errors_off >= sure)
    for i in np.argsort(-errors_off, kind="stable"):
        if enough[i] and _is_slow_without_its_worst(int(i), member, model, explained, sure):
            return int(i)
    return None


def _is_slow_without_its_worst(
    i: int, member: Floats, model: _Model, explained: Floats, sure: float
) -> bool:
    """Return whether a node is clearly slow without its worst trial, which may be disturbed."""
    against = np.bincount(model.trials, weights=member[:, i] * model.residuals(explained))
    kept = model.trials != int(np.argmax(against))
    if not kept.any():
        return False  # no other trial ran
    column = member[:, [i]] * kept[:, None]
    slowness, error = model.effects(explained, column, kept=kept)
    return bool(slowness[0] >= sure * error[0] and slowness[0] >= np.log1p(SLOWER))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Model:
    """The runs without the effects of nodes: levels of cells, departures of layouts, noise."""

    y: Floats  # log of measured over predicted
    cells: NDArray[np.intp]
    trials: NDArray[np.intp]
    run_sd: float
    prediction_sd: Floats  # of each trial's layout

    @classmethod
    def of(cls, runs: Sequence[NodeRun]) -> _Model:
        y = np.array([run.log_seconds - (run.log_predicted or 0.0) for run in runs])
        cells = np.unique([run.cell for run in runs], return_inverse=True)[1]
        trials = np.unique([run.trial for run in runs], return_inverse=True)[1]
        foretold = np.ones(trials.max() + 1, dtype=bool)
        foretold[trials] = [run.log_predicted is not None for run in runs]
        run_sd = _run_sd(y, trials)
        of_trials = np.bincount(trials, weights=y) / np.bincount(trials)
        cell_of = np.zeros(len(of_trials), dtype=np.intp)
        cell_of[trials] = cells
        misses = of_trials - _medians(of_trials, cell_of)[cell_of]
        known = _prediction_sd(misses[foretold], cell_of[foretold])
        prediction_sd = np.full(len(of_trials), CELL_SD)
        prediction_sd[foretold] = known
        return cls(y=y, cells=cells, trials=trials, run_sd=run_sd, prediction_sd=prediction_sd)

    def residuals(self, explained: Floats) -> Floats:
        """The part of each run that its cell, its layout and known slow nodes do not explain."""
        y = self.y - explained
        return y - self._level(y)

    def effects(
        self,
        explained: Floats,
        member: Floats,
        *,
        kept: Mask | None = None,
        clip: bool = True,
    ) -> tuple[Floats, Floats]:
        """Each node's slowness as if it alone were slow, and its standard error.

        The error is infinite if nothing shows what its runs should take.
        """
        if kept is not None:
            fewer = replace(self, y=self.y[kept], cells=self.cells[kept], trials=self.trials[kept])
            return fewer.effects(explained[kept], member[kept])
        y = self._clipped(self.y - explained) if clip else self.y - explained
        # P = V^-1 - V^-1 C (C' V^-1 C)^-1 C' V^-1, with V the covariance of noise and layouts, C
        # the cells. Only products of nodes' columns with themselves are needed, so V^-1 is
        # multiplied with narrow matrices only.
        cells = np.zeros((len(y), self.cells.max() + 1))
        cells[np.arange(len(y)), self.cells] = 1.0
        of_y, of_cells = self._inverse(y[:, None])[:, 0], self._inverse(cells)
        precision = cells.T @ of_cells + np.eye(cells.shape[1]) / CELL_SD**2
        projected = of_y - of_cells @ np.linalg.solve(precision, cells.T @ of_y)
        shared = of_cells.T @ member
        of_levels = np.einsum("ij,ij->j", shared, np.linalg.solve(precision, shared))
        information = self._own_information(member) - of_levels
        # Less than this may come from the levels' own freedom.
        enough = information > 1.0 / CELL_SD**2 * 4
        slowness = np.divide(
            member.T @ projected, information, out=np.zeros(member.shape[1]), where=enough
        )
        error = np.where(enough, 1.0 / np.sqrt(np.maximum(information, 1e-12)), np.inf)
        return slowness, error

    def _own_information(self, member: Floats) -> Floats:
        """m' V^-1 m of each node's column m: its runs, less what runs of one layout share."""
        counts = np.bincount(self.trials, minlength=len(self.prediction_sd))
        shared = self._shared(counts)
        alone = counts[self.trials] == 1
        found: Floats = np.where(alone, 1.0 - shared[self.trials], 1.0) @ member
        repeated = np.flatnonzero(~alone)
        if len(repeated):
            places = np.unique(self.trials[repeated], return_inverse=True)
            sums = np.zeros((len(places[0]), member.shape[1]))
            np.add.at(sums, places[1], member[repeated])
            found = found - shared[places[0]] @ sums**2
        return found / self.run_sd**2

    def _inverse(self, columns: Floats) -> Floats:
        """V^-1 times columns. V has a block for each layout: noise plus a constant."""
        noise = self.run_sd**2
        order = np.argsort(self.trials, kind="stable")
        counts = np.bincount(self.trials, minlength=len(self.prediction_sd))
        starts = np.flatnonzero(np.diff(self.trials[order], prepend=-1))
        sums = np.zeros((len(counts), columns.shape[1]))
        sums[counts > 0] = np.add.reduceat(columns[order], starts, axis=0)
        shared = self._shared(counts)[self.trials, None] * sums[self.trials]
        found: Floats = (columns - shared) / noise
        return found

    def _shared(self, counts: NDArray[np.intp]) -> Floats:
        """By layout: the part of the sum over its runs that V^-1 subtracts from each of them."""
        shared: Floats = self.prediction_sd**2 / (self.run_sd**2 + counts * self.prediction_sd**2)
        return shared

    def _level(self, y: Floats) -> Floats:
        """The level of each run's cell and layout that explains y best."""
        cells = _medians(y, self.cells)[self.cells]
        counts = np.bincount(self.trials)
        departures = self._shared(counts) * np.bincount(self.trials, weights=y - cells)
        return cells + departures[self.trials] * (counts[self.trials] > 1)

    def _clipped(self, y: Floats) -> Floats:
        """Limit how far runs are off: in a cell, to what layouts and noise can cause."""
        centre = _medians(y, self.cells)[self.cells]
        reach = CLIP * np.sqrt(self.run_sd**2 + self.prediction_sd[self.trials] ** 2)
        near = centre + np.clip(y - centre, -reach, reach)
        # Among runs of one layout, to what noise can cause.
        middle = _medians(near, self.trials)[self.trials]
        return np.asarray(middle + np.clip(near - middle, -CLIP * self.run_sd, CLIP * self.run_sd))


def _run_sd(y: Floats, trials: NDArray[np.intp]) -> float:
    """Standard deviation of runs of one layout.

    It uses the median departure, since a slow node is in fewer than half of the runs.
    """
    counts = np.bincount(trials)
    repeated = counts[trials] > 1
    means = np.bincount(trials, weights=y) / counts
    unbiased = np.sqrt(counts[trials] / np.maximum(counts[trials] - 1, 1))
    departures = ((y - means[trials]) * unbiased)[repeated]
    count = float(repeated.sum()) - float((counts > 1).sum())
    return robust_sd(departures, expected=RUN_SD, prior_count=RUN_PRIOR_COUNT, count=count)


def _prediction_sd(misses: Floats, cells: NDArray[np.intp]) -> Floats:
    """The error of predictions, by cell: badly predicted cells show less of their nodes."""

    def sd(some: Floats, expected: float) -> float:
        return robust_sd(
            some, expected=expected, prior_count=PREDICTION_PRIOR_COUNT, count=float(len(some))
        )

    of_all, found = sd(misses, PREDICTION_SD), np.empty(len(misses))
    for cell in np.unique(cells):
        found[cells == cell] = sd(misses[cells == cell], of_all)
    return found


def _medians(values: Floats, groups: NDArray[np.intp]) -> Floats:
    """The median of each group's values."""
    order = np.argsort(groups, kind="stable")
    bounds = np.cumsum(np.bincount(groups))[:-1]
    return np.array(
        [np.median(some) if len(some) else 0.0 for some in np.split(values[order], bounds)]
    )


def evidence_in_words(evidence: Mapping[str, Any]) -> str:
    """Describe why a node is benched: `trials 25 and 28; last: node_lost: its agent is gone`."""
    left = dict(evidence)
    texts = []
    if (slower := left.pop("slower", None)) is not None:
        sd, num_runs = left.pop("standard_error", None), left.pop("num_runs", None)
        text = f"{slower:.1%} slower"
        text += "" if sd is None else f" (± {sd:.1%})"
        texts.append(text if num_runs is None else f"{text} by {num_runs} runs")
    if trials := list(map(str, left.pop("trials", None) or ())):
        *others, last = trials
        texts.append(f"trials {', '.join(others)} and {last}" if others else f"trial {last}")
    texts += [f"{name.replace('_', ' ')}: {value}" for name, value in left.items()]
    return "; ".join(texts)
