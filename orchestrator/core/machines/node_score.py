"""How much slower each node is than the others, told from trials: what the layout explains is taken out, the rest is held against nodes.

A trial takes as long as the slowest node of its gang. Nodes are suspected one after another, the plainest first, and nobody is blamed
for what another one explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.physics.robust_fit import robust_sd

Floats = NDArray[np.float64]

RUN_SD = (
    0.02  # relative, of runs of one layout on like nodes: published repeats differ by 0.7 to 4 %
)
RUN_WORTH = 8.0  # runs that outweigh it
PREDICTION_SD = (
    0.15  # relative: what a search's prediction of a layout misses, before the sweep has shown it
)
PREDICTION_WORTH = 5.0  # layouts that outweigh it; and of a cell, what all cells' predictions miss
CELL_SD = 3.0  # log: how far all predictions of a cell may be off together; no limit in practice
CLIP = 3.0  # standard deviations: one run that was disturbed says no more than this
SLOWER = 0.05  # relative: less than that is not worth a node
SURE = 4.5  # standard errors, among few nodes: looked at after every trial, on every node, and still one false alarm in thousands of trials
FEW = 8  # nodes; among more it takes more: the luckless one of thousands is three and a half standard errors off by chance alone
FEWEST_RUNS = 4  # of a node: fewer may all be one disturbance
NEWEST_RUNS = 2000  # that are looked at: older ones tell of nodes as they were


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRun:
    """One measurement, as it tells of nodes."""

    nodes: tuple[str, ...]
    cell: int
    trial: int  # runs of one trial are of one layout
    log_seconds: float  # of a step
    log_predicted: float | None = None  # as the search predicted it; None: nobody did


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeScore:
    """What the runs say of one node."""

    num_runs: int
    slower: float  # relative, than nodes that are well; negative: faster
    standard_error: float
    is_slow: bool  # plainly, and by enough to matter
    twins: tuple[
        str, ...
    ] = ()  # nodes that took part in the very same runs: nobody can tell which of them it is


def score_nodes(runs: Sequence[NodeRun]) -> dict[str, NodeScore]:
    """The score of every node that took part. With nothing to compare a node with, its standard error is infinite.

    Generalised least squares: a run is its cell's level, its layout's departure from the prediction, its slowest node's slowness, and
    noise. Each node's slowness is estimated as if it alone were slow; the plainest is believed, then the others beside it.
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
        # Of a gang that has a slow node already nobody can tell how the others are.
        open_to = member * (explained == 0)[:, None]
        slowness, error = model.effects(explained, open_to)
        plain = _plainest(slowness, error, open_to, model, explained, sure)
        if plain is None:
            break
        whole, its_error = model.effects(
            explained, open_to[:, [plain]], clip=False
        )  # how slow it is, now that it is believed
        slow[plain] = (float(whole[0]), float(its_error[0]))
        explained = np.maximum(explained, member[:, plain] * whole[0])
    return {
        name: _score(
            slow.get(i, (float(slowness[i]), float(error[i]))),
            num_runs=int(member[:, i].sum()),
            is_slow=i in slow,
            twins=twins[i],
        )
        for i, name in enumerate(names)
    }


def how_sure(num_nodes: int) -> float:
    """Standard errors that tell a slow one among so many nodes: whether any is accused by chance is as likely as among few (Bonferroni)."""
    normal = NormalDist()
    return -normal.inv_cdf(normal.cdf(-SURE) * FEW / max(num_nodes, FEW))


def _score(
    effect: tuple[float, float], *, num_runs: int, is_slow: bool, twins: tuple[str, ...]
) -> NodeScore:
    slowness, error = effect
    return NodeScore(
        num_runs=num_runs,
        slower=float(np.expm1(slowness)),
        standard_error=error,
        is_slow=is_slow and not twins,
        twins=twins,
    )


def _membership(runs: Sequence[NodeRun], names: Sequence[str]) -> Floats:
    """1 where a node took part in a run: runs x nodes."""
    place = {name: i for i, name in enumerate(names)}
    member = np.zeros((len(runs), len(names)))
    for row, run in enumerate(runs):
        member[row, [place[name] for name in run.nodes]] = 1.0
    return member


