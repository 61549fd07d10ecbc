"""One cell of a running sweep: its search, its state, its waiting trials, its best so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import nan

from db.read.rows import Repeats, TrialRow
from orchestrator.core.machines.packing import Shape
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.search.outcome import Failed, Measured, OutOfMemory
from orchestrator.core.sweepfile.objective import LayoutNumbers, Objective
from orchestrator.core.sweepfile.search_section import Search, Strategy
from orchestrator.core.trial.cell_plausibility import ToldLayout
from orchestrator.core.trial.failure_kinds import HANG_KINDS, FailureKind, Fault
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TERMINAL, TrialState
from orchestrator.core.trial.limits import PredictedStep
from orchestrator.core.trial.merit import NOTHING_ELSE, Merit, OtherMerits
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.run import Run
from orchestrator.search.proposal import Proposal
from orchestrator.search.searcher import Searcher
from orchestrator.sweep.attempt_cost import AttemptCost
from orchestrator.sweep.attempts import CellAttempts
from orchestrator.sweep.cell_life import CellEvent, CellLife, CellState
from orchestrator.sweep.confirmation import Confirmation, Repeat
from orchestrator.sweep.ended_trials import EndedTrials
from orchestrator.sweep.known_outcome import known_of, with_proofs
from orchestrator.sweep.progress import StopReason
from orchestrator.sweep.retries import Retries
from orchestrator.sweep.stored_confirmation import confirmation_of
from orchestrator.sweep.told_layouts import ToldLayouts
from orchestrator.sweep.trial_numbers import others_of

# With fewer ended trials the model mostly repeats its prior.
FEWEST_TO_BOUND = 3
# Share of a trial: a search that thinks longer keeps the GPUs waiting, so it thinks while they run.
SLOW_ASK_SHARE = 0.1
# After a pause of this many seconds, and of this many trials of the cell, its machine may have
# changed.
PAUSE_SECONDS, PAUSE_TRIALS = 600.0, 4.0


@dataclass(frozen=True, kw_only=True)
class PlannedSearch:
    """A search over the layouts of a cell, without any result yet."""

    searcher: Searcher
    predicted_seconds: float  # of one trial


@dataclass(eq=False, kw_only=True)
class CellSearch:
    """The state of one cell in the loop. `attempts` is its part of the ledger.

    Others read its fields, and change them through its methods only.
    """

    id: int
    cell: Cell
    shape: Shape
    objective: Objective
    searcher: Searcher
    cost: AttemptCost
    # What layouts are compared by. Of several, the search looks for the front.
    merits: tuple[Merit, ...] = (Merit.SPEED,)
    # What the call runs now; None: not known.
    code_now: Callable[[], Fingerprint | None] = lambda: None
    attempts: CellAttempts = field(default_factory=CellAttempts)
    life: CellLife = field(default_factory=CellLife)
    retries: Retries = field(default_factory=Retries)
    added: set[Layout] = field(default_factory=set)  # in the store, never launched
    # Layouts that ran out of memory, and their trials.
    out_of_memory: dict[Layout, int] = field(default_factory=dict)
    # Trials with at least one attempt: what max_trials counts.
    launched: int = 0
    # It has the measurements with the newest fingerprint.
    confirmation: Confirmation = field(init=False)
    nothing_fits: str | None = None  # the evidence that no layout fits
    # Proposed while other trials ran, not launched yet.
    ahead: Proposal | None = None
    # A doubtful result to repeat: taken from the search, not launched yet.
    doubt: Repeat | None = None
    told: ToldLayouts = field(default_factory=ToldLayouts)
    # Digest of the fingerprint of the newest measurement.
    _fingerprint: str | None = None
    _ask_seconds: float = 0.0  # of the last ask
    # When the last attempt of this call ended. None: none has, or a pause since was noted.
    _ended_at: float | None = None
    # True once its trials were read from the store.
    _was_taken_up: bool = False
    _ended: EndedTrials = field(init=False)
    # True if nothing has changed since `check` judged whether the search has had enough.
    _is_checked: bool = False
    _gain: float | None = None
    _gain_of: tuple[int, int] | None = None  # layouts told and condemned by then

    def __post_init__(self) -> None:
        self.confirmation = Confirmation(repeating=self.attempts.repeats, merits=self.merits)
        self._ended = EndedTrials(self.objective, self.merits)

    def begin_anew(self, planned: PlannedSearch) -> None:
        """Search with another searcher. `take_up` then tells it the stored results."""
        self.searcher, self.cost.predicted_seconds = planned.searcher, planned.predicted_seconds

    def take_up(
        self,
        trials: Iterable[TrialRow],
        repeats: Mapping[int, Repeats],
        num_proofs: Mapping[int, int] | None = None,
        enqueued: Collection[int] = (),
    ) -> list[Layout]:
        """Continue from the stored results. `repeats`: runs of trials measured more than once.

        `num_proofs`: by trial that ran out of memory, how many of its attempts prove that it does
        not fit; None: one each. `enqueued`: trials that people asked for. Return the layouts that
        are condemned by this beyond what the store knows, as after axes were widened.
        """
        rows = list(trials)
        self._begin_to_read()
        # These were never launched, and may be proposed: their proof fell, or they were added just
        # before an orchestrator died.
        self.added = {
            t.layout
            for t in rows
            if t.state is TrialState.QUEUED and not t.num_attempts and t.id not in enqueued
        }
        rows = [t for t in rows if t.layout not in self.added]
        # A trial that told us nothing is not proposed again: `sweep invalidate` asks for that.
        condemned = self.searcher.restore(
            (t.layout, with_proofs(known_of(t), t.id, num_proofs)) for t in rows
        )
        self.out_of_memory = {t.layout: t.id for t in rows if t.state is TrialState.OUT_OF_MEMORY}
        for trial in rows:
            self._read(trial)
        # The machine may have changed since earlier calls.
        self.confirmation = confirmation_of(
            rows,
            repeats,
            repeating=self.attempts.repeats,
            was_paused=not self._was_taken_up or self.confirmation.was_paused,
            merits=self.merits,
            device_memory_bytes=self.searcher.memory_limit_bytes,
            may_run=self.searcher.knows,
            code=self.code_now,
        )
        self._was_taken_up = True
        self._correct_search()
        self.nothing_fits = self.searcher.nothing_fits()
        return list(condemned)

    def _begin_to_read(self) -> None:
        """Forget what was known of the cell's trials, before they are read again."""
        self.launched, self.retries.waiting = 0, []
        self.told = ToldLayouts()
        self._ended = EndedTrials(self.objective, self.merits)
        self.ahead = self.doubt = None
        self.life.take(CellEvent.READ_AGAIN)
        self._is_checked = False

    def _read(self, trial: TrialRow) -> None:
        """Note a stored trial: its cost, its end, and whether it waits for another attempt."""
        self.launched += trial.was_launched
        if trial.gpu_seconds is not None:
            is_measured = trial.state is TrialState.MEASURED
            self.cost.note_reserved(trial.gpu_seconds, is_measured=is_measured)
        # A layout that the file no longer names waits in the store: its axis may come back.
        if trial.state is TrialState.QUEUED and self.searcher.knows(trial.layout):
            self.retries.waiting.append(trial)
        is_over = trial.state in TERMINAL and trial.num_attempts
        if is_over and trial.is_current_fingerprint is not False:
            seconds = None if trial.implausible else trial.step_seconds_median
            others = None
            if self._ended.is_of_front:
                others = others_of(trial, self.searcher.memory_limit_bytes)
            self._note(seconds, others)
        if not trial.is_current_fingerprint:
            return
        self._fingerprint = trial.fingerprint_digest
        if trial.step_seconds_median is not None:
            told = ToldLayout(layout=trial.layout, seconds=trial.step_seconds_median)
            self.told.note(trial.id, told, is_implausible=trial.implausible is not None)

    # -- the life of an attempt ------------------------------------------------------------------

    def note_first_attempt(self) -> None:
        """Note that a trial is about to have its first attempt."""
        self.launched += 1

    def note_retried(self, trial: TrialRow) -> None:
        """Note that a waiting trial is about to be launched."""
        self.retries.waiting.remove(trial)
        if trial.num_attempts == 0:
            self.note_first_attempt()

    def note_started(self) -> None:
        """Note that an attempt was decided on."""
        self._is_checked = False

    def note_ended(self, *, seconds: float, now: float) -> None:
        """Note that an attempt is over, which took `seconds`: there may be something to start."""
        self.cost.last_seconds, self._ended_at = seconds, now
        self._note_change()

    def note_requeued(self, trial: TrialRow, kind: FailureKind, nodes: Iterable[str]) -> None:
        """Note that a trial waits again, since an attempt on these nodes failed in this way."""
        self.retries.add(trial, kind, nodes)
        if kind in HANG_KINDS:
            # Until it runs again, similar layouts are proposed later.
            self.searcher.tell(trial.layout, Failed())
        self._note_change()

    def note_reserved(self, gpu_seconds: float, *, is_measured: bool) -> None:
        """Note what an attempt that is over reserved."""
        self.cost.note_reserved(gpu_seconds, is_measured=is_measured)

    def avoid(self, trial_id: int, nodes: Iterable[str]) -> None:
        """Prefer other nodes for the next attempt of a trial that waits."""
        self.retries.avoid(trial_id, nodes)

    def restore_retries(
        self,
        *,
        lost_a_node: Iterable[int],
        avoided: Mapping[int, frozenset[str]],
        needs_own_nodes: bool,
    ) -> None:
        """Let what waits start as the failures of earlier calls ask for."""
        self.retries.restore(
            lost_a_node=lost_a_node, avoided=avoided, needs_own_nodes=needs_own_nodes
        )

    def note_pause(self, clock: Callable[[], float]) -> None:
        """Note if nothing of the cell ran for long: others were first, or its nodes were gone."""
        if self._ended_at is None or self.num_new or self.num_repeats:
            return
        pause = max(PAUSE_SECONDS, PAUSE_TRIALS * self.cost.last_seconds)
        if clock() - self._ended_at > pause:
            self.confirmation.pause()
            self._ended_at = None

    def note_standstill(self) -> None:
        """Note that the orchestrator did not run for long: the machine may have changed."""
        self.confirmation.pause()

    def note_repeat_begun(self, trial_id: int) -> None:
        """Note that a measured trial is about to be measured again."""
        self.confirmation.begin(trial_id)

    def note_repeat_failed(self, trial_id: int, kind: FailureKind) -> None:
        """Note that a repeat failed: the earlier measurements still count."""
        self.confirmation.fail(trial_id, kind)

    def _note_change(self) -> None:
        self.life.take(CellEvent.ATTEMPT_ENDED)
        self._is_checked = False

    # -- its life --------------------------------------------------------------------------------

    @property
    def is_searched(self) -> bool:
        """True until its search has ended; what is left then are retries and repeats."""
        return self.life.is_searched

    @property
    def num_new(self) -> int:
        """Attempts under way that are no repeats."""
        return len(self.attempts.new)

    @property
    def num_repeats(self) -> int:
        return len(self.attempts.repeats)

    def check(self, settings: Search, *, within_trials: bool) -> None:
        """End the search if it needs no more, or let it rest until running attempts have ended."""
        if self._is_checked:
            return
        self._is_checked = True
        reason = self._had_enough(settings)
        if reason is None and not self._has_something(within_trials=within_trials):
            if self.num_new:
                self.rest()
                return
            reason = StopReason.EXHAUSTED
        if reason is not None:
            self.stop(reason)

    def stop(self, reason: StopReason) -> None:
        """End its search, or what is left of it."""
        self.life.stop(reason)

    def rest(self) -> None:
        """Start nothing until an attempt has ended."""
        if self.life.state is not CellState.RESTING:
            self.life.take(CellEvent.NOTHING_TO_START)

    def settle(self) -> None:
        """Note that the cell starts nothing more, unless an attempt of it is under way."""
        if self.life.state is CellState.CONFIRMING and not (self.num_new or self.num_repeats):
            self.life.take(CellEvent.NOTHING_LEFT)

    def settle_without_repeats(self, reason: StopReason) -> None:
        """Note that no budget is left to confirm its best. The next call may go on."""
        self.life.take(CellEvent.NOTHING_LEFT, reason)

    def search_again(self) -> None:
        """Go on with the search: results were withdrawn, and their trials wait again."""
        self.life.take(CellEvent.RESULTS_WITHDRAWN)

    def note_condemned(self, layouts: Collection[Layout]) -> int:
        """Note that layouts will never be launched. Return how many have a trial in the store."""
        in_store = self.added.intersection(layouts)
        self.added -= in_store
        return len(in_store)

    def take_freed(self) -> list[Layout]:
        """Return the layouts that no out-of-memory rules out any more, each once."""
        return self.searcher.take_freed()

    def free(self, layouts: Iterable[Layout]) -> None:
        """Let layouts be launched again that nothing rules out any more."""
        self.added |= set(layouts)
        self.life.free()

    @property
    def has_only_suspects(self) -> bool:
        """True if its search has ended, and each waiting trial should be alone on its nodes."""
        return not self.is_searched and self.retries.are_all_suspects

    def _has_something(self, *, within_trials: bool) -> bool:
        """Return whether there is anything left to launch while the cell is searched."""
        is_untried = within_trials and self.searcher.untried > 0
        return (
            bool(self.retries.waiting)
            or is_untried
            or self.ahead is not None
            or self._next_doubt() is not None
        )

    # -- what comes next -------------------------------------------------------------------------

    def ask(self, clock: Callable[[], float]) -> Proposal | None:
        """Return the next layout: the one that was asked for ahead, if any."""
        if self.ahead is not None:
            asked, self.ahead = self.ahead, None
            return asked
        began = clock()
        proposal = self.searcher.ask()
        self._ask_seconds = clock() - began
        return proposal

    def ask_ahead(self, clock: Callable[[], float]) -> None:
        """Ask for the next layout, and keep it for the next `ask`."""
        self.ahead = self.ask(clock)

    def put_back(self, proposal: Proposal) -> None:
        """Keep a layout that cannot be launched yet for the next `ask`."""
        self.ahead = proposal

    @property
    def should_ask_ahead(self) -> bool:
        """True if to ask takes long compared with a trial: it is then done while trials run.

        The layout rests on one result less, and no GPU waits for it.
        """
        trial_seconds = self.cost.last_seconds
        return self.ahead is None and 0 < trial_seconds < self._ask_seconds / SLOW_ASK_SHARE

    def take_back(self) -> None:
        """Give back the layout that was asked for ahead: newer results may rule it out."""
        if self.ahead is not None:
            self.searcher.forget(self.ahead.layout)
            self.ahead = None

    def take_doubt(self) -> Repeat | None:
        """Return the repeat of a measured trial that its neighbours contradict; None: no such."""
        if self.doubt is not None and self.confirmation.was_doubted(self.doubt.trial_id):
            # Another repeat of it was begun since it was put back.
            self.doubt = None
        found = self._next_doubt()
        if found is not None and found.trial_id in self.attempts.repeats:
            # An anchor of this trial runs, and a trial has one attempt at a time.
            return None
        self.doubt = None
        return found

    def put_back_doubt(self, doubt: Repeat) -> None:
        """Keep what `take_doubt` returned for the next time: it could not start yet."""
        self.doubt = doubt

    def _next_doubt(self) -> Repeat | None:
        # Pass over a trial that was already repeated, before a restart or to confirm it.
        while self.doubt is None and (doubtful := self.searcher.doubtful()) is not None:
            trial_id = self.confirmation.runs.trial_of(doubtful.layout)
            if trial_id is not None and not self.confirmation.was_doubted(trial_id):
                self.doubt = Repeat(
                    trial_id=trial_id,
                    layout=doubtful.layout,
                    purpose=Purpose.DOUBT,
                    why=doubtful.why,
                )
        return self.doubt

    def predicted_step(
        self, layout: Layout, *, at_least: float | None = None
    ) -> PredictedStep | None:
        """Predict the step of a layout that was launched before.

        `at_least`: the seconds that it was seen to take.
        """
        found = self.searcher.predicted_step(layout)
        if at_least is None or (found is not None and found.seconds >= at_least):
            return found
        return PredictedStep(seconds=at_least, log_sd=found.log_sd if found is not None else 0.0)

    # -- what is known ---------------------------------------------------------------------------

    @property
    def has_nothing(self) -> bool:
        """True if nothing is measured yet under the newest fingerprint."""
        return not self.confirmation.runs.of_trial

    @property
    def best(self) -> tuple[Layout, float] | None:
        """The fastest layout under the newest fingerprint, and its objective."""
        found = self.confirmation.runs.best()
        return None if found is None else (found[0], self.value_of(found[1]))

    def value_of(self, step_seconds: float) -> float:
        """Return the objective of a step time."""
        value = LayoutNumbers.of_step(self.cell, step_seconds).value(self.objective)
        assert value is not None, f"{self.objective} is no objective of speed"
        return value

    def note_measured(
        self, trial_id: int, layout: Layout, run: Run, others: OtherMerits = NOTHING_ELSE
    ) -> None:
        """Note that a trial was measured for the first time."""
        self.confirmation.note(trial_id, layout, run)
        self.confirmation.note_others(trial_id, others)
        self.told.note(trial_id, ToldLayout(layout=layout, seconds=run.step_seconds))
        self._note(run.step_seconds, others)

    def note_ended_early(
        self, trial_id: int, told: ToldLayout, fastest: Run, *, peak_memory_bytes: int | None
    ) -> None:
        """Note that a trial was ended early: its few steps tell the search, and it cannot win.

        `fastest`: the fastest of them.
        """
        self.confirmation.note_ended_early(trial_id, fastest)
        self.told.note(trial_id, told)
        self._note(told.seconds)
        outcome = Measured.of_step(told.seconds, peak_memory_bytes=peak_memory_bytes)
        self.searcher.tell(told.layout, outcome)

    def note_implausible(
        self, trial_id: int, told: ToldLayout, *, peak_memory_bytes: int | None
    ) -> None:
        """Note that a trial was measured, with numbers that cannot be true: it has no value."""
        self.told.note(trial_id, told, is_implausible=True)
        self._note(None)
        outcome = Measured.of_step(nan, peak_memory_bytes=peak_memory_bytes)
        self.searcher.tell(told.layout, outcome)

    def note_repeated(self, trial_id: int, layout: Layout, run: Run, *, counts: bool) -> None:
        """Note that a trial was measured again. It does not count with other software."""
        if counts:
            self.confirmation.note(trial_id, layout, run)
        else:
            self.confirmation.end()

    def tell_measured(
        self,
        trial_id: int,
        layout: Layout,
        *,
        peak_memory_bytes: int | None,
        is_repeat: bool,
        joules_per_token: float | None = None,
    ) -> None:
        """Tell the search the results of the trial's runs."""
        outcome = Measured.of_step(
            self.confirmation.runs.seconds_of(trial_id),
            peak_memory_bytes=peak_memory_bytes,
            joules_per_token=joules_per_token,
        )
        self.searcher.tell(layout, outcome)
        if is_repeat:
            self._correct_search()

    def note_failed(self, layout: Layout, fault: Fault) -> None:
        """Note that a trial failed for good."""
        self._note(None)
        if fault is not Fault.MACHINE:
            self.searcher.tell(layout, Failed())
        else:
            # A machine's fault says nothing about the layout. It is not proposed again.
            self.searcher.set_aside(layout)

    def note_out_of_memory(
        self, trial_id: int, layout: Layout, outcome: OutOfMemory
    ) -> list[Layout]:
        """Note that a layout does not fit, and tell the search. Return what this condemns."""
        self._note(None)
        self.take_back()
        self.out_of_memory[layout] = trial_id
        condemned = self.searcher.tell(layout, outcome)
        self.nothing_fits = self.searcher.nothing_fits()
        return condemned

    def note_fingerprint(self, digest: str) -> str | None:
        """Note the newest measurement's fingerprint. Return the one before, if it differs."""
        before, self._fingerprint = self._fingerprint, digest
        return None if before == digest else before

    def _note(self, step_seconds: float | None, others: OtherMerits | None = None) -> None:
        """Note the result of a trial that ended; None: it has no speed."""
        if self._ended.is_of_front:
            self._ended.note_point(_merits_of(step_seconds, others or NOTHING_ELSE))
        else:
            self._ended.note(None if step_seconds is None else self.value_of(step_seconds))

    def _correct_search(self) -> None:
        """Tell the search step times at the machine's present speed, if that has changed."""
        runs = self.confirmation.runs
        if runs.change is not None:
            for trial_id, seconds in runs.seconds.items():
                self.searcher.correct(runs.layout_of(trial_id), seconds)

    # -- whether it has had enough ---------------------------------------------------------------

    def expected_gain(self) -> float | None:
        """Return the most that an untried layout should gain over the best, relative.

        It is computed again after an attempt has ended.
        """
        known = (self.searcher.told, self.searcher.condemned)
        if self._gain_of != known:
            self._gain_of, self._gain = known, self.searcher.expected_gain()
        return self._gain

    def _had_enough(self, settings: Search) -> StopReason | None:
        """Return the rule of the sweep file that ends its search, if any."""
        most = settings.max_trials
        if most is not None and self.launched >= most and not self.retries.waiting:
            return StopReason.TRIALS
        if self.nothing_fits is not None:
            return StopReason.NOTHING_FITS
        plateau = settings.plateau
        if plateau is not None and settings.strategy is not Strategy.EXHAUSTIVE:
            return StopReason.PLATEAU if self._ended.have_plateaued(plateau) else None
        return None

    def reached(self, bound: float | None) -> bool:
        """Return whether no untried layout should gain that much over the best, relative.

        The layout that was asked for ahead is one of them.
        """
        if bound is None or len(self._ended) < FEWEST_TO_BOUND or not self._expects_less(bound):
            return False
        if self.ahead is None:
            return True
        self.take_back()
        return self._expects_less(bound)

    def _expects_less(self, bound: float) -> bool:
        gain = self.searcher.expected_gain()
        return gain is not None and gain < bound


def _merits_of(step_seconds: float | None, others: OtherMerits) -> dict[Merit, float | None]:
    """Return the merits of a trial that ended; all are unknown if it has no speed."""
    if step_seconds is None:
        return {}
    joules = others.joules_per_token
    return {
        Merit.SPEED: 1.0 / step_seconds,
        Merit.HEADROOM: None if others.headroom is None else max(others.headroom, 0.0),
        Merit.EFFICIENCY: None if not joules else 1.0 / joules,
    }
