"""One cell of a running sweep: its search, what waits to be launched, the best so far, and whether it has had enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from db.read.rows import Repeats, TrialRow
from orchestrator.core.machines.packing import Shape
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.search.trial_cost import TrialCost
from orchestrator.core.sweepfile.sections import Objective, Plateau, Search, Strategy
from orchestrator.core.trial.drift import Run
from orchestrator.core.trial.failure_kinds import POLICIES, Fault
from orchestrator.core.trial.lifecycle import TERMINAL, TrialState
from orchestrator.core.trial.limits import PredictedStep
from orchestrator.search.searcher import (
    Condemned,
    Failed,
    InFlight,
    Known,
    Measured,
    OutOfMemory,
    Proposal,
    Searcher,
    SetAside,
)
from orchestrator.sweep.confirmation import Confirmation, confirmation_of
from orchestrator.sweep.progress import StopReason
from orchestrator.sweep.verdict import relative_excess

FEWEST_TO_BOUND = (
    3  # ended trials: before, what the model is sure of is mostly what it was told beforehand
)
SLOW_ASK_SHARE = 0.1  # of a trial: a search that thinks longer than that keeps the GPUs waiting, so it thinks while they run


@dataclass(eq=False, kw_only=True)
class CellSearch:
    """What the loop knows of one cell."""

    id: int
    cell: Cell
    shape: Shape
    objective: Objective
    searcher: Searcher
    num_candidates: int
    predicted_seconds: float  # of one trial, before any of them has shown it
    waiting: list[TrialRow] = field(default_factory=list)  # in the store, to be launched again
    needs_own_nodes: bool = (
        False  # one of its trials ran a node out of memory: beside others the next might again
    )
    suspects: set[int] = field(
        default_factory=set
    )  # trials whose node was lost: tried again with nothing beside them, to tell whose doing it was
    # By waiting trial that hung: the nodes that it ran on.
    hung_on: dict[int, frozenset[str]] = field(default_factory=dict)
    num_new: int = 0  # attempts under way that are no repeats
    num_repeats: int = 0  # and that are
    has_changed: bool = True  # since it was last asked whether it has had enough
    rests: bool = False  # it wants nothing until something of it that is under way has ended
    is_settled: bool = (
        False  # its search has ended, and what it found is confirmed as far as it can be
    )
    added: set[Layout] = field(default_factory=set)  # in the store, never launched
    ran_out: dict[Layout, int] = field(default_factory=dict)  # of memory: layout -> its trial
    launched: int = 0  # trials with at least one attempt: what max_trials counts
    stopped: StopReason | None = None
    fingerprint: str | None = None  # digest; what the newest measurement was taken with
    confirmation: Confirmation = field(
        default_factory=Confirmation
    )  # what was measured under that fingerprint
    nothing_fits: str | None = None  # the evidence, where it is so
    ask_seconds: float = 0.0  # the last ask's
    trial_seconds: float = 0.0  # the last trial's, from launch to end
    trial_gpu_seconds: float | None = (
        None  # the last trial's that was measured, else the last one's; None: none has ended
    )
    has_measured: bool = False
    ahead: Proposal | None = None  # asked for while others ran, not launched yet
    doubt: tuple[int, Layout, str] | None = None  # taken from the search, not launched yet
    ended_at: float | None = None  # when the last attempt did; None: none has in this call
    was_taken_up: bool = False  # what the store knew of it is known here
    _gain: float | None = None
    _gain_of: tuple[int, int] | None = None  # layouts told and condemned by then
    ended: list[float] = field(
        default_factory=list
    )  # objective of each ended trial, larger is better; -inf where it has none

    def take_up(
        self,
        trials: Iterable[TrialRow],
        repeats: Mapping[int, Repeats],
        num_proofs: Mapping[int, int] | None = None,
    ) -> list[Layout]:
        """Go on from what the store knows; `repeats` are the runs of trials that were measured more than once.

        `num_proofs`: by trial that ran out of memory, how many of its attempts prove that it does not fit; None: one each.
        Returns the layouts that the out-of-memories condemn beyond what the store knows: axes were widened since, say.
        """
        rows = list(trials)
        self.launched, self.waiting, self.ended, self.ahead, self.doubt = 0, [], [], None, None
        self.rests = self.is_settled = False
        self.has_changed = True
        # Never launched, and free to be chosen: freed from a proof that fell, or added just before an orchestrator died.
        self.added = {t.layout for t in rows if t.state is TrialState.QUEUED and not t.num_attempts}
        rows = [t for t in rows if t.layout not in self.added]
        # A trial that told us nothing is not proposed again either: `sweep invalidate` is how a person asks.
        condemned = self.searcher.replay(
            (t.layout, _proving(known_of(t, self.objective), t.id, num_proofs)) for t in rows
        )
        self.ran_out = {t.layout: t.id for t in rows if t.state is TrialState.OUT_OF_MEMORY}
        for trial in rows:
            self.launched += trial.num_attempts > 0
            if trial.gpu_seconds is not None:
                self.note_held(trial.gpu_seconds, is_measured=trial.state is TrialState.MEASURED)
            # A waiting trial whose layout the file no longer names goes on waiting: its axis may come back.
            if trial.state is TrialState.QUEUED and self.searcher.knows(trial.layout):
                self.waiting.append(trial)
            if (
                trial.state in TERMINAL
                and trial.num_attempts
                and trial.is_current_fingerprint is not False
            ):
                self._note(trial.step_seconds_median)
            if trial.is_current_fingerprint:
                self.fingerprint = trial.fingerprint_digest
        # What an earlier call measured, it measured on the machine as it was then.
        self.confirmation = confirmation_of(
            rows, repeats, under_way=self.confirmation, was_paused=not self.was_taken_up
        )
        self.was_taken_up = True
        self.correct_search()
        return list(condemned)

    def wait(self, trial: TrialRow) -> None:
        """Have a trial launched again."""
        self.waiting.append(trial)
        self.rests, self.has_changed = False, True

    def took_off(self, *, is_repeat: bool) -> None:
        """An attempt was started."""
        self.num_repeats += is_repeat
        self.num_new += not is_repeat
        self.has_changed = True

    def landed(self, *, is_repeat: bool, seconds: float) -> None:
        """An attempt is over, after so many seconds: what it told may be something to go on with."""
        self.num_repeats -= is_repeat
        self.num_new -= not is_repeat
        self.trial_seconds = seconds
        self.rests, self.has_changed = False, True

    @property
    def has_only_suspects(self) -> bool:
        """Whether its search has ended, and all that waits should be alone on its nodes."""
        return (
            self.stopped is not None
            and bool(self.waiting)
            and all(trial.id in self.suspects for trial in self.waiting)
        )

    def has_something(self, *, within_trials: bool) -> bool:
        """Whether there is anything left to launch while the cell is searched."""
        return (
            bool(self.waiting)
            or (within_trials and self.searcher.untried > 0)
            or self.ahead is not None
            or self._doubted() is not None
        )

    @property
    def expected_seconds(self) -> float:
        """That the next trial will hold its slots: as long as the last one, or as predicted."""
        return self.trial_seconds or self.predicted_seconds

    def ask(self, clock: Callable[[], float]) -> Proposal | None:
        """The next layout: the one asked for ahead, if any."""
        if self.ahead is not None:
            asked, self.ahead = self.ahead, None
            return asked
        began = clock()
        proposal = self.searcher.ask()
        self.ask_seconds = clock() - began
        return proposal

    def ask_ahead(self, clock: Callable[[], float]) -> None:
        """Ask for the next layout while trials run, where asking takes long beside a trial: one result older, and no GPU waits for it."""
        if self.ahead is None and 0 < self.trial_seconds < self.ask_seconds / SLOW_ASK_SHARE:
            self.ahead = self.ask(clock)

    def note_held(self, gpu_seconds: float, *, is_measured: bool) -> None:
        """An attempt has ended that held so much. One without a number tells how long the next one takes only while there is no better."""
        if is_measured or not self.has_measured:
            self.trial_gpu_seconds = gpu_seconds
        self.has_measured |= is_measured

    def expected_gpu_seconds(self, proposal: Proposal | None, cost: TrialCost) -> float | None:
        """What its next attempt should hold: as predicted, where launches were measured, else what the last one held. None: nothing tells."""
        rate = proposal.predicted_tokens_per_second_per_gpu if proposal is not None else None
        if rate is None or not cost.is_launch_measured:
            return self.trial_gpu_seconds
        return (
            cost.seconds(self.cell.tokens_per_step / self.cell.num_gpus / rate) * self.cell.num_gpus
        )

    @property
    def has_nothing(self) -> bool:
        """True where nothing is measured yet under the newest fingerprint."""
        return not self.confirmation.num_measured

    def expected_gain(self) -> float | None:
        """The most that an untried layout is expected to gain over the best, relative; worked out anew when something has ended."""
        known = (self.searcher.told, self.searcher.condemned)
        if self._gain_of != known:
            self._gain_of, self._gain = known, self.searcher.expected_gain()
        return self._gain

    @property
    def guessed_gpu_seconds(self) -> float:
        """The same where nothing measured need tell it: what the last one held, else as predicted with a usual launch."""
        return (
            self.trial_gpu_seconds
            if self.trial_gpu_seconds is not None
            else self.predicted_seconds * self.cell.num_gpus
        )

    def predicted_step(
        self, layout: Layout, *, at_least: float | None = None
    ) -> PredictedStep | None:
        """The predicted step of a layout that was launched before. `at_least`: the seconds that it was seen to take."""
        found = self.searcher.predicted_step(layout)
        if at_least is None or (found is not None and found.seconds >= at_least):
            return found
        return PredictedStep(seconds=at_least, log_sd=found.log_sd if found is not None else 0.0)

    def take_back(self) -> None:
        """Give back what was asked for ahead: what became known since may rule it out."""
        if self.ahead is not None:
            self.searcher.forget(self.ahead.layout)
            self.ahead = None

    def take_doubt(self) -> tuple[int, Layout, str] | None:
        """A measured trial that its neighbours contradict, and why: to be measured once more before it is believed."""
        found = self._doubted()
        if found is not None and self.confirmation.is_repeated_now(found[0]):
            return None  # an anchor: one attempt of a trial at a time
        self.doubt = None
        return found

    def _doubted(self) -> tuple[int, Layout, str] | None:
        # One that was repeated already, before a restart or to confirm it, does not stand in the way of the next.
        while self.doubt is None and (again := self.searcher.again()) is not None:
            trial_id = self.confirmation.trial_of(again.layout)
            if trial_id is not None and not self.confirmation.was_doubted(trial_id):
                self.doubt = trial_id, again.layout, again.why
        return self.doubt

    @property
    def best(self) -> tuple[Layout, float] | None:
        """The fastest layout under the newest fingerprint, and its objective."""
        found = self.confirmation.best()
        return None if found is None else (found[0], self.value_of(found[1]))

    def value_of(self, step_seconds: float) -> float:
        """The objective of a step time."""
        if self.objective is Objective.STEP_SECONDS:
            return step_seconds
        return self.cell.tokens_per_step / step_seconds / self.cell.num_gpus

    def note_measured(self, trial_id: int, layout: Layout, run: Run) -> None:
        """A trial was measured for the first time."""
        self.confirmation.note(trial_id, layout, run)
        self._note(run.step_seconds)

    def correct_search(self) -> None:
        """Tell the search what was measured as the machine is now, where it was seen to change."""
        if self.confirmation.change is not None:
            for trial_id, seconds in self.confirmation.seconds.items():
                self.searcher.correct(self.confirmation.layout_of(trial_id), self.value_of(seconds))

    def note_infeasible(self) -> None:
        """A trial ended without a number."""
        self._note(None)

    def _note(self, step_seconds: float | None) -> None:
        sign = -1.0 if self.objective is Objective.STEP_SECONDS else 1.0
        self.ended.append(
            float("-inf") if step_seconds is None else sign * self.value_of(step_seconds)
        )

    def had_enough(self, search: Search) -> StopReason | None:
        """The rule of the cell's own that says so, if any."""
        if (
            search.max_trials is not None
            and self.launched >= search.max_trials
            and not self.waiting
        ):
            return StopReason.TRIALS
        if self.nothing_fits is not None:
            return StopReason.NOTHING_FITS
        if (
            search.plateau is not None
            and search.strategy is not Strategy.EXHAUSTIVE
            and self._plateaued(search.plateau)
        ):
            return StopReason.PLATEAU
        return None

    def reached(self, bound: float | None) -> bool:
        """Whether no untried layout is expected to gain that much, relative, over the best; the one asked for ahead is one of them."""
        if bound is None or len(self.ended) < FEWEST_TO_BOUND:
            return False
        if not self._expects_less(bound):
            return False
        if self.ahead is None:
            return True
        self.take_back()
        return self._expects_less(bound)

    def _expects_less(self, bound: float) -> bool:
        gain = self.searcher.expected_gain()
        return gain is not None and gain < bound

    def _plateaued(self, plateau: Plateau) -> bool:
        """Whether the last trials brought less than the gain, relative, over the best before them."""
        if len(self.ended) <= plateau.trials:
            return False
        before, since = max(self.ended[: -plateau.trials]), max(self.ended[-plateau.trials :])
        return before > float("-inf") and since - before < plateau.gain * abs(before)


