"""The runs of one cell's measured trials, and their step times at the machine's present speed.

All runs have one fingerprint, since runs with other software are not compared. The machine's drift
is taken out if repeats show it (core/trial/drift.py). Nothing here decides what to repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.drift import Drift, SpeedChange, fit
from orchestrator.core.trial.run import Run
from orchestrator.core.trial.winner import median_run
from orchestrator.search.blas_threads import one_blas_thread


@dataclass(eq=False)
class MeasuredRuns:
    """The runs by trial, in order of time."""

    of_trial: dict[int, list[Run]] = field(default_factory=dict)
    # Runs beyond the first of each trial.
    num_repeats: int = 0
    _layouts: dict[int, Layout] = field(default_factory=dict)
    # The trial of the fastest layout, if it is known.
    _leader: int | None = None
    # Fitted since the last repeat; None: not fitted yet.
    _fitted: Drift | None = None

    def note(self, trial_id: int, layout: Layout, run: Run) -> None:
        """Add a run that was measured."""
        self._layouts[trial_id] = layout
        some = self.of_trial.setdefault(trial_id, [])
        some.append(run)
        is_repeat = len(some) > 1
        if is_repeat:
            self._fitted = None
            self.num_repeats += 1
        if trial_id == self._leader or is_repeat:
            self._leader = None  # it may have fallen behind
        elif self._leader is not None:
            self._leader = min(self._leader, trial_id, key=self._speed_order)

    @property
    def num_trials(self) -> int:
        """Return how many trials were measured."""
        return len(self.of_trial)

    def layout_of(self, trial_id: int) -> Layout:
        """Return the layout of a measured trial."""
        return self._layouts[trial_id]

    def nodes_of(self, trial_id: int) -> frozenset[str]:
        """Return the nodes that runs of a measured trial were on."""
        return frozenset(node for run in self.of_trial[trial_id] for node in run.nodes)

    def trial_of(self, layout: Layout) -> int | None:
        """Return the measured trial of a layout."""
        return next((trial_id for trial_id, mine in self._layouts.items() if mine == layout), None)

    @property
    def newest(self) -> float | None:
        """The time of the newest run. None: it is not known."""
        return max(
            (run.at for some in self.of_trial.values() for run in some if run.at is not None),
            default=None,
        )

    # -- the order by speed ------------------------------------------------------------------------

    @property
    def leader(self) -> int | None:
        """The trial of the fastest layout. None: nothing was measured."""
        if self._leader is None and self.of_trial:
            seconds = self.seconds
            self._leader = min(seconds, key=lambda trial_id: (seconds[trial_id], trial_id))
        return self._leader

    def best(self) -> tuple[Layout, float] | None:
        """Return the fastest layout and its step time in seconds."""
        leader = self.leader
        return None if leader is None else (self._layouts[leader], self.seconds_of(leader))

    def seconds_of(self, trial_id: int) -> float:
        """Return a trial's step time in seconds, at the machine's present speed."""
        return self.seconds_of_each([trial_id])[trial_id]

    @property
    def seconds(self) -> dict[int, float]:
        """The step time of every trial, as `seconds_of` gives it."""
        return self.seconds_of_each(list(self.of_trial))

    def seconds_of_each(self, trial_ids: Sequence[int]) -> dict[int, float]:
        """Return the step times of trials, as `seconds_of` gives them."""
        if self.change is None:
            return {
                trial_id: median_run(self.of_trial[trial_id]).step_seconds for trial_id in trial_ids
            }
        return self._corrected(trial_ids)

    def _corrected(self, trial_ids: Sequence[int]) -> dict[int, float]:
        """Return the mean of each trial's runs, at the machine's present speed."""
        found = self.drift()
        assert found is not None, "repeats show a change"
        runs = [run for trial_id in trial_ids for run in self.of_trial[trial_id]]
        corrections = iter(found.corrections(runs).tolist())
        logs = {
            trial_id: [log(run.step_seconds) + next(corrections) for run in self.of_trial[trial_id]]
            for trial_id in trial_ids
        }
        return {trial_id: exp(sum(some) / len(some)) for trial_id, some in logs.items()}

    def _speed_order(self, trial_id: int) -> tuple[float, int]:
        return self.seconds_of(trial_id), trial_id

    @property
    def change(self) -> SpeedChange | None:
        """The change of the machine's speed. None: no more than noise, or no repeats."""
        found = self.drift()
        return None if found is None else found.change

    def drift(self) -> Drift | None:
        """Return the drift that repeats show. None: there are no repeats."""
        if self._fitted is None and self.num_repeats:
            with one_blas_thread():
                self._fitted = fit(self.of_trial)
        return self._fitted