def _twins(names: Sequence[str], member: Floats) -> list[tuple[str, ...]]:
    """The other nodes with the very same runs, of each."""
    same: dict[bytes, list[str]] = {}
    columns = [bits.tobytes() for bits in np.packbits(member.T != 0, axis=1)]
    for name, column in zip(names, columns, strict=True):
        same.setdefault(column, []).append(name)
    return [
        tuple(other for other in same[column] if other != name)
        for name, column in zip(names, columns, strict=True)
    ]


def _plainest(
    slowness: Floats, error: Floats, member: Floats, model: _Model, explained: Floats, sure: float
) -> int | None:
    """The node that is most plainly slow; None: none is by so many standard errors."""
    errors_off = np.where(np.isfinite(error), slowness / error, 0.0)
    enough = (
        (errors_off >= sure) & (slowness >= np.log1p(SLOWER)) & (member.sum(axis=0) >= FEWEST_RUNS)
    )
    suspects = (int(i) for i in np.argsort(-errors_off, kind="stable") if enough[i])
    return next(
        (i for i in suspects if _holds_without_its_worst(i, member, model, explained, sure)), None
    )


def _holds_without_its_worst(
    i: int, member: Floats, model: _Model, explained: Floats, sure: float
) -> bool:
    """Whether a node is plainly slow also without the trial that speaks most against it: no single disturbed run decides."""
    against = np.bincount(model.trials, weights=member[:, i] * model.residuals(explained))
    kept = model.trials != int(np.argmax(against))
    column = member[:, [i]] * kept[:, None]
    slowness, error = model.effects(explained, column, kept=kept)
    return bool(slowness[0] >= sure * error[0] and slowness[0] >= np.log1p(SLOWER))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Model:
    """The runs without their nodes: levels of cells, departures of layouts, noise."""

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
        """What of each run neither its cell nor the nodes that are known to be slow explain, with repeats of a layout held against each other."""
        y = self.y - explained
        level = self._solve(y)
        return y - level

    def effects(
        self,
        explained: Floats,
        member: Floats,
        *,
        kept: NDArray[np.bool_] | None = None,
        clip: bool = True,
    ) -> tuple[Floats, Floats]:
        """Each node's slowness as if it alone were slow, and its standard error: infinite where nothing says what its runs should take."""
        if kept is not None:
            fewer = replace(self, y=self.y[kept], cells=self.cells[kept], trials=self.trials[kept])
            return fewer.effects(explained[kept], member[kept])
        y = self._clipped(self.y - explained) if clip else self.y - explained
        # P = V^-1 - V^-1 C (C' V^-1 C)^-1 C' V^-1, with V the covariance of noise and layouts, C the cells. Of nodes' columns only
        # products with themselves are asked for, so V^-1 is multiplied with what is narrow.
        cells = np.zeros((len(y), self.cells.max() + 1))
        cells[np.arange(len(y)), self.cells] = 1.0
        of_y, of_cells = self._inverse(y[:, None])[:, 0], self._inverse(cells)
        precision = cells.T @ of_cells + np.eye(cells.shape[1]) / CELL_SD**2
        projected = of_y - of_cells @ np.linalg.solve(precision, cells.T @ of_y)
        shared = of_cells.T @ member
        information = self._own_information(member) - np.einsum(
            "ij,ij->j", shared, np.linalg.solve(precision, shared)
        )
        enough = information > 1.0 / CELL_SD**2 * 4  # less is what the levels' own freedom leaves
        slowness = np.divide(
            member.T @ projected, information, out=np.zeros(member.shape[1]), where=enough
        )
        error = np.where(enough, 1.0 / np.sqrt(np.maximum(information, 1e-12)), np.inf)
        return slowness, error

    def _own_information(self, member: Floats) -> Floats:
        """m' V^-1 m of each node's column m of zeros and ones: its runs, less what those of one layout share."""
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
        """V^-1 times columns: runs of one layout share its departure, so V is blocks of noise plus a constant."""
        noise = self.run_sd**2
        order = np.argsort(self.trials, kind="stable")
        counts = np.bincount(self.trials, minlength=len(self.prediction_sd))
        starts = np.flatnonzero(np.diff(self.trials[order], prepend=-1))
        sums = np.zeros((len(counts), columns.shape[1]))
        sums[counts > 0] = np.add.reduceat(columns[order], starts, axis=0)
        found: Floats = (
            columns - self._shared(counts)[self.trials, None] * sums[self.trials]
        ) / noise
        return found

    def _shared(self, counts: NDArray[np.intp]) -> Floats:
        """By layout, how much of the sum over its runs V^-1 takes from each of them."""
        shared: Floats = self.prediction_sd**2 / (self.run_sd**2 + counts * self.prediction_sd**2)
        return shared

    def _solve(self, y: Floats) -> Floats:
        """The level of each run's cell and layout that explains y best."""
        cells = _medians(y, self.cells)[self.cells]
        sums, counts = np.bincount(self.trials, weights=y - cells), np.bincount(self.trials)
        departures = (
            self.prediction_sd**2 / (self.run_sd**2 + counts * self.prediction_sd**2) * sums
        )
        return cells + departures[self.trials] * (counts[self.trials] > 1)

    def _clipped(self, y: Floats) -> Floats:
        """With what is far off brought near: per cell, beyond what layouts and noise do."""
        centre = _medians(y, self.cells)[self.cells]
        reach = CLIP * np.sqrt(self.run_sd**2 + self.prediction_sd[self.trials] ** 2)
        near = centre + np.clip(y - centre, -reach, reach)
        # And within the runs of one layout, beyond what noise does.
        middle = _medians(near, self.trials)[self.trials]
        return np.asarray(middle + np.clip(near - middle, -CLIP * self.run_sd, CLIP * self.run_sd))