def _proving(known: Known | None, trial_id: int, num_proofs: Mapping[int, int] | None) -> Known:
    """The known outcome of a trial, with the number of its attempts that prove that it does not fit."""
    if isinstance(known, OutOfMemory) and num_proofs is not None:
        return replace(known, num_proofs=num_proofs.get(trial_id, 0))
    return known or SetAside()


def known_of(trial: TrialRow, objective: Objective) -> Known | None:
    """What a stored trial says of its layout; None: nothing, since it was measured under other conditions or the machine was at fault.

    One that waits is in flight: it will be launched without being asked for.
    """
    match trial.state:
        case TrialState.MEASURED if trial.is_current_fingerprint is False:
            return None
        case TrialState.MEASURED:
            value = objective_of(trial, objective)
            assert value is not None, f"trial {trial.id} is measured and has no number"
            # A counter that says 0 was not read.
            return Measured(
                value=value,
                peak_memory_bytes=trial.peak_memory_reserved_bytes
                or trial.peak_memory_allocated_bytes
                or None,
            )
        case TrialState.OUT_OF_MEMORY:
            return OutOfMemory(
                excess=relative_excess(
                    trial.peak_memory_allocated_bytes,
                    trial.device_memory_bytes,
                    trial.failure_message,
                )
            )
        case TrialState.FAILED if (
            trial.failure_kind is not None
            and POLICIES[trial.failure_kind].fault is not Fault.MACHINE
        ):
            return Failed()
        case TrialState.FAILED:
            return None
        case TrialState.PRUNED:
            return Condemned()
        case TrialState.QUEUED | TrialState.LAUNCHING | TrialState.RUNNING:
            return InFlight()


def objective_of(trial: TrialRow, objective: Objective) -> float | None:
    """The number that the sweep ranks by; None where the trial has none."""
    return (
        trial.step_seconds_median
        if objective is Objective.STEP_SECONDS
        else trial.tokens_per_second_per_gpu
    )
