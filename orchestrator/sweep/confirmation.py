"""Decides which measured layouts of one cell to repeat, until one is the winner or they are tied.

The runs themselves, and the order by speed, are in measured_runs.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import sqrt
from typing import TYPE_CHECKING

from orchestrator.core.problem.contradiction import TimedLayout
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.failure_kinds import FailureKind, event_after_repeat
from orchestrator.core.trial.front import most_repeats as most_repeats_of_front
from orchestrator.core.trial.front import next_to_repeat
from orchestrator.core.trial.front_verdict import FrontVerdict, judge_front
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.merit import Merit, OtherMerits
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.run import USUAL_SD, Run
from orchestrator.core.trial.winner import (
    Verdict,
    ended_early_that_could_win,
    judge,
    most_repeats_with_drift,
)
from orchestrator.search.blas_threads import one_blas_thread
from orchestrator.sweep.contradicting_trials import ContradictingTrials
from orchestrator.sweep.measured_runs import MeasuredRuns

if TYPE_CHECKING:
    # Its models of a sweep file take as long to import as numpy, and `sweep status` needs none.
    from orchestrator.core.sweepfile.search_section import Confirm

# The distance between anchors is doubled at most this often while the machine stays the same.
MOST_QUIET = 3
# Trials before the first anchor of a cell with many layouts: two runs of one layout in fresh
# processes show early which differences are noise.
FIRST_ANCHOR = 3


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """A measured trial to measure once more."""

    trial_id: int
    layout: Layout
    purpose: Purpose
    why: str


@dataclass(eq=False)
class Confirmation:
    """The measured trials of one cell, filled from the store and by attempts, in order of time.

    `repeating`: the trials with a repeat under way, from the ledger of attempts.
    """

    repeating: Mapping[int, Purpose] = field(default_factory=dict)
    # True if the machine may have changed since the last run.
    was_paused: bool = False
    # What layouts are compared by. Of several, the front of the cell is confirmed.
    merits: tuple[Merit, ...] = (Merit.SPEED,)
    runs: MeasuredRuns = field(default_factory=MeasuredRuns)
    _failures: dict[int, Counter[FailureKind]] = field(default_factory=dict)  # of repeats
    _given_up: set[int] = field(default_factory=set)  # trials whose repeats failed for good
    # True once the software has changed: no repeat can count.
    _is_over: bool = False
    # None: not judged since the last change.
    _judged: tuple[Confirm, Verdict] | None = None
    _since_anchor: int = 0  # trials measured since the last anchor
    _num_anchored: int = 0
    _contradicting: ContradictingTrials = field(default_factory=ContradictingTrials)
    # The merits of each trial besides its speed.
    _others: dict[int, OtherMerits] = field(default_factory=dict)
    # None: not judged since the last change.
    _judged_front: FrontVerdict | None = None
    # The fastest step of each trial that was ended early, as a run.
    _ended_early: dict[int, Run] = field(default_factory=dict)

    def note(self, trial_id: int, layout: Layout, run: Run) -> None:
        """Add a run that was measured."""
        self.runs.note(trial_id, layout, run)
        self._judged = self._judged_front = None
        self._contradicting.note(trial_id, layout)
        if self.num_runs(trial_id) == 1:
            self._since_anchor += 1
        elif trial_id == self._anchor():
            self._since_anchor, self.was_paused = 0, False
            self._num_anchored += 1

    def note_others(self, trial_id: int, others: OtherMerits) -> None:
        """Note the merits of a trial besides its speed."""
        self._others[trial_id] = others
        self._judged_front = None

    def note_ended_early(self, trial_id: int, fastest: Run) -> None:
        """Note that a trial was ended early. `fastest`: its fastest step, as a run."""
        self._ended_early[trial_id] = fastest

    def begin(self, trial_id: int) -> None:
        """Note that a repeat of the trial was started. It is in `repeating` by now."""
        self._judged = None
        self._contradicting.note_begun(trial_id)

    def pause(self) -> None:
        """Note that nothing ran for so long that the machine's speed may have changed."""
        self.was_paused = True

    def fail(self, trial_id: int, kind: FailureKind) -> TrialEvent:
        """Note that a repeat failed. REQUEUED: it may be tried again, like a first attempt."""
        self._judged = None
        event = self.event_after(trial_id, kind)
        if kind is not FailureKind.CANCELLED:
            self._failures.setdefault(trial_id, Counter())[kind] += 1
        if event is not TrialEvent.REQUEUED:
            self._given_up.add(trial_id)
        return event

    def event_after(self, trial_id: int, kind: FailureKind) -> TrialEvent:
        """Return the effect of another failed repeat on its trial. Nothing is changed."""
        return event_after_repeat(kind, self._failures.get(trial_id, {}))

    def end(self) -> None:
        """Note a repeat with other software than its trial: no repeat can count any more."""
        self._is_over = True

    def has(self, trial_id: int) -> bool:
        """Return whether a trial takes part: it was measured, with numbers that may be true."""
        return trial_id in self.runs.of_trial

    def was_repeated(self, trial_id: int) -> bool:
        """Return whether a repeat of the trial was begun, however it ended."""
        return (
            len(self.runs.of_trial.get(trial_id, ())) > 1
            or trial_id in self.repeating
            or trial_id in self._failures
        )

    def was_doubted(self, trial_id: int) -> bool:
        """Return whether a repeat other than an anchor was begun: anchors only test the machine."""
        others = any(
            run.purpose is not Purpose.ANCHOR for run in self.runs.of_trial.get(trial_id, ())[1:]
        )
        is_doubted_now = self.repeating.get(trial_id, Purpose.ANCHOR) is not Purpose.ANCHOR
        return others or is_doubted_now or trial_id in self._failures

    @property
    def is_best_repeated(self) -> bool:
        """True if a repeat of the fastest layout was begun, or none can count any more."""
        leader = self.runs.leader
        if leader is None or self._is_over:
            return leader is not None
        return self.was_repeated(leader)

    # -- what to measure once more -----------------------------------------------------------------

    @property
    def can_check_machine(self) -> bool:
        """True if a measured layout can run again, which shows whether the machine works."""
        return not self._is_over and self._anchor() is not None

    def next_machine_check(self) -> Repeat | None:
        """Return the repeat that shows whether the machine works.

        None: a repeat is under way, or no layout can run again.
        """
        anchor = self._anchor()
        if anchor is None or self.repeating:
            return None
        why = "to see whether the machine still works, since others hung one after the other"
        return self._repeat_of(anchor, Purpose.ANCHOR, why)

    def next_check(
        self, confirm: Confirm, *, anchor_every: int, num_left: int = 0
    ) -> Repeat | None:
        """Return what to repeat while the search goes on; None: nothing.

        That is an anchor that is due, else a trial that contradicts physics. `num_left`: layouts
        still to try; the anchor of few comes with the confirmation.
        """
        if self._is_over or not confirm.repeats or not self.runs.of_trial:
            return None
        gap = self._anchor_gap(anchor_every, num_left)
        is_due = gap and (self._since_anchor >= gap or self.was_paused)
        anchor = self._next_anchor() if is_due else None
        return anchor if anchor is not None else self._next_contradicting()

    def _anchor_gap(self, anchor_every: int, num_left: int) -> int:
        """Return after how many measured trials the next anchor is due; 0: there are none.

        The gap doubles with each anchor while the machine's speed stays the same.
        """
        if not anchor_every:
            return 0
        doublings = 0 if self.runs.change is not None else min(self._num_anchored, MOST_QUIET)
        gap = anchor_every << doublings
        is_first = not self.runs.num_repeats and num_left > anchor_every
        return min(gap, FIRST_ANCHOR) if is_first else gap

    def next_repeat(self, confirm: Confirm, *, anchor_every: int) -> Repeat | None:
        """Return what to repeat after the search has ended.

        None: the cell is settled, or its repeats are spent or under way.
        """
        if self._is_over or not confirm.repeats or not self.runs.of_trial:
            return None
        # As the next call would after reading them from the store.
        self._contradicting.compare_all()
        wanted = self._next_contradicting() or (
            self._next_of_front(confirm)
            if self.has_other_merits
            else self._next_to_confirm(confirm)
        )
        is_due = (
            anchor_every
            and len(self.runs.of_trial) > 1
            and (self._since_anchor or (self.was_paused and wanted is not None))
        )
        if is_due and self._anchor() is not None:
            # The anchor runs alone, and its result decides which layouts contend.
            return None if self.repeating else self._next_anchor()
        return wanted

    def repeat_of_best(self, confirm: Confirm) -> Repeat | None:
        """Return the first repeat of the fastest layout, all that a spent budget leaves.

        None: it was begun, or cannot count.
        """
        leader = self.runs.leader
        if not confirm.repeats or leader is None or self.is_best_repeated:
            return None
        return self._repeat_of(
            leader,
            Purpose.CONFIRMATION,
            "run 2 to confirm it, the best when the budget ended the search",
        )

    def most_to_confirm(self, confirm: Confirm, *, anchor_every: int) -> int:
        """Return the most repeats that it may still take to confirm the winner."""
        verdict = self._judge(confirm) if self.runs.of_trial and confirm.repeats else None
        if verdict is None:
            return 0
        if self.has_other_merits:
            return self._most_of_front(confirm)
        is_anchor_due = bool(anchor_every and self._since_anchor and len(self.runs.of_trial) > 1)
        if verdict.repeat is None and not self.repeating:
            # What is left may have failed for good.
            return int(is_anchor_due and self._anchor() is not None)
        done = {
            trial_id: sum(run.purpose is Purpose.CONFIRMATION for run in some)
            for trial_id, some in self.runs.of_trial.items()
        }
        if verdict.change is None:
            return max(self.most_repeats(confirm, 0) - sum(done.values()), 0) + is_anchor_due
        of_tied = [done[trial_id] for trial_id in verdict.tied]
        return most_repeats_with_drift(of_tied, confirm.contenders, confirm.repeats) + is_anchor_due

    def most_repeats(self, confirm: Confirm, num_measured: int) -> int:
        """Return the most repeats that confirm a winner among `num_measured` layouts."""
        if self.runs.change is None:
            return confirm.contenders * confirm.repeats
        return most_repeats_with_drift([0] * num_measured, confirm.contenders, confirm.repeats)

    def _next_to_confirm(self, confirm: Confirm) -> Repeat | None:
        verdict = self._judge(confirm)
        if verdict is None or verdict.repeat is None or verdict.repeat in self.repeating:
            return None
        others = len(verdict.tied) - 1
        why = f"run {len(self.runs.of_trial[verdict.repeat]) + 1} to confirm it, " + (
            f"tied with {others} {'other' if others == 1 else 'others'} so far"
            if others
            else "the best so far"
        )
        return self._repeat_of(verdict.repeat, Purpose.CONFIRMATION, why)

    @property
    def has_other_merits(self) -> bool:
        """True if layouts are compared by more than their speed."""
        return self.merits != (Merit.SPEED,)

    def front(self) -> FrontVerdict:
        """Return the front of the cell so far."""
        if self._judged_front is None:
            with one_blas_thread():
                self._judged_front = judge_front(
                    self.runs.of_trial, self._others, self.merits, drift=self.runs.drift()
                )
        return self._judged_front

    def _next_of_front(self, confirm: Confirm) -> Repeat | None:
        verdict = self.front()
        front = verdict.front
        times = {
            key: max((run.at for run in self.runs.of_trial[key] if run.at is not None), default=0.0)
            for key in (*front.on, *front.possible)
        }
        found = next_to_repeat(
            front,
            num_repeats={key: len(self.runs.of_trial[key]) - 1 for key in times},
            contenders=confirm.contenders,
            repeats=confirm.repeats,
            given_up=self._given_up | set(verdict.minor),
            under_way=self.repeating,
            last=max(times, key=times.__getitem__, default=None),
        )
        if found is None or found in self.repeating:
            return None
        place = "is on the front"
        if found in front.rivals:
            place = "could be on the front"
        why = f"run {len(self.runs.of_trial[found]) + 1} to confirm it, since it {place}"
        return self._repeat_of(found, Purpose.CONFIRMATION, why)

    def _most_of_front(self, confirm: Confirm) -> int:
        verdict = self.front()
        front, on = verdict.front, [key for key in verdict.front.on if key not in verdict.minor]
        done = [len(self.runs.of_trial[key]) - 1 for key in (*on, *front.possible)]
        return most_repeats_of_front(
            len(on),
            len(front.possible),
            contenders=confirm.contenders,
            repeats=confirm.repeats,
            done=sum(done),
        )

    def _judge(self, confirm: Confirm) -> Verdict | None:
        """Return the verdict on all runs so far. It is computed once, and asked for often."""
        if self._judged is None or self._judged[0] != confirm:
            # A repeat under way counts as a confirmation: the next repeat should not depend on its
            # result.
            with one_blas_thread():
                verdict = judge(
                    self.runs.of_trial,
                    contenders=confirm.contenders,
                    repeats=confirm.repeats,
                    under_way=self.repeating,
                    given_up=self._given_up,
                    drift=self.runs.drift(),
                )
            self._judged = None if verdict is None else (confirm, verdict)
        return None if self._judged is None else self._judged[1]

    def _next_anchor(self) -> Repeat | None:
        anchor = self._anchor()
        if anchor is None or self.repeating:
            # An anchor starts only while no repeat of the cell is under way.
            return None
        num = self._since_anchor
        measured = f"after {num} measured {'trial' if num == 1 else 'trials'}"
        why = "after a pause" if self.was_paused else measured
        return self._repeat_of(
            anchor, Purpose.ANCHOR, f"to see whether the machine has changed, {why}"
        )

    def _anchor(self) -> int | None:
        """Return the trial that is measured again and again: the first that can be.

        If two could not be repeated, no third is tried.
        """
        if len(self._given_up) > 1:
            return None
        able = (
            trial_id
            for trial_id, some in self.runs.of_trial.items()
            if trial_id not in self._given_up and not some[0].thrashing
        )
        first = next(able, None)
        if first is None:
            return None
        # If several trials ended together, take the smallest id, as a later call does when it reads
        # them from the store.
        runs = self.runs.of_trial
        at = runs[first][0].at
        return min((first, *takewhile(lambda trial_id: runs[trial_id][0].at == at, able)))

    def _next_contradicting(self) -> Repeat | None:
        """Return a trial of a pair that contradicts physics; each is repeated once."""
        if self._contradicting.has_unchecked:
            best = self.runs.best()
            assert best is not None, "something was measured"
            compared = self._contradicting.compared()
            self._contradicting.check(
                self._timed(compared),
                best_seconds=best[1],
                repeatable=set(filter(self._may_check, compared)),
            )
        found = next((one for one in self._contradicting.found if self._may_check(one[0])), None)
        return None if found is None else self._repeat_of(found[0], Purpose.PHYSICS, found[1])

    def _may_check(self, trial_id: int) -> bool:
        return (
            trial_id not in self.repeating
            and trial_id not in self._failures
            and not any(run.purpose is Purpose.PHYSICS for run in self.runs.of_trial[trial_id])
        )

    def _timed(self, trial_ids: Collection[int]) -> dict[int, TimedLayout]:
        """Return the measurements of trials, at the machine's present speed.

        Their errors are those that the verdict assumes: a layout that it takes for slow in spite of
        the load must not escape the comparison because of that load.
        """
        seconds, runs = self.runs.seconds_of_each(list(trial_ids)), self.runs.of_trial
        drift = self.runs.drift()
        load_scale = 1.0 if drift is None else drift.load_scale
        return {
            trial_id: TimedLayout(
                layout=self.runs.layout_of(trial_id),
                seconds=seconds[trial_id],
                sd=sqrt(
                    max(runs[trial_id][0].variance_at(load_scale), USUAL_SD**2)
                    / len(runs[trial_id])
                ),
                thrashing=any(run.thrashing for run in runs[trial_id]),
            )
            for trial_id in trial_ids
        }

    def _repeat_of(self, trial_id: int, purpose: Purpose, why: str) -> Repeat:
        return Repeat(
            trial_id=trial_id, layout=self.runs.layout_of(trial_id), purpose=purpose, why=why
        )

    def ended_early_that_could_win(self) -> dict[int, frozenset[str]]:
        """Return the trials that were ended early and could be the fastest, with their nodes.

        The likeliest comes first. The machine, or their nodes, may have been slow then.
        """
        drift = self.runs.drift()
        if self._is_over or drift is None or not self._ended_early:
            return {}
        with one_blas_thread():
            found = ended_early_that_could_win(self.runs.of_trial, self._ended_early, drift)
        return {trial_id: frozenset(self._ended_early[trial_id].nodes) for trial_id in found}

    # -- the order so far --------------------------------------------------------------------------

    def verdict(self) -> Verdict | None:
        """Return the order at the top so far. None: nothing was measured."""
        with one_blas_thread():
            return judge(self.runs.of_trial, contenders=1, repeats=0, drift=self.runs.drift())

    def tied(self) -> Sequence[Layout]:
        """Return the layouts that share the first place, fastest first; one alone is the winner."""
        verdict = self.verdict()
        if verdict is None:
            return []
        return [self.runs.layout_of(key) for key in verdict.tied_by_speed]

    def num_runs(self, trial_id: int) -> int:
        return len(self.runs.of_trial.get(trial_id, ()))
