"""The ledger of attempts: each one from the decision to start it until its end is in the store.

Counts and sets of attempts are computed from here. Three others count for themselves: a search
marks the layouts that it has proposed, FreeSlots counts the slots that gangs take, and the
scheduler knows the gangs that it runs. NodePool notes which trials were under way when it withdrew
measurements. Everything else about an attempt under way is only here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain

from db.write.writes import NewAttempt, NewTrial
from orchestrator.cluster.contract import Finished, Progressed, SchedulerEvent
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.limits import PredictedStep
from orchestrator.core.trial.protocol import Phase
from orchestrator.core.trial.purpose import REPEATS, Purpose
from orchestrator.sweep.measured_code import AttemptCode

_AFTER_FIRST_STEP = frozenset({Phase.STEADY, Phase.TEARDOWN})


@dataclass(eq=False, kw_only=True)
class Attempt:
    """One attempt. Times are seconds of the sweep's clock."""

    # The key in the ledger: `trial_id` and `number` are known only once it is in the store.
    id: int
    cell_id: int
    cell: Cell
    layout: Layout
    nodes: tuple[str, ...]
    begins: NewTrial | NewAttempt
    predicted: PredictedStep | None
    expected_gpu_seconds: float | None
    since: float
    trial_id: int = 0
    # Among the attempts of its trial; 0: not in the store yet.
    number: int = 0
    code: AttemptCode = field(default_factory=AttemptCode)
    phase: Phase | None = None
    step: int = 0
    is_first_step_stored: bool = False
    end: Finished | None = None

    @property
    def purpose(self) -> Purpose:
        return self.begins.purpose if isinstance(self.begins, NewAttempt) else Purpose.NEW

    @property
    def is_repeat(self) -> bool:
        """True for an attempt of a measured trial, whose state stays as it is."""
        return self.purpose in REPEATS

    @property
    def has_loaded(self) -> bool:
        """True if its program has loaded its code: it makes steps, or has ended."""
        return self.phase in _AFTER_FIRST_STEP or self.end is not None

    @property
    def made_first_step(self) -> bool:
        """True if the attempt takes steps and its trial is in state running: not for repeats."""
        return not self.is_repeat and self.phase in _AFTER_FIRST_STEP


@dataclass(eq=False)
class CellAttempts:
    """The attempts of one cell that are in the ledger."""

    new: set[int] = field(default_factory=set)  # their ids
    repeats: dict[int, Purpose] = field(default_factory=dict)  # by trial


class Attempts:
    """The ledger of one call of `run_sweep`. A trial has at most one attempt in it."""

    def __init__(self) -> None:
        self.decided: list[Attempt] = []  # not started yet
        # Their ends are not in the store yet.
        self.ended: list[Attempt] = []
        # Attempts whose ends are in the store.
        self.num_recorded = 0
        # The sum over those, from their starts until their ends were recorded.
        self.recorded_seconds = 0.0
        self._started: dict[int, Attempt] = {}  # by trial
        self._by_cell: defaultdict[int, CellAttempts] = defaultdict(CellAttempts)
        self._num_decided = self._num_new = self._num_stepped = 0

    def __len__(self) -> int:
        return len(self.decided) + len(self._started)

    def __iter__(self) -> Iterator[Attempt]:
        return chain(self.decided, self._started.values())

    @property
    def running(self) -> Collection[Attempt]:
        """The attempts that were started and whose ends are not in the store."""
        return self._started.values()

    @property
    def trials(self) -> Collection[int]:
        """The trials of `running`."""
        return self._started.keys()

    def of_cell(self, cell_id: int) -> CellAttempts:
        """Return the cell's part of the ledger. It changes with the ledger."""
        return self._by_cell[cell_id]

    def num_in(self, state: TrialState) -> int:
        """Return how many trials are in this state because of their attempts here."""
        if state is TrialState.RUNNING:
            return self._num_stepped
        return self._num_new - self._num_stepped if state is TrialState.LAUNCHING else 0

    # -- the life of one attempt -----------------------------------------------------------------

    def decide(
        self,
        *,
        cell_id: int,
        cell: Cell,
        layout: Layout,
        nodes: tuple[str, ...],
        begins: NewTrial | NewAttempt,
        predicted: PredictedStep | None,
        expected_gpu_seconds: float | None,
        now: float,
    ) -> Attempt:
        """Add an attempt that is about to be written down and then started."""
        self._num_decided += 1
        attempt = Attempt(
            id=self._num_decided,
            cell_id=cell_id,
            cell=cell,
            layout=layout,
            nodes=nodes,
            begins=begins,
            predicted=predicted,
            expected_gpu_seconds=expected_gpu_seconds,
            since=now,
        )
        self.decided.append(attempt)
        own = self._by_cell[cell_id]
        if isinstance(begins, NewAttempt) and begins.is_repeat:
            own.repeats[begins.trial_id] = begins.purpose
        else:
            own.new.add(attempt.id)
            self._num_new += 1
        return attempt

    def start(
        self,
        attempt: Attempt,
        trial_id: int,
        number: int,
        *,
        now: float,
        code: Fingerprint | None = None,
    ) -> None:
        """Note that an attempt is in the store under this number, and is started."""
        self.decided.remove(attempt)
        attempt.trial_id, attempt.number, attempt.since = trial_id, number, now
        attempt.code = AttemptCode(at_start=code)
        self._started[trial_id] = attempt

    def hear(self, event: SchedulerEvent) -> None:
        """Note the scheduler's report on an attempt."""
        attempt = self._started[event.trial_id]
        if isinstance(event, Progressed):
            attempt.phase, attempt.step = event.phase, event.step
        elif isinstance(event, Finished):
            attempt.end = event
            self.ended.append(attempt)

    def note_first_step_stored(self, attempt: Attempt) -> None:
        """Note that the store has the attempt's trial as running."""
        attempt.is_first_step_stored = True
        self._num_stepped += 1

    def close(self, attempt: Attempt, *, now: float) -> None:
        """Remove an attempt whose end is in the store."""
        self.ended.remove(attempt)
        del self._started[attempt.trial_id]
        self._num_stepped -= attempt.is_first_step_stored
        own = self._by_cell[attempt.cell_id]
        if attempt.is_repeat:
            del own.repeats[attempt.trial_id]
        else:
            own.new.remove(attempt.id)
            self._num_new -= 1
        self.num_recorded += 1
        self.recorded_seconds += max(now - attempt.since, 0.0)
