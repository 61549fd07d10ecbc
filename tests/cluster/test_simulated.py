"""A simulated sweep: the real loop and store, and the numbers that real ranks would report."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from db.types import AttemptState
from orchestrator import cli
from orchestrator.cluster.contract import Finished
from orchestrator.cluster.simulated import NODE_AWAY_SECONDS, SimulatedScheduler, simulated
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.machines.packing import Shape
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.sweepfile.measurement_section import WAIT_FOR_NODES_SECONDS
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TERMINAL, TrialState
from orchestrator.core.trial.machine_load import NO_LOAD
from orchestrator.node.launcher import NodeLauncher
from orchestrator.sweep.progress import Snapshot, StopReason, SweepResult
from orchestrator.sweep.run import run_sweep
from orchestrator.sweep.stop_rules import MACHINE_FAULTS_IN_A_ROW
from tests.node.launching import faulty, order


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


def spec(**changes: Any) -> SweepSpec:
    content = {
        "name": "s",
        "model": "llama-3.1-8b",
        "gpus": [8, 16],
        "gpus_per_node": 8,
        "device": "h100-sxm",
        "sequence_length": 4096,
        "global_batch_size": 64,
        "axes": {"micro_batch_size": [1, 2], "zero_stage": [0, 3], "recompute": ["none", "full"]},
        "workload": "synthetic",
        "search": {"confirm": {"repeats": 0}},
    }
    return SweepSpec.model_validate(content | changes)


def run(store: Store, wanted: SweepSpec, **options: Any) -> tuple[SweepResult, SimulatedScheduler]:
    scheduler = SimulatedScheduler(simulated(wanted), **options)
    result = run_sweep(
        simulated(wanted),
        store=store,
        open_scheduler=lambda: scheduler,
        code=Fingerprint(orchestrator_version="test"),
        hardware=lambda _: DEVICES["h100-sxm"],
        clock=scheduler.clock,
    )
    return result, scheduler


def test_a_simulated_attempt_gives_the_numbers_that_its_ranks_would_have_given(
    tmp_path: Path,
) -> None:
    drift = [
        {"kind": "slow_node", "size": 0.5, "node": "node-0"},
        {"kind": "wave", "size": 0.4, "seconds": 600.0},
    ]
    asked = order(options={"noise": 0.05, "drift": drift})
    asked = replace(
        asked,
        request=asked.request.model_copy(update={"elapsed_seconds": 200.0, "nodes": ("node-0",)}),
    )
    launcher = NodeLauncher(tmp_path, node="here")
    try:
        real = launcher.run(asked)
    finally:
        launcher.close()
    scheduler = SimulatedScheduler(simulated(spec(gpus=8)))
    scheduler.start(asked.request, Shape(num_nodes=1, slots_per_node=2), ["node-0"])
    (event,) = scheduler.poll(1.0)
    assert isinstance(event, Finished)
    mine, theirs = event.reports[0].ranks[0].result, real.ranks[0].result
    assert mine is not None
    assert theirs is not None
    same = (
        "step_seconds",
        "warmup_seconds",
        "peak_memory_allocated_bytes",
        "peak_memory_reserved_bytes",
        "device_memory_bytes",
        "peak_flops",
    )
    assert {name: getattr(mine, name) for name in same} == {
        name: getattr(theirs, name) for name in same
    }
    assert event.gpu_seconds == pytest.approx(2 * scheduler.clock(), rel=0.1), (
        "two slots, from its start to now, its cleaning up included"
    )


@pytest.mark.parametrize(
    ("fault", "at"),
    [
        ("oom", "forward"),
        ("config_rejected", "init"),
        ("crash", "step_2"),
        ("segfault", "step_2"),
        ("nccl_error", "init"),
        ("lost_rank", "step_1"),
        ("nan_loss", "step_3"),
        ("preempted", "step_2"),
        ("xid", "init"),
    ],
)
def test_a_fault_comes_to_the_same_kind_as_in_a_rank(tmp_path: Path, fault: str, at: str) -> None:
    asked = order(options=faulty(fault, at=at, rank=0))
    launcher = NodeLauncher(tmp_path, node="here")
    try:
        real = launcher.run(asked)
    finally:
        launcher.close()
    scheduler = SimulatedScheduler(
        simulated(
            spec(
                workload={
                    "name": "synthetic",
                    "options": {"faults": [{"fault": fault, "at": at, "rank": 0}]},
                }
            )
        )
    )
    scheduler.start(asked.request, Shape(num_nodes=1, slots_per_node=2), ["node-0"])
    (event,) = scheduler.poll(1.0)
    assert isinstance(event, Finished)
    assert event.failure is not None
    assert real.failure is not None
    assert (event.failure.kind, event.failure.phase) == (real.failure.kind, real.failure.phase)


def test_a_name_too_long_to_be_simulated_under_is_told_with_a_shorter_one() -> None:
    with pytest.raises(
        UsageInvalid, match=r"at most 63 are possible: give it a shorter name, name=x{53}$"
    ):
        simulated(spec(name="x" * 63))
    assert simulated(spec(name="x" * 53)).name == "x" * 53 + "-simulated"


def test_a_sweep_is_simulated_to_its_end_and_always_alike(store: Store, tmp_path: Path) -> None:
    result, scheduler = run(store, spec())
    assert set(result.stopped.values()) == {StopReason.EXHAUSTED}
    states = Counter(t.state for t in store.trials(result.sweep_id))
    assert states[TrialState.MEASURED] > 0
    assert states[TrialState.OUT_OF_MEMORY] > 0, "8B parameters without sharding take 128 GB of 80"
    assert scheduler.clock() > 60 * result.counts[TrialState.MEASURED] / 2, (
        "virtual: a launch alone takes a minute, on two nodes"
    )
    with Store.open(f"sqlite:///{tmp_path / 'again.sqlite'}") as other:
        run(other, spec())
        assert [
            (t.layout, t.state, t.step_seconds_median, t.gpu_seconds) for t in other.trials(1)
        ] == [(t.layout, t.state, t.step_seconds_median, t.gpu_seconds) for t in store.trials(1)]


def test_a_budget_of_time_is_of_the_simulated_clock(store: Store) -> None:
    result, scheduler = run(store, spec(search={"max_wall_time": "10m", "max_parallel_trials": 1}))
    assert StopReason.WALL_TIME in result.stopped.values()
    assert 600 <= scheduler.clock() < 1200
    assert not result.finished


def test_lost_nodes_cost_attempts_and_no_trial(store: Store) -> None:
    # One of eight nodes is lost every six minutes on average; a trial takes a minute or two.
    wide = spec(
        axes={
            "micro_batch_size": [1, 2, 4],
            "zero_stage": [1, 2, 3],
            "recompute": ["none", "full"],
            "tensor_parallel_size": [1, 2, 4],
        }
    )
    result, scheduler = run(store, wide, num_nodes=8, node_loss_hours=0.8)
    attempts = [a for t in store.trials(result.sweep_id) for a in store.trial(t.id).attempts]
    lost = [
        a for a in attempts if a.failure is not None and a.failure.kind is FailureKind.NODE_LOST
    ]
    assert lost
    assert {a.state for a in lost} == {AttemptState.REQUEUED}
    assert not {t.state for t in store.trials(result.sweep_id)} & {
        TrialState.QUEUED,
        TrialState.LAUNCHING,
        TrialState.RUNNING,
    }
    assert len(scheduler.slots.nodes) < 8 or scheduler.clock() > NODE_AWAY_SECONDS


def test_a_lost_node_is_back_before_a_sweep_that_needs_it_gives_up(store: Store) -> None:
    """One node is lost every quarter of an hour on average, and every gang needs all nodes."""
    result, scheduler = run(
        store,
        spec(
            gpus=64, global_batch_size=64, axes={"micro_batch_size": [1], "zero_stage": [1, 2, 3]}
        ),
        node_loss_hours=2.0,
    )
    assert NODE_AWAY_SECONDS < WAIT_FOR_NODES_SECONDS
    assert set(result.stopped.values()) == {StopReason.EXHAUSTED}
    attempts = [a for t in store.trials(result.sweep_id) for a in store.trial(t.id).attempts]
    assert any(a.failure is not None and a.failure.kind is FailureKind.NODE_LOST for a in attempts)
    assert scheduler.clock() > NODE_AWAY_SECONDS


def test_a_sweep_that_does_not_wait_for_a_lost_node_ends_with_what_it_has(store: Store) -> None:
    impatient = spec(
        gpus=64,
        global_batch_size=64,
        axes={"micro_batch_size": [1], "zero_stage": [1, 2, 3]},
        measurement={"wait_for_nodes": 60},
    )
    result, _ = run(store, impatient, node_loss_hours=2.0)
    assert StopReason.NODES in result.stopped.values()


def test_nodes_go_while_nobody_runs_as_well() -> None:
    scheduler = SimulatedScheduler(simulated(spec(gpus=64)), node_loss_hours=1.0)
    while scheduler.clock() < 3600.0:
        scheduler.poll(0.5)
    fewest = len(scheduler.slots.nodes)
    assert fewest < 8, "eight nodes that run for an hour each, and are away for ten minutes"


def test_a_simulated_step_over_its_limit_hangs_its_layout_and_ends_no_other_cell(
    store: Store,
) -> None:
    """70B on 16 GPUs takes 60 to 160 s a step, and 8B takes 5."""
    slow = spec(
        model=["llama-3.1-8b", "llama-3.1-70b"],
        gpus=16,
        global_batch_size=256,
        measurement={"limits": {"steady": 60}},
        axes={
            "micro_batch_size": [1, 2],
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": [1, 2],
            "recompute": ["none", "full"],
            "zero_stage": [0, 1],
        },
    )
    result, _ = run(store, slow)
    reasons = {cell.model.name: reason for cell, reason in result.stopped.items()}
    assert reasons["llama-3.1-8b"] is StopReason.EXHAUSTED
    assert [cell.model.name for cell in result.nothing_feasible] == ["llama-3.1-70b"]
    hung = [t for t in store.trials(result.sweep_id) if t.failure_kind is FailureKind.HUNG]
    assert hung
    assert all("steady limit of 60 s" in (t.failure_message or "") for t in hung)
    automatic = SweepSpec.model_validate(slow.model_dump() | {"name": "auto", "measurement": {}})
    result, _ = run(store, automatic)
    assert result.nothing_feasible == []


@pytest.mark.parametrize("strategy", ["exhaustive", "auto"])
def test_a_shape_that_hangs_keeps_no_other_layout_of_its_cell_from_being_measured(
    store: Store, strategy: str
) -> None:
    shape = spec(
        model="llama-3.2-1b",
        gpus=8,
        global_batch_size=128,
        axes={
            "micro_batch_size": [1, 2, 4],
            "zero_stage": [0, 1],
            "recompute": ["none", "full", "selective_ops"],
            "tensor_parallel_size": [1, 2, 4],
        },
        workload={
            "name": "synthetic",
            "options": {
                "faults": [
                    {"fault": "hang", "at": "step_3", "only_if": {"tensor_parallel_size": 2}}
                ]
            },
        },
        search={"strategy": strategy, "confirm": {"repeats": 0}, "max_trials": None},
    )
    result, _ = run(store, shape)
    assert set(result.stopped.values()) == {StopReason.EXHAUSTED}
    assert result.counts[TrialState.MEASURED] == 36
    assert result.counts[TrialState.FAILED] == 18


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_node_that_is_lost_with_all_its_gangs_does_not_end_a_sweep(
    store: Store, seed: int
) -> None:
    # Eight gangs of one GPU per node; one of eight nodes is lost every 90 s on average.
    wide = spec(
        gpus=1,
        model="llama-3.2-1b",
        sequence_length=[1024, 2048, 4096],
        axes={
            "micro_batch_size": [1, 2, 4, 8, 16, 32],
            "recompute": ["none", "full", "selective_ops", "selective_attention"],
        },
        search={"seed": seed, "confirm": {"repeats": 0}},
    )
    result, _ = run(store, wide, num_nodes=8, node_loss_hours=0.2)
    assert set(result.stopped.values()) == {StopReason.EXHAUSTED}
    assert max(store.node_faults(result.sweep_id).values()) >= MACHINE_FAULTS_IN_A_ROW, (
        "so many gangs went with one node"
    )


def test_what_a_simulated_sweep_held_adds_up_on_the_simulated_clock(store: Store) -> None:
    result, scheduler = run(store, spec(), num_nodes=8, node_loss_hours=0.2)
    attempts = [a for t in store.trials(result.sweep_id) for a in store.trial(t.id).attempts]
    found = store.reserved(result.sweep_id)
    assert found.total.reserved == pytest.approx(sum(a.gpu_seconds or 0.0 for a in attempts))
    assert (
        min(
            found.total.useful,
            found.total.warmup,
            found.total.startup,
            found.total.out_of_memory,
            found.total.lost,
        )
        > 0
    )
    assert (found.total.idle, found.total.under_way) == (
        pytest.approx(0.0, abs=1e-6),
        0.0,
    )  # its lease ends with its attempt
    assert found.capacity is not None
    assert found.total.reserved < found.capacity <= 8 * 8 * scheduler.clock()


def test_a_simulated_budget_of_money_is_hardly_passed(store: Store) -> None:
    result, _ = run(
        store,
        spec(price_per_gpu_hour=2.0, search={"max_cost": 4.0, "confirm": {"repeats": 0}}),
        num_nodes=4,
    )
    assert StopReason.COST in result.stopped.values()
    attempts = [
        a.gpu_seconds or 0.0
        for t in store.trials(result.sweep_id)
        for a in store.trial(t.id).attempts
    ]
    # The budget is two hours: at first nothing is known of such trials, and launches differ by a
    # fifth.
    assert 2 * 3600 - max(attempts) < sum(attempts) < 2 * 3600 + max(attempts)


def test_another_workload_is_simulated_by_the_synthetic_one_under_a_name_of_its_own() -> None:
    real = spec(workload="llama", axes={"micro_batch_size": [1, 2]}, device="h200")
    acted = simulated(real)
    assert (acted.name, acted.workload.name, acted.device) == ("s-simulated", "synthetic", "h200")
    assert acted.cells() == real.cells()
    varied = spec(workload="llama", axes={"options": {"attention": ["flash", "eager"]}})
    with pytest.raises(UsageInvalid, match="attention are options of workload llama"):
        simulated(varied)


def test_the_command_simulates_and_shows_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setenv("SWEEP_DB", f"sqlite:///{tmp_path}/s.sqlite")
    file = tmp_path / "s.yaml"
    file.write_text(json.dumps(spec().model_dump(mode="json", exclude_none=True)))
    assert cli.main(["run", str(file), "--simulate", "--nodes", "3", "--json"]) == 0
    told = capsys.readouterr()
    assert {row["sweep"] for row in json.loads(told.out)["best"]} == {"s-simulated"}
    assert (
        "Simulated, on a clock of its own: 3 nodes of 8 h100-sxm. Nothing is measured" in told.err
    )
    assert f"store at sqlite:///{tmp_path}/s.sqlite: no sweep yet\n" in told.err
    assert cli.main(["run", str(file), "--simulate", "--nodes", "3", "--json"]) == 0
    assert f"store at sqlite:///{tmp_path}/s.sqlite: 1 sweep\n" in capsys.readouterr().err
    assert cli.main(["run", str(file), "--nodes", "4"]) == 2
    assert "add --simulate" in capsys.readouterr().err
    assert cli.main(["run", str(file), "gpus=64", "--simulate", "--nodes", "3"]) != 0
    assert "Lower gpus, or raise --nodes" in capsys.readouterr().err


def test_a_simulation_tells_each_end_at_its_time_with_the_state_as_of_then(
    sqlite_store: Store,
) -> None:
    acted = simulated(spec(search={"max_trials": 6, "confirm": {"repeats": 0}}))
    scheduler = SimulatedScheduler(acted, num_nodes=2)
    seen: list[Snapshot] = []
    run_sweep(
        acted,
        store=sqlite_store,
        open_scheduler=lambda: scheduler,
        code=Fingerprint(orchestrator_version="test"),
        hardware=lambda _: None,
        clock=scheduler.clock,
        observe=seen.append,
    )
    ends = [one for snapshot in seen for one in snapshot.ended]
    over = [
        sum(one.counts.get(state, 0) for state in TERMINAL - {TrialState.PRUNED}) for one in ends
    ]
    assert over == list(range(1, len(ends) + 1))
    assert [one.seconds for one in ends] == sorted(one.seconds for one in ends)
    assert len({one.seconds for one in ends}) > 1
    searched = [one for snapshot in seen for one in snapshot.searched]
    assert {one.cell for one in searched} == set(acted.cells())
    assert seen[-1].untried == sum(one.untried for one in searched) > 0


def test_what_diverges_is_never_ranked_and_what_is_preempted_or_loses_its_gpu_is_measured_again(
    store: Store,
) -> None:
    faults = [
        {"fault": "nan_loss", "at": "step_2", "only_if": {"micro_batch_size": 1}},
        {
            "fault": "preempted",
            "at": "step_3",
            "only_if": {"micro_batch_size": 2, "recompute": "none"},
            "first_attempt_only": True,
        },
        {
            "fault": "xid",
            "at": "step_3",
            "only_if": {"micro_batch_size": 2, "recompute": "full"},
            "first_attempt_only": True,
        },
    ]
    wanted = spec(
        gpus=8,
        axes={"micro_batch_size": [1, 2], "zero_stage": 3, "recompute": ["none", "full"]},
        workload={"name": "synthetic", "options": {"faults": faults}},
    )
    result, _ = run(store, wanted)
    by_size: dict[int, set[TrialState]] = {}
    for trial in store.trials(result.sweep_id):
        by_size.setdefault(trial.layout.micro_batch_size, set()).add(trial.state)
    assert by_size == {1: {TrialState.FAILED}, 2: {TrialState.MEASURED}}
    details = [store.trial(trial.id) for trial in store.trials(result.sweep_id)]
    kinds = Counter(
        attempt.failure.kind
        for detail in details
        for attempt in detail.attempts
        if attempt.failure is not None
    )
    assert kinds == {FailureKind.NOT_FINITE: 2, FailureKind.PREEMPTED: 1, FailureKind.XID: 1}
    (best,) = store.best(result.sweep_id, 9).values()
    assert {trial.layout.micro_batch_size for trial in best} == {2}
    reserved = store.reserved(result.sweep_id).total
    assert 0 < reserved.lost < reserved.failed, "the preempted attempt; three of the others"
    assert all(attempt.load == NO_LOAD for detail in details for attempt in detail.attempts), (
        "of a machine that is not there nothing is known"
    )
