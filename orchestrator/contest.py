"""The measured layouts of one cell and all their runs: which is the best so far, and which to measure once more before one is called so.

Under one fingerprint: runs of another are of another contest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from db.rows import TrialRow
from orchestrator.core.layout import Layout
from orchestrator.core.lifecycle import TrialState
from orchestrator.core.spec import Confirm
from orchestrator.core.winner import Run, Verdict, judge, median_run


@dataclass(eq=False)
class Contest:
    """By trial id; filled from the store and by what ends."""

    _layouts: dict[int, Layout] = field(default_factory=dict)
    _runs: dict[int, list[Run]] = field(default_factory=dict)
    _repeating: set[int] = field(default_factory=set)  # trials with a repeat in flight
    _given_up: set[int] = field(default_factory=set)  # trials whose repeat failed: what they have is all there will be

    def note(self, trial_id: int, layout: Layout, run: Run) -> None:
        """A run was measured."""
        self._repeating.discard(trial_id)
        self._layouts[trial_id] = layout
        self._runs.setdefault(trial_id, []).append(run)

    def begin(self, trial_id: int) -> None:
        """A repeat was started."""
        self._repeating.add(trial_id)

    def give_up(self, trial_id: int) -> None:
        """A repeat came to nothing that counts."""
        self._repeating.discard(trial_id)
        self._given_up.add(trial_id)

    def drop(self, trial_id: int) -> None:
        """A repeat came to nothing, by no fault of the layout: it may be asked for again."""
        self._repeating.discard(trial_id)

    def clear(self) -> None:
        """What is measured from now on is of another contest."""
        self._layouts.clear()
        self._runs.clear()

    def best(self) -> tuple[Layout, float] | None:
        """The fastest layout, and the seconds of a step that stand for it."""
        if not self._runs:
            return None
        trial_id = min(self._runs, key=lambda key: (median_run(self._runs[key]).step_seconds, key))
        return self._layouts[trial_id], median_run(self._runs[trial_id]).step_seconds

    def seconds_of(self, trial_id: int) -> float:
        """The seconds of a step that stand for a trial's runs."""
        return median_run(self._runs[trial_id]).step_seconds

    def trial_of(self, layout: Layout) -> int | None:
        """The measured trial of a layout."""
        return next((trial_id for trial_id, mine in self._layouts.items() if mine == layout), None)

    def next_repeat(self, confirm: Confirm) -> tuple[int, Layout, str] | None:
        """What to measure once more, and why; None: it is settled, or the repeats are spent or under way."""
        # A repeat under way counts as one that confirms: what is asked for beside it should not depend on its luck.
        runs = {key: [*some, median_run(some)] if key in self._repeating else some for key, some in self._runs.items()}
        spent = {key: [*some, *[median_run(some)] * confirm.repeats] if key in self._given_up else some for key, some in runs.items()}
        verdict = judge(spent, contenders=confirm.contenders, repeats=confirm.repeats)
        if verdict is None or verdict.repeat is None or verdict.repeat in self._repeating:
            return None
        trial_id = verdict.repeat
        others = len(verdict.tied) - 1
        why = f"run {len(self._runs[trial_id]) + 1} to confirm it, " + (
            f"tied with {others} others so far" if others else "the best so far"
        )
        return trial_id, self._layouts[trial_id], why

    def verdict(self) -> Verdict | None:
        """How it stands at the top; None: nothing was measured."""
        return judge(self._runs, contenders=1, repeats=0)

    def tied(self) -> Sequence[Layout]:
        """The layouts that share the first place, fastest first: one alone is the winner."""
        verdict = self.verdict()
        return [] if verdict is None else [self._layouts[trial_id] for trial_id in verdict.tied]


def contest_of(trials: Iterable[TrialRow], repeats: Mapping[int, Sequence[Run]]) -> Contest:
    """What stored trials come to, as far as they were measured under the current fingerprint; `repeats` as the store gives them."""
    contest = Contest()
    for trial in trials:
        if trial.state is TrialState.MEASURED and trial.is_current_fingerprint and trial.step_seconds_median is not None:
            alone = [Run(step_seconds=trial.step_seconds_median, relative_confidence=trial.relative_confidence)]
            for run in repeats.get(trial.id, alone):
                contest.note(trial.id, trial.layout, run)
    return contest
