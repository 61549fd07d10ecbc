"""What a stored trial says to a search, with a trial in every state in a real SQLite store."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest

from db.read.rows import TrialRow
from db.store import Store
from orchestrator.core.search.outcome import Failed, Measured, OutOfMemory
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.search.layout_state import Condemned, Known, SetAside, UnderWay
from orchestrator.sweep.known_outcome import known_of, with_proofs
from tests.cli.cli_store import fill
from tests.db.builders import Bench, failure, record_failure

# The measured trial's GPUs drew 612 W each.
JOULES = 612 / 1234.5


def measured(trial: TrialRow, *, peak_memory_bytes: int | None) -> Measured:
    assert trial.step_seconds_median is not None
    return Measured.of_step(
        trial.step_seconds_median, peak_memory_bytes=peak_memory_bytes, joules_per_token=JOULES
    )


def test_each_state_says_what_it_proves_of_the_layout(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/sweep.sqlite") as store:
        ids = fill(store, tmp_path)
        trials = {t.id: t for t in store.trials(store.sweep_named("tiny").id)}
    said = {id: known_of(trial) for id, trial in trials.items()}
    oom = said[ids.out_of_memory]
    assert isinstance(oom, OutOfMemory)
    assert oom.excess is not None
    assert oom.excess > 0
    expected: dict[int, Known] = {
        ids.measured: measured(trials[ids.measured], peak_memory_bytes=75 << 30),
        ids.pruned: Condemned(),
        ids.failed: Failed(),
        ids.queued: UnderWay(),
        ids.launching: UnderWay(),
        ids.running: UnderWay(),
    }
    assert {trial: said[trial] for trial in expected} == expected


def test_numbers_of_other_conditions_and_faults_of_the_machine_say_nothing(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/sweep.sqlite") as store:
        ids = fill(store, tmp_path)
        bench = Bench.on(store, "lost")
        lost, number = bench.start()
        record_failure(
            store,
            lost,
            number,
            epoch=bench.epoch,
            failure=failure(FailureKind.NODE_LOST),
            event=TrialEvent.FAILED,
        )
        rows = {
            t.id: t for name in ("tiny", "lost") for t in store.trials(store.sweep_named(name).id)
        }
    assert [known_of(rows[i]) for i in (ids.old_conditions, lost)] == [
        None,
        None,
    ]


def test_a_counter_of_peak_memory_that_says_0_was_not_read(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/sweep.sqlite") as store:
        trial = store.trial(fill(store, tmp_path).measured).trial
    silent = replace(trial, peak_memory_reserved_bytes=0, peak_memory_allocated_bytes=0)
    assert known_of(silent) == measured(trial, peak_memory_bytes=None)


@pytest.fixture
def trials(tmp_path: Path) -> dict[str, TrialRow]:
    """A trial that was measured, one that failed and one that waits."""
    with Store.open(f"sqlite:///{tmp_path}/sweep.sqlite") as store:
        ids = fill(store, tmp_path)
        return {
            "measured": store.trial(ids.measured).trial,
            "failed": store.trial(ids.failed).trial,
            "queued": store.trial(ids.queued).trial,
        }


def test_tokens_that_a_program_counts_itself_do_not_change_what_is_learned(
    trials: dict[str, TrialRow],
) -> None:
    other = replace(trials["measured"], tokens_per_second_per_gpu=1.0)
    assert known_of(other) == known_of(trials["measured"])


def test_numbers_that_cannot_be_true_tell_only_that_the_layout_fits(
    trials: dict[str, TrialRow],
) -> None:
    wrong = replace(trials["measured"], implausible="MFU is 3.2")
    known = known_of(wrong)
    assert isinstance(known, Measured)
    assert isnan(known.score)
    assert known.peak_memory_bytes == 75 << 30


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (FailureKind.HUNG, Failed()),
        (FailureKind.START_TIMEOUT, Failed()),
        (FailureKind.NODE_LOST, UnderWay()),
        (None, UnderWay()),
    ],
)
def test_a_trial_that_waits_counts_as_failed_only_if_it_hung(
    trials: dict[str, TrialRow], kind: FailureKind | None, expected: Known
) -> None:
    waiting = replace(trials["queued"], failure_kind=kind)
    assert known_of(waiting) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (FailureKind.USER_ERROR, Failed()),
        (FailureKind.HUNG, Failed()),
        (FailureKind.CONFIG_REJECTED, Failed()),
        (FailureKind.NCCL, None),
        (FailureKind.STORAGE, None),
        (None, None),
    ],
)
def test_a_failure_tells_of_the_layout_unless_the_machine_was_at_fault(
    trials: dict[str, TrialRow], kind: FailureKind | None, expected: Known | None
) -> None:
    failed = replace(trials["failed"], failure_kind=kind)
    assert known_of(failed) == expected


def test_what_tells_nothing_is_set_aside_and_proofs_are_of_an_out_of_memory_alone() -> None:
    assert with_proofs(None, 7, {7: 2}) == SetAside()
    assert with_proofs(UnderWay(), 7, {7: 2}) == UnderWay()
    oom = OutOfMemory(excess=0.1)
    assert with_proofs(oom, 7, None) == oom
    assert with_proofs(oom, 7, {7: 2}) == replace(oom, num_proofs=2)
    assert with_proofs(oom, 7, {8: 2}) == replace(oom, num_proofs=0)
