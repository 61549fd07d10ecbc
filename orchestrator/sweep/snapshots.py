"""Shows those who watch how far a sweep is. It reads the loop and changes nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from orchestrator.core.trial.purpose import REASONS
from orchestrator.sweep.call import Call
from orchestrator.sweep.cell_life import CellState
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.outcomes import Outcomes, RecordedAttempt
from orchestrator.sweep.progress import (
    BUDGETS,
    DECIDED,
    CellSettled,
    Running,
    SearchEnded,
    Snapshot,
    Stop,
    StopReason,
    SweepResult,
    TimeLeft,
    TrialEnded,
    failed_trials,
    implausible_trials,
    time_left,
)
from orchestrator.sweep.spending import Spending

logger = logging.getLogger(__name__)

SHOW_SECONDS = 0.1  # between two snapshots


class Snapshots:
    """The snapshots and the result of one call of `run_sweep`."""

    def __init__(self, call: Call, outcomes: Outcomes, spending: Spending) -> None:
        self._call, self._outcomes, self._spending = call, outcomes, spending
        self._settings, self._attempts = call.spec.search, call.attempts
        self._shown = 0.0  # monotonic
        self._num_repeats = 0  # ended in this call
        self._ended: list[TrialEnded] = []  # for the next snapshot
        self._searched: list[SearchEnded] = []  # for the next snapshot
        self._settled: list[CellSettled] = []  # for the next snapshot
        self._told_as_searched: set[int] = set()  # cells
        self._told_as_settled: set[int] = set()  # cells

    def show(self, requested: Stop, *, at_once: bool = False) -> None:
        """Show a snapshot, unless one was shown just before."""
        if not at_once and time.monotonic() - self._shown < SHOW_SECONDS:
            return
        self._shown = time.monotonic()
        ended, self._ended = self._ended, []
        searched, self._searched = self._searched, []
        settled, self._settled = self._settled, []
        most_trials = {
            search.id: self._most_trials(search) for search in self._call.searches.values()
        }
        new_of = {
            one.id: most_trials[one.id] - one.launched + len(one.retries.waiting)
            for one in self._call.searches.values()
        }
        # How many repeats each cell may still take.
        repeats = [
            self._most_repeats(search, new_of[search.id])
            for search in self._call.searches.values()
            if search.life.may_be_confirmed
        ]
        self._call.observe(
            Snapshot(
                sweep=self._call.spec.name,
                counts=self._outcomes.trial_counts.now,
                untried=self._untried,
                num_launched=self._num_launched,
                at_most=sum(most_trials.values()),
                num_repeats=self._num_repeats,
                most_repeats=self._num_repeats + sum(repeats),
                running=[
                    Running(
                        trial_id=one.trial_id,
                        cell=one.cell,
                        layout=one.layout,
                        phase=one.phase,
                        step=one.step,
                        since=one.since,
                        purpose=one.purpose,
                    )
                    for one in self._attempts.running
                ],
                best={
                    one.cell: one.best
                    for one in self._call.searches.values()
                    if one.best is not None
                },
                gpu_seconds=self._spending.reserved_gpu_seconds,
                seconds=self._call.seconds,
                left=self._time_left(sum(new_of.values()), repeats, requested),
                ended=ended,
                searched=searched,
                settled=settled,
            )
        )

    def note_ended(self, recorded: Iterable[RecordedAttempt], *, num_launched: int) -> None:
        """Log how attempts ended, and show it with the next snapshot."""
        for one in recorded:
            attempt = one.attempt
            self._num_repeats += attempt.is_repeat
            num = attempt.cell.num_gpus
            repeated = f" again {REASONS[attempt.purpose]}" if attempt.is_repeat else ""
            gpus = f"{num} {'GPU' if num == 1 else 'GPUs'}"
            line = (
                f"trial {attempt.trial_id}{repeated}, {gpus}, {attempt.layout.short}: {one.outcome}"
            )
            extra = {"action": "finished", "trial_id": attempt.trial_id, "attempt": attempt.number}
            logger.info("%s", line, extra=extra)
            self._ended.append(
                TrialEnded(
                    text=line,
                    failure_kind=one.failure.kind if one.failure is not None else None,
                    seconds=self._call.seconds,
                    counts=one.counts,
                    num_launched=num_launched,
                    num_running=one.num_running,
                    num_repeats=self._num_repeats,
                )
            )

    def note_searched(self) -> None:
        """Show with the next snapshot which searches have ended, and which cells are settled."""
        # Only a display asks for it, and a verdict takes time.
        if self._call.spec.notify:
            self._note_settled()
        for search in self._call.searches.values():
            reason = search.life.stopped
            if reason is None:
                self._told_as_searched.discard(search.id)  # it may have begun anew
            elif search.id not in self._told_as_searched:
                self._told_as_searched.add(search.id)
                self._searched.append(
                    SearchEnded(
                        cell=search.cell,
                        reason=reason,
                        untried=_untried_of(search),
                        seconds=self._call.seconds,
                    )
                )

    def _note_settled(self) -> None:
        for search in self._call.searches.values():
            if search.life.state is not CellState.SETTLED:
                self._told_as_settled.discard(search.id)
            elif search.id not in self._told_as_settled:
                self._told_as_settled.add(search.id)
                if search.best is not None:
                    self._settled.append(self._settled_of(search))

    def _settled_of(self, search: CellSearch) -> CellSettled:
        confirmation = search.confirmation
        verdict = confirmation.verdict()
        assert verdict is not None, "something was measured"
        return CellSettled(
            cell=search.cell,
            tied=confirmation.tied(),
            num_runs=confirmation.num_runs(verdict.tied_by_speed[0]),
            seconds=self._call.seconds,
        )

    def result(self, *, interrupted: bool) -> SweepResult:
        """Return how the call ended."""
        searches, confirm = self._call.searches.values(), self._settings.confirm
        nothing = [one for one in searches if one.has_nothing and not interrupted]
        trials = {
            one.cell: self._call.store.trials(self._call.sweep_id, cell_id=one.id)
            for one in nothing
        }
        failed = {cell: failed_trials(rows) for cell, rows in trials.items()}
        return SweepResult(
            sweep_id=self._call.sweep_id,
            counts=self._outcomes.trial_counts.now,
            stopped={one.cell: one.life.stopped or StopReason.INTERRUPTED for one in searches},
            interrupted=interrupted,
            nothing_feasible=[one.cell for one in nothing],
            nothing_fits={
                one.cell: one.nothing_fits for one in searches if one.nothing_fits is not None
            },
            tied={one.cell: one.confirmation.tied() for one in searches if one.best is not None},
            untried={one.cell: _untried_of(one) for one in searches},
            launched={one.cell: one.launched for one in searches},
            failed={cell: some for cell, some in failed.items() if some is not None},
            unconfirmed=[
                one.cell
                for one in searches
                if one.life.stopped in BUDGETS
                and one.confirmation.repeat_of_best(confirm) is not None
            ],
            implausible={cell: implausible_trials(rows) for cell, rows in trials.items()},
            code_has_changed=self._code_has_changed(),
        )

    def _code_has_changed(self) -> bool:
        """Return whether the numbers are of other code than this call's, which measured nothing."""
        digests, call = self._outcomes.fingerprints, self._call
        found = [one for one in call.store.fingerprints(call.sweep_id) if one.digest in digests]
        return bool(found) and not any(one.has_code_of(call.code.now) for one in found)

    @property
    def _untried(self) -> int:
        return sum(map(_untried_of, self._call.searches.values()))

    @property
    def _num_launched(self) -> int:
        return sum(search.launched for search in self._call.searches.values())

    def _most_trials(self, search: CellSearch) -> int:
        """Return the most trials that a cell will have, those that were launched included."""
        if not search.is_searched:
            return search.launched
        waiting = sum(trial.num_attempts == 0 for trial in search.retries.waiting)
        # Those that wait are launched whatever the limit, which may be lower than in earlier calls.
        fewest = search.launched + waiting
        possible = fewest + _untried_of(search)
        return max(min(possible, self._settings.max_trials or possible), fewest)

    def _time_left(self, num_new: int, repeats: Sequence[int], requested: Stop) -> TimeLeft | None:
        """`num_new`: attempts that are no repeats. `repeats`: of each cell."""
        settings = self._settings
        goes_on, spending = requested is Stop.GO_ON, self._spending
        return time_left(
            seconds=self._call.seconds,
            attempt_seconds=self._attempts.recorded_seconds,
            num_ended=self._attempts.num_recorded,
            num_running=len(self._attempts.running),
            most_new=num_new if goes_on else 0,
            most_repeats=repeats if goes_on else [],
            may_end_early=any(repeats)
            or settings.plateau is not None
            or settings.bound is not None,
            wall_seconds_left=spending.wall_seconds_left,
            gpu_seconds_left=spending.gpu_seconds_left,
            gpu_seconds=spending.reserved_gpu_seconds - spending.earlier_gpu_seconds,
        )

    def _most_repeats(self, search: CellSearch, num_new: int) -> int:
        """Return the most repeats that a cell may still take, if its machine changes no further."""
        anchor_every, confirm = self._settings.anchor_every, self._settings.confirm
        confirmation = search.confirmation
        if search.life.stopped in DECIDED:
            # Only then: going through the runs of thousands of trials for every snapshot takes too
            # long.
            return confirmation.most_to_confirm(confirm, anchor_every=anchor_every)
        if not search.is_searched or not confirm.repeats:
            return 0
        num_anchors = num_new // anchor_every + 1 if anchor_every else 0
        num_measured = confirmation.runs.num_trials + num_new
        return num_anchors + confirmation.most_repeats(confirm, num_measured)


def _untried_of(search: CellSearch) -> int:
    return search.searcher.untried + (search.ahead is not None)
