"""A store gets everything late, twice, in any order: the first end of an attempt counts.

Hypothesis invents the history; a small model predicts the result, and the judge checks the log.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from db.types import AttemptState
from orchestrator.core.errors import LeaseLost
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import UNDER_WAY, IllegalTransition, TrialEvent, TrialState
from tests import new_store
from tests.db.builders import (
    Bench,
    failure,
    layout,
    measurement,
    record_failure,
    record_measurement,
    start_repeat,
)
from tests.examples import examples
from tests.faults.history import judge

pytestmark = pytest.mark.timeout(900)  # 15 s on idle cores

Attempt = tuple[int, int]
ENDS = {
    TrialEvent.OUT_OF_MEMORY: TrialState.OUT_OF_MEMORY,
    TrialEvent.FAILED: TrialState.FAILED,
    TrialEvent.REQUEUED: TrialState.QUEUED,
}


class LateMessages(RuleBasedStateMachine):
    """The model: `state` of each trial, and `running`, its attempt that may still end."""

    attempts: Bundle[Attempt] = Bundle("attempts")  # begun once, told of for ever
    epochs: Bundle[int] = Bundle("epochs")  # of owners that were replaced

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.store = new_store.on_sqlite(f"sqlite:///{self._folder.name}/sweep.sqlite")
        self.state: dict[int, TrialState] = {}
        self.running: dict[int, int] = {}
        self.value: dict[Attempt, float] = {}  # of each attempt that counts

    @initialize()
    def hold(self) -> None:
        self.bench = Bench.on(self.store)

    def teardown(self) -> None:
        self.store.close()
        self._folder.cleanup()

    @rule(target=attempts, size=st.integers(1, 6))
    def begin(self, size: int) -> Any:
        known = next(
            (
                trial
                for trial in self.store.trials(self.bench.sweep_id)
                if trial.layout == layout(size)
            ),
            None,
        )
        if known is not None and self.state[known.id] is not TrialState.QUEUED:
            with pytest.raises(IllegalTransition):
                self.bench.start(size)
            return multiple()
        trial_id, number = self.bench.start(size)
        self.state[trial_id], self.running[trial_id] = TrialState.LAUNCHING, number
        return trial_id, number

    @rule(target=attempts, attempt=attempts)
    def repeat(self, attempt: Attempt) -> Any:
        trial_id, _ = attempt
        if self.state[trial_id] is not TrialState.MEASURED or trial_id in self.running:
            return multiple()
        number = start_repeat(self.store, trial_id, self.bench.epoch)
        self.running[trial_id] = number
        return trial_id, number

    @rule(attempt=attempts)
    def step(self, attempt: Attempt) -> None:
        trial_id, _ = attempt
        if self._is_running(attempt) and self.state[trial_id] is TrialState.LAUNCHING:
            self.store.note_first_steps([attempt], epoch=self.bench.epoch)
            self.state[trial_id] = TrialState.RUNNING
        else:
            with pytest.raises(IllegalTransition):
                self.store.note_first_steps([attempt], epoch=self.bench.epoch)

    @rule(attempt=attempts, value=st.integers(1, 9))
    def measure(self, attempt: Attempt, value: int) -> None:
        trial_id, number = attempt
        counts = record_measurement(
            self.store,
            trial_id,
            number,
            epoch=self.bench.epoch,
            measurement=measurement(float(value)),
        )
        assert counts == (self._is_running(attempt) or attempt in self.value), (
            "only what runs may count, and what counts goes on to"
        )
        if self._is_running(attempt):
            del self.running[trial_id]
            self.state[trial_id], self.value[attempt] = TrialState.MEASURED, float(value)

    @rule(attempt=attempts, event=st.sampled_from(sorted(ENDS)))
    def fail(self, attempt: Attempt, event: TrialEvent) -> None:
        trial_id, number = attempt
        told = failure(
            FailureKind.OOM_GPU if event is TrialEvent.OUT_OF_MEMORY else FailureKind.KILLED
        )
        state = record_failure(
            self.store, trial_id, number, epoch=self.bench.epoch, failure=told, event=event
        )
        if self._is_running(attempt):
            del self.running[trial_id]
            if self.state[trial_id] in UNDER_WAY:
                self.state[trial_id] = ENDS[event]
        assert state is self.state[trial_id]

    @rule(target=epochs)
    def replace(self) -> int:
        """Another orchestrator takes the sweep, and gives back what it finds."""
        old = self.bench.epoch
        self.bench = Bench.on(self.store)
        self.store.mark_lost(self.bench.sweep_id, self.bench.epoch)
        for trial_id in self.running:
            lost = sum(a.state is AttemptState.LOST for a in self.store.trial(trial_id).attempts)
            if self.state[trial_id] in UNDER_WAY:
                self.state[trial_id] = (
                    TrialState.QUEUED if lost <= 5 else TrialState.FAILED
                )  # of POLICIES: five retries
        self.running.clear()
        return old

    @rule(epoch=consumes(epochs), attempt=attempts)
    def write_as_one_that_was_replaced(self, epoch: int, attempt: Attempt) -> None:
        trial_id, number = attempt
        with pytest.raises(LeaseLost):
            record_measurement(
                self.store, trial_id, number, epoch=epoch, measurement=measurement(6.66)
            )
        with pytest.raises(LeaseLost):
            record_failure(
                self.store,
                trial_id,
                number,
                epoch=epoch,
                failure=failure(),
                event=TrialEvent.OUT_OF_MEMORY,
            )

    @invariant()
    def the_store_says_what_came_of_it(self) -> None:
        if not self.state:
            return
        rows = self.store.trials(self.bench.sweep_id)
        assert {row.id: row.state for row in rows} == self.state
        for row in rows:
            values = sorted(
                value for (trial_id, _), value in self.value.items() if trial_id == row.id
            )
            assert row.num_measurements == len(values)
            assert (
                row.tokens_per_second_per_gpu is None
                if not values
                else row.tokens_per_second_per_gpu in values
            )

    @invariant()
    def its_log_leads_to_its_rows(self) -> None:
        if self.state:
            verdict = judge(self.store, "tiny", [])
            assert (list(verdict.broken), list(verdict.duplicated)) == ([], [])

    def _is_running(self, attempt: Attempt) -> bool:
        return self.running.get(attempt[0]) == attempt[1]


TestLateMessages = LateMessages.TestCase
TestLateMessages.settings = settings(
    max_examples=examples(30),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