def _run_sd(y: Floats, trials: NDArray[np.intp]) -> float:
    """Standard deviation of runs of one layout among themselves, by the median of their departures: a slow node is in fewer than half of them."""
    counts = np.bincount(trials)
    repeated = counts[trials] > 1
    means = np.bincount(trials, weights=y) / counts
    departures = (y - means[trials])[repeated] * np.sqrt(
        counts[trials] / np.maximum(counts[trials] - 1, 1)
    )[repeated]
    return robust_sd(
        departures,
        expected=RUN_SD,
        worth=RUN_WORTH,
        count=float(repeated.sum()) - float((counts > 1).sum()),
    )


def _prediction_sd(misses: Floats, cells: NDArray[np.intp]) -> Floats:
    """What predictions miss in the cell of each: one that is predicted badly says the less of the nodes that it ran on."""
    of_all = robust_sd(
        misses, expected=PREDICTION_SD, worth=PREDICTION_WORTH, count=float(len(misses))
    )
    found = np.empty(len(misses))
    for cell in np.unique(cells):
        mine = cells == cell
        found[mine] = robust_sd(
            misses[mine], expected=of_all, worth=PREDICTION_WORTH, count=float(mine.sum())
        )
    return found


def _medians(values: Floats, groups: NDArray[np.intp]) -> Floats:
    """The median of each group's values."""
    order = np.argsort(groups, kind="stable")
    bounds = np.cumsum(np.bincount(groups))[:-1]
    return np.array(
        [np.median(some) if len(some) else 0.0 for some in np.split(values[order], bounds)]
    )


def evidence_in_words(evidence: Mapping[str, Any]) -> str:
    """Why a node is benched, for people: `trials 25 and 28; last: node_lost: its agent is gone`, `12.0% slower (± 1.1%) by 40 runs`."""
    told = dict(evidence)
    said = []
    if (slower := told.pop("slower", None)) is not None:
        sd, num_runs = told.pop("standard_error", None), told.pop("num_runs", None)
        said.append(
            f"{slower:.1%} slower{f' (± {sd:.1%})' if sd is not None else ''}{f' by {num_runs} runs' if num_runs is not None else ''}"
        )
    if trials := told.pop("trials", None):
        said.append(
            f"trial {trials[0]}"
            if len(trials) == 1
            else f"trials {', '.join(map(str, trials[:-1]))} and {trials[-1]}"
        )
    said += [f"{name.replace('_', ' ')}: {value}" for name, value in told.items()]
    return "; ".join(said)
