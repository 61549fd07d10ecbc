"""The measured layouts of one cell and all their runs: which is the best so far, and which to measure once more before one is called so.

Under one fingerprint: runs of another are of another contest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from db.rows import Repeats, TrialRow
from orchestrator.core.failures import FailureKind, may_retry
from orchestrator.core.layout import Layout
from orchestrator.core.lifecycle import TrialState
from orchestrator.core.spec import Confirm
from orchestrator.core.winner import Run, Verdict, judge, median_run

CONTENDERS = 16  # of a cell's fastest, that are compared with each other where results are shown


@dataclass(eq=False)
class Contest:
    """By trial id; filled from the store and by what ends."""

    _layouts: dict[int, Layout] = field(default_factory=dict)
    _runs: dict[int, list[Run]] = field(default_factory=dict)
    _failures: dict[int, Counter[FailureKind]] = field(default_factory=dict)  # of repeats
    _repeating: set[int] = field(default_factory=set)  # trials with a repeat in flight
    _given_up: set[int] = field(default_factory=set)  # trials whose repeat failed: what they have is all there will be
    _leader: int | None = None  # the trial of the fastest layout, where that is known
    _is_over: bool = False  # what runs now is other software than what was measured: no repeat can count

    def note(self, trial_id: int, layout: Layout, run: Run) -> None:
        """A run was measured."""
        self._repeating.discard(trial_id)
        self._layouts[trial_id] = layout
        self._runs.setdefault(trial_id, []).append(run)
        if trial_id == self._leader:
            self._leader = None  # it may have fallen behind
        elif self._leader is not None:
            self._leader = min(self._leader, trial_id, key=self._place)

    def begin(self, trial_id: int) -> None:
        """A repeat was started."""
        self._repeating.add(trial_id)

    def fail(self, trial_id: int, kind: FailureKind) -> bool:
        """A repeat came to nothing. Says whether it may be tried again: the machine's fault may, as often as a first attempt."""
        self._repeating.discard(trial_id)
        if kind is FailureKind.CANCELLED:
            return True
        failures = self._failures.setdefault(trial_id, Counter())
        failures[kind] += 1
        if may_retry(kind, failures):
            return True
        self._given_up.add(trial_id)
        return False

    def end(self, trial_id: int) -> None:
        """A repeat was measured with other software than its trial: no repeat of this contest can count any more."""
        self._repeating.discard(trial_id)
        self._is_over = True

    def was_repeated(self, trial_id: int) -> bool:
        """Whether a repeat of the trial was begun, whatever became of it."""
        return len(self._runs.get(trial_id, ())) > 1 or trial_id in self._repeating or trial_id in self._failures

    def best(self) -> tuple[Layout, float] | None:
        """The fastest layout, and the seconds of a step that stand for it."""
        if not self._runs:
            return None
        if self._leader is None:
            self._leader = min(self._runs, key=self._place)
        return self._layouts[self._leader], self.seconds_of(self._leader)

    @property
    def num_measured(self) -> int:
        """Layouts that were measured."""
        return len(self._runs)

    @property
    def is_best_repeated(self) -> bool:
        """Whether a repeat of the fastest layout was begun, or none can count any more; False where nothing was measured."""
        return self.best() is not None and (self._is_over or (self._leader is not None and self.was_repeated(self._leader)))

    def _place(self, trial_id: int) -> tuple[float, int]:
        return self.seconds_of(trial_id), trial_id

    def seconds_of(self, trial_id: int) -> float:
        """The seconds of a step that stand for a trial's runs."""
        return median_run(self._runs[trial_id]).step_seconds

    def trial_of(self, layout: Layout) -> int | None:
        """The measured trial of a layout."""
        return next((trial_id for trial_id, mine in self._layouts.items() if mine == layout), None)

    def next_repeat(self, confirm: Confirm) -> tuple[int, Layout, str] | None:
        """What to measure once more, and why; None: it is settled, or the repeats are spent or under way."""
        # A repeat under way counts as one that confirms: what is asked for beside it should not depend on its luck.
        if self._is_over:
            return None
        runs = {key: [*some, median_run(some)] if key in self._repeating else some for key, some in self._runs.items()}
        spent = {key: [*some, *[median_run(some)] * confirm.repeats] if key in self._given_up else some for key, some in runs.items()}
        verdict = judge(spent, contenders=confirm.contenders, repeats=confirm.repeats)
        if verdict is None or verdict.repeat is None or verdict.repeat in self._repeating:
            return None
        trial_id = verdict.repeat
        others = len(verdict.tied) - 1
        why = f"run {len(self._runs[trial_id]) + 1} to confirm it, " + (
            f"tied with {others} {'other' if others == 1 else 'others'} so far" if others else "the best so far"
        )
        return trial_id, self._layouts[trial_id], why

    def verdict(self) -> Verdict | None:
        """How it stands at the top; None: nothing was measured."""
        return judge(self._runs, contenders=1, repeats=0)

    def tied(self) -> Sequence[Layout]:
        """The layouts that share the first place, fastest first: one alone is the winner."""
        verdict = self.verdict()
        return [] if verdict is None else [self._layouts[trial_id] for trial_id in verdict.tied]


def contest_of(trials: Iterable[TrialRow], repeats: Mapping[int, Repeats], *, under_way: Contest | None = None) -> Contest:
    """What stored trials come to, as far as they were measured under the current fingerprint; `repeats` as the store gives them.

    Of a contest that this takes the place of, the repeats under way are kept.
    """
    contest = Contest()
    for trial in trials:
        if trial.state is not TrialState.MEASURED or not trial.is_current_fingerprint or trial.step_seconds_median is None:
            continue
        alone = (Run(step_seconds=trial.step_seconds_median, relative_confidence=trial.relative_confidence),)
        found = repeats.get(trial.id, Repeats(runs=alone, failures={}, num_apart=0))
        for run in found.runs:
            contest.note(trial.id, trial.layout, run)
        for kind, times in found.failures.items():
            for _ in range(times):
                contest.fail(trial.id, kind)
        if found.num_apart:
            contest.end(trial.id)
    for trial_id in under_way._repeating if under_way is not None else ():
        contest.begin(trial_id)
    return contest
