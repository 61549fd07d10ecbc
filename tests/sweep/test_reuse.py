"""What another sweep measured is taken over where conditions are equal, and only if asked."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from db.sql import readonly
from db.store import Store
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import Device
from orchestrator.sweep.run import run_sweep
from tests.sweep.fake_scheduler import FakeScheduler
from tests.sweep.test_loop import CODE, fast, out_of_memory_above, run, spec, store

__all__ = ["store"]  # the fixture
# With two GPUs, micro-batches of 8 would need a larger batch.
WIDER = {"micro_batch_size": [1, 2, 4, 8], "recompute": ["none", "full"]}


def mine(**changes: Any) -> SweepSpec:
    return spec(name="mine", **{"axes": WIDER, **changes})


def test_what_another_sweep_measured_is_not_launched_again(store: Store) -> None:
    run(store, fast, spec=spec(repeats=1))
    source = store.sweep_named("t")
    result, scheduler = run(store, fast, spec=mine(), reused="t")
    assert {layout.micro_batch_size for layout, _ in scheduler.started} == {8}
    assert result.counts[TrialState.MEASURED] == 14
    assert sum(result.launched.values()) == 2
    theirs = {trial.id: trial for trial in store.trials(source.id)}
    reused = [trial for trial in store.trials(result.sweep_id) if trial.reused_from is not None]
    assert len(reused) == 12
    for trial in reused:
        assert trial.reused_from is not None
        of_theirs = theirs[trial.reused_from]
        assert (trial.layout, trial.state, trial.step_seconds_median, trial.num_measurements) == (
            of_theirs.layout,
            of_theirs.state,
            of_theirs.step_seconds_median,
            of_theirs.num_measurements,
        )
        assert trial.why == f"reused from trial {of_theirs.id} of sweep t"
        assert trial.is_current_fingerprint
    detail = store.trial(reused[0].id)
    assert [event.event for event in detail.events] == [
        "added",
        "gang_placed",
        "first_step",
        "measured",
    ]
    # It reserved no GPU here.
    assert {attempt.gpu_seconds for attempt in detail.attempts} == {None}
    assert store.reserved(result.sweep_id).total.reserved < store.reserved(source.id).total.reserved
    # Once more: nothing is left to add or to launch.
    again, scheduler = run(store, fast, spec=mine(), reused="t")
    assert scheduler.started == [] and again.counts == result.counts


def test_nothing_is_reused_unless_it_is_asked_for(store: Store) -> None:
    run(store, fast)
    _, scheduler = run(store, fast, spec=mine())
    assert len(scheduler.started) == 14


def test_only_layouts_and_cells_that_the_file_names_are_taken_over(store: Store) -> None:
    run(store, fast)
    axes = {"micro_batch_size": [2], "recompute": ["none", "full"]}
    result, scheduler = run(store, fast, spec=mine(axes=axes, gpus=[1]), reused="t")
    assert scheduler.started == [] and result.counts[TrialState.MEASURED] == 2
    with pytest.raises(UsageInvalid, match="has no cell of sweep other"):
        run(store, fast, spec=spec(name="other", sequence_length=32), reused="t")


def test_an_out_of_memory_that_was_taken_over_condemns_larger_layouts(store: Store) -> None:
    script = out_of_memory_above(2)
    batch = {"global_batch_size": 16, "gpus": [1]}
    run(store, script, spec=spec(**batch))
    result, scheduler = run(store, script, spec=mine(**batch), reused="t")
    assert [layout.short for layout, _ in scheduler.started] == ["dp1 mbs8 ga2 full fp32"]
    (pruned,) = [
        trial
        for trial in store.trials(result.sweep_id)
        if trial.layout.short == "dp1 mbs8 ga2 none fp32"
    ]
    assert pruned.state is TrialState.PRUNED
    proof = store.trials_by_id([pruned.condemned_by or 0])[0]
    assert (proof.cell_id, proof.state) == (pruned.cell_id, TrialState.OUT_OF_MEMORY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": "synthetic"}, "under other conditions: .*workload was 'llama'"),
        ({"name": "t"}, "cannot reuse itself"),
    ],
)
def test_other_conditions_are_refused_by_name_and_leave_no_sweep(
    store: Store, changes: dict[str, Any], message: str
) -> None:
    run(store, fast)
    with pytest.raises(UsageInvalid, match=message):
        run(store, fast, spec=spec(**{"name": "mine", **changes}), reused="t")
    assert [row.name for row in store.sweeps()] == ["t"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"git_sha": "abc"}, "the code's commit was none, is abc"),
        ({"dirty_diff_digest": "files:1"}, "the digest of its files was none, is files:1"),
    ],
    ids=["commit", "outside git"],
)
def test_other_code_is_refused_with_both(store: Store, change: dict[str, str], told: str) -> None:
    run(store, fast)
    with pytest.raises(UsageInvalid, match=told):
        run_sweep(
            mine(),
            store=store,
            open_scheduler=lambda: FakeScheduler(fast),
            code=CODE.model_copy(update=change),
            hardware=lambda _: None,
            clock=lambda: 0.0,
            reused="t",
        )


@pytest.mark.parametrize(
    ("driver_name", "of_ray", "refusal"),
    [
        ("Tesla T4", "T4", None),
        ("NVIDIA A100-SXM4-80GB", "A100-80G", None),
        ("Tesla T4", None, None),
        ("Tesla T4", "L4", "device was Tesla T4, is L4"),
        (
            "NVIDIA A100-SXM4-40GB",
            "A100",
            "device was NVIDIA A100-SXM4-40GB, is A100 .Ray's name of several",
        ),
    ],
)
def test_gpus_are_the_same_if_the_name_that_ray_gives_them_is_sure(
    store: Store, driver_name: str, of_ray: str | None, refusal: str | None
) -> None:
    """The second sweep starts on a machine without GPUs, so only Ray names the cluster's."""
    on_gpus = partial(FakeScheduler, fast, device=Device.CUDA)
    run(store, fast, spec=spec(gpus=1), scheduler=on_gpus(device_name=driver_name))
    again = partial(
        run, store, fast, spec=mine(gpus=1), reused="t", scheduler=on_gpus(device_name=of_ray)
    )
    if refusal is not None:
        with pytest.raises(UsageInvalid, match=refusal):
            again()
        return
    result, _ = again()
    reused = [trial for trial in store.trials(result.sweep_id) if trial.reused_from is not None]
    assert len(reused) == 6


def test_a_reused_measurement_teaches_predictions_once(store: Store) -> None:
    run(store, fast)
    run(store, fast, spec=mine(), reused="t")
    observed = store.observations()
    # 12 of the first, 2 of the second.
    assert len(observed) == 14


def test_a_removed_sweep_leaves_its_measurements_to_those_that_reuse_them(
    store: Store, sqlite_url: str
) -> None:
    run(store, fast)
    result, _ = run(store, fast, spec=mine(), reused="t")
    source = store.sweep_named("t")
    assert store.reusers(source.id) == {"mine": 12}
    store.remove(source.id)
    reused = "SELECT count(*), count(reused_from) FROM v_trial WHERE state = 'measured'"
    assert readonly.query(sqlite_url, reused).rows == [(14, 0)]
    assert len(store.observations()) == 14
    assert store.best(result.sweep_id)
