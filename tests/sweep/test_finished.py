"""What the store alone tells of a sweep that an earlier call finished, with a scripted scheduler
and a real SQLite store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from db.store import Store
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import TrialRequest
from orchestrator.sweep.finished import finished_before
from orchestrator.sweep.progress import Stop, StopReason, SweepResult
from orchestrator.sweep.run import run_sweep
from tests.sweep.fake_scheduler import FakeScheduler, Script

VERSION = "1"
CODE = Fingerprint(orchestrator_version=VERSION, git_sha="abc")


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


def spec(**changes: Any) -> SweepSpec:
    content = {
        "name": "t",
        "model": "llama-tiny",
        "sequence_length": 64,
        "global_batch_size": 8,
        "precision": "fp32",
        "gpus": [1, 2],
        "gpus_per_node": 2,
        "device": "cpu",
        "axes": {"micro_batch_size": [1, 2], "recompute": ["none", "full"]},
    }
    return SweepSpec.model_validate(content | changes)


def fast(request: TrialRequest) -> float:
    return 1.0 / request.layout.micro_batch_size


def run(
    store: Store,
    script: Script = fast,
    *,
    asked: Stop = Stop.GO_ON,
    edited: Callable[[], Fingerprint | None] | None = None,
    **changes: Any,
) -> SweepResult:
    return run_sweep(
        spec(**changes),
        store=store,
        open_scheduler=lambda: FakeScheduler(script),
        code=CODE,
        edited=edited,
        hardware=lambda _: None,
        clock=time.monotonic,
        stop=lambda: asked,
    )


def finished(
    store: Store,
    *,
    version: str = VERSION,
    host: str | None = None,
    code: Fingerprint = CODE,
    **changes: Any,
) -> SweepResult | None:
    return finished_before(
        spec(**changes), store, code=lambda: code, program_version=version, this_host=host
    )


def test_a_finished_sweep_is_told_as_its_own_call_told_it(store: Store) -> None:
    then = run(store)
    now = finished(store)
    assert now is not None
    assert (now.sweep_id, now.nothing_feasible, now.finished) == (then.sweep_id, [], True)
    assert {state: n for state, n in now.counts.items() if n} == {TrialState.MEASURED: 8}
    assert now.stopped == dict.fromkeys(then.stopped, StopReason.BEFORE)


def test_a_limit_of_trials_is_told_of_the_cells_that_it_stopped(store: Store) -> None:
    changes = {
        "axes": {"micro_batch_size": [1, 2, 4, 8], "recompute": ["full"]},
        "search": {"max_trials": 4, "confirm": {"repeats": 0}},
    }
    # Each of two ranks has 4 of 8 samples: no micro-batch of 8.
    then = run(store, **changes)
    assert {cell.num_gpus: reason for cell, reason in then.stopped.items()} == {
        1: StopReason.TRIALS,
        2: StopReason.EXHAUSTED,
    }
    now = finished(store, **changes)
    assert now is not None
    assert {cell.num_gpus: reason for cell, reason in now.stopped.items()} == {
        1: StopReason.TRIALS,
        2: StopReason.BEFORE,
    }


def test_layouts_that_were_never_tried_are_told_again_with_the_reason(store: Store) -> None:
    changes = {
        "gpus": 1,
        "axes": {"micro_batch_size": [1, 2, 4, 8], "recompute": ["none", "full"]},
        "search": {"plateau": {"trials": 2, "gain": 0.5}, "confirm": {"repeats": 0}},
    }
    then = run(store, lambda request: 1.0, **changes)
    now = finished(store, **changes)
    assert now is not None
    assert list(then.stopped.values()) == list(now.stopped.values()) == [StopReason.PLATEAU]
    assert now.untried == then.untried
    assert sum(now.untried.values()) == 8 - sum(now.counts.values()) > 0


def test_a_cell_in_which_nothing_was_measured_is_told_again(store: Store) -> None:
    then = run(
        store,
        lambda request: (
            FailureKind.OOM_GPU if request.layout.data_parallel_size == 1 else fast(request)
        ),
    )
    now = finished(store)
    assert now is not None
    assert now.nothing_feasible == then.nothing_feasible != []


def test_the_last_failure_of_a_cell_in_which_nothing_was_measured_is_told(store: Store) -> None:
    then = run(
        store,
        lambda request: (
            FailureKind.CONFIG_REJECTED if request.layout.data_parallel_size == 1 else fast(request)
        ),
    )
    ((cell, failed),) = then.failed.items()
    last = max(store.trials(then.sweep_id, cell_id=1), key=lambda trial: trial.updated_at)
    assert (cell.num_gpus, failed.num, failed.last_id) == (1, 4, last.id)
    assert failed.last == f"config_rejected: {last.failure_message}"
    now = finished(store)
    assert now is not None and now.failed == then.failed


def test_a_sweep_that_nobody_began_or_another_of_that_file_is_not_finished(store: Store) -> None:
    assert finished(store) is None
    run(store)
    assert finished(store, name="other") is None
    assert finished(store, axes={"micro_batch_size": [1, 2, 4]}) is None
    assert finished(store, search={"max_trials": 100}) is None


def test_a_sweep_that_was_stopped_or_has_trials_to_measure_again_is_not_finished(
    store: Store,
) -> None:
    run(store, search={"max_trials": 1}, asked=Stop.DRAIN)
    assert finished(store, search={"max_trials": 1}) is None
    run(store)
    assert finished(store) is not None
    store.invalidate("trial_id = 1")
    assert finished(store) is None


def test_a_sweep_that_somebody_works_on_is_not_finished(store: Store) -> None:
    result = run(store)
    store.acquire(
        result.sweep_id, host="a", pid=1, spec_json=spec().model_dump_json(), ttl_seconds=60
    )
    assert finished(store) is None


def test_another_version_of_the_program_may_know_more_layouts(store: Store) -> None:
    run(store)
    assert finished(store, version="2") is None


@pytest.mark.parametrize("left_open", [{"device": "auto"}, {"gpus_per_node": "auto"}])
def test_what_the_file_leaves_to_the_machine_is_known_on_the_same_machine_only(
    store: Store, left_open: dict[str, Any]
) -> None:
    run(store, **left_open)
    assert finished(store, host="here", **left_open) is not None
    assert finished(store, host="elsewhere", **left_open) is None
    assert finished(store, host=None, **left_open) is None


def test_a_sweep_that_an_edit_ended_goes_on_once_the_edit_is_taken_back(store: Store) -> None:
    edited = CODE.model_copy(update={"git_sha": "def"})
    # Asked at the start and at the first step of each of four layouts, then for the first repeat.
    edits = [*[None] * 8, edited]
    then = run(store, gpus=1, edited=lambda: edits.pop(0) if edits else None)
    assert then.code_has_changed
    now = finished(store, gpus=1, code=edited)
    assert now is not None and now.code_has_changed
    assert finished(store, gpus=1) is None
