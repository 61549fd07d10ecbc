"""Which nodes a sweep uses: those that are fit when looked at, and not those that turn out to be
faulty. Scripted nodes, a real store.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from db.sql import readonly
from db.store import Store
from db.types import BenchReason
from orchestrator.cluster.contract import Finished, Prober
from orchestrator.core.errors import ClusterUnavailable
from orchestrator.core.machines.node_health import NodeFacts
from orchestrator.core.physics.step_time import predict_step_time
from orchestrator.core.physics.trainer import llama_trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import HANG_KINDS, FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import Device, TrialRequest
from orchestrator.sweep import node_pool
from orchestrator.sweep.node_pool import NodePool
from orchestrator.sweep.progress import Snapshot, Stop, SweepResult
from orchestrator.sweep.run import run_sweep
from tests.core.machines.test_node_health import node
from tests.db.builders import Bench, measurement, record_measurement, start_repeat
from tests.db.write.test_nodes import measured
from tests.sweep.fake_scheduler import FakeScheduler, Script
from tests.sweep.test_loop import fast, spec

H100 = DEVICES["h100-sxm"]
CODE = Fingerprint(orchestrator_version="test")


class ProbedScheduler(FakeScheduler):
    """Its nodes say of themselves what the test says, after so many polls as it says.

    Each poll takes a second of its clock.
    """

    def __init__(
        self,
        script: Script,
        said: Mapping[str, NodeFacts | str],
        *,
        polls: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(script, device=Device.CUDA, nodes=dict.fromkeys(said, 2))
        self.said = dict(said)
        self.asked: list[set[str]] = []
        self.num_polls = 0
        self.starts: dict[str, str] = {}
        self._polls = polls or {}
        # Node -> after how many polls it answers.
        self._due: dict[str, int] = {}

    def start_id(self, name: str) -> str:
        return self.starts.get(name, "first")

    def begin_probes(self, nodes: Collection[str]) -> None:
        self.asked.append(set(nodes))
        self._due |= {name: self.num_polls + self._polls.get(name, 1) for name in nodes}

    def probed(self) -> Mapping[str, NodeFacts | str]:
        answered = [name for name, at in self._due.items() if self.num_polls >= at]
        for name in answered:
            del self._due[name]
        return {name: self.said[name] for name in answered}

    def poll(self, timeout_seconds: float) -> list[Any]:
        self.num_polls += 1
        return super().poll(timeout_seconds)

    def clock(self) -> float:
        return float(self.num_polls)

    def join(self, name: str) -> None:
        """One more node."""
        self._slots = replace(self._slots, nodes={**self._slots.nodes, name: 2})
        self._free_slots.resize(self._slots.nodes)


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


def run(
    store: Store,
    scheduler: FakeScheduler,
    sweep: SweepSpec | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SweepResult:
    return run_sweep(
        sweep or spec(gpus=1),
        store=store,
        open_scheduler=lambda: scheduler,
        code=CODE,
        hardware=lambda _: H100,
        clock=clock,
    )


def used(scheduler: FakeScheduler) -> set[str]:
    return {name for nodes in scheduler.nodes_of.values() for name in nodes}


# -- when they are looked at -----------------------------------------------------------------------


def test_a_node_that_is_not_fit_gets_no_trial_and_its_reason_is_kept(store: Store) -> None:
    scheduler = ProbedScheduler(
        fast, {"a": node("a"), "b": node("b", xids={79: 1}), "c": "no answer within 90 s"}
    )
    assert isinstance(scheduler, Prober)
    result = run(store, scheduler)
    assert result.counts[TrialState.MEASURED] == 6
    assert used(scheduler) == {"a"}
    assert scheduler.asked == [{"a", "b", "c"}], "all at once, and once"
    found = store.node_checks(store.sweep_named("t").id)
    assert {name: row.failed for name, row in found.items()} == {
        "a": None,
        "b": "xid: 1 x Xid 79 (GPU has fallen off the bus)",
        "c": "answers: no answer within 90 s",
    }


def test_a_sweep_without_a_fit_node_ends_before_it_writes_a_trial(store: Store) -> None:
    scheduler = ProbedScheduler(
        fast, {"a": node("a", disk_error="/sweep is not writable"), "b": node("b", xids={48: 2})}
    )
    with pytest.raises(
        ClusterUnavailable, match=r"a \(disk: /sweep is not writable\); b \(xid: 2 x Xid 48"
    ) as caught:
        run(store, scheduler)
    assert caught.value.exit_code == 75
    assert store.sweeps() == [], "refused before its first launch, it leaves no sweep"
    assert scheduler.closed


def test_nodes_are_not_looked_at_where_that_is_not_wanted(store: Store) -> None:
    scheduler = ProbedScheduler(fast, {"a": node("a", xids={79: 1})})
    run(store, scheduler, spec(gpus=1, measurement={"preflight": False}))
    assert (scheduler.asked, used(scheduler)) == ([], {"a"})


def test_trials_start_and_end_on_other_nodes_while_a_newcomer_is_looked_at(store: Store) -> None:
    # How many had ended when the newcomer's first trial began.
    came_back: list[int] = []

    def script(request: TrialRequest) -> float:
        if len(scheduler.started) == 2:
            scheduler.join("late")
        if "late" in scheduler.nodes_of[request.trial_id]:
            came_back.append(scheduler.num_polls)
        return fast(request)

    scheduler = ProbedScheduler(script, {"a": node("a"), "late": node("late")}, polls={"late": 10})
    scheduler._slots = replace(scheduler._slots, nodes={"a": 2})
    result = run(store, scheduler, many_layouts(), clock=scheduler.clock)
    assert result.counts[TrialState.MEASURED] == 56
    assert scheduler.asked == [{"a"}, {"late"}]
    assert used(scheduler) == {"a", "late"}
    assert min(came_back) > 10, (
        "it was used once it had answered, and one trial ended with each poll until then"
    )


def test_a_node_that_never_answers_keeps_no_other_waiting_for_long(store: Store) -> None:
    scheduler = ProbedScheduler(
        fast, {"a": node("a"), "b": node("b"), "dead": "no answer"}, polls={"dead": 1000}
    )
    result = run(store, scheduler, clock=scheduler.clock)
    assert result.counts[TrialState.MEASURED] == 6
    assert used(scheduler) == {"a", "b"}
    assert node_pool.PATIENCE_SECONDS <= scheduler.num_polls < node_pool.PATIENCE_SECONDS + 10


def test_a_sweep_begins_with_the_first_node_that_is_well_however_long_that_takes(
    store: Store,
) -> None:
    scheduler = ProbedScheduler(fast, {"a": "no answer", "b": node("b")}, polls={"a": 50, "b": 100})
    assert run(store, scheduler, clock=scheduler.clock).counts[TrialState.MEASURED] == 6
    assert used(scheduler) == {"b"}


def test_who_asks_to_stop_does_not_wait_for_nodes(store: Store) -> None:
    scheduler = ProbedScheduler(fast, {"a": node("a")}, polls={"a": 1000})
    shown: list[Snapshot] = []
    result = run_sweep(
        spec(gpus=1),
        store=store,
        open_scheduler=lambda: scheduler,
        code=CODE,
        hardware=lambda _: H100,
        clock=scheduler.clock,
        stop=lambda: Stop.DRAIN if scheduler.num_polls == 3 else Stop.GO_ON,
        observe=shown.append,
    )
    assert result.interrupted
    assert scheduler.num_polls == 3
    assert shown, "and it was seen that something happens"


def test_an_unfit_node_is_looked_at_again_and_used_once_it_is_well(store: Store) -> None:
    scheduler = ProbedScheduler(fast, {"a": node("a"), "b": "no answer: another job has its GPUs"})

    def script(request: TrialRequest) -> float:
        scheduler.num_polls += 100  # seconds of its clock
        scheduler.said["b"] = node("b")
        return fast(request)

    scheduler._script = script
    sweep = many_layouts()
    run(store, scheduler, sweep, clock=scheduler.clock)
    assert scheduler.asked == [{"a", "b"}, {"b"}], "once more, and not again once it was well"
    assert used(scheduler) == {"a", "b"}
    assert store.node_checks(store.sweep_named("t").id)["b"].is_fit


def test_a_node_that_comes_back_is_looked_at_before_it_is_used_again(store: Store) -> None:
    def script(request: TrialRequest) -> float:
        if len(scheduler.started) == 10:
            # It was started anew, and a GPU of it did not come back.
            scheduler.said["b"] = node("b", xids={79: 1})
            scheduler.starts["b"] = "second"
        return fast(request)

    scheduler = ProbedScheduler(script, {"a": node("a"), "b": node("b")})
    run(store, scheduler, many_layouts(), clock=scheduler.clock)
    assert scheduler.asked == [{"a", "b"}, {"b"}]
    where = [scheduler.nodes_of[trial_id][0] for trial_id in sorted(scheduler.nodes_of)]
    assert "b" in where[:10]
    assert set(where[12:]) == {"a"}, "two were under way on it"


def test_a_benched_node_that_comes_back_is_benched_still_and_not_even_looked_at(
    store: Store,
) -> None:
    store.ensure_sweep("t", spec(gpus=1).model_dump_json(), spec(gpus=1).conditions())
    store.bench(store.sweep_named("t").id, "b", reason=BenchReason.ASKED, is_remeasured=False)

    def script(request: TrialRequest) -> float:
        scheduler.starts["b"] = "second"
        return fast(request)

    scheduler = ProbedScheduler(script, {"a": node("a"), "b": node("b")})
    run(store, scheduler)
    assert scheduler.asked == [{"a"}]
    assert used(scheduler) == {"a"}


def test_a_node_unlike_the_others_is_found_out_also_when_it_answers_first(store: Store) -> None:
    said = {"odd": node("odd", packages={"torch": "1.0"}), **{name: node(name) for name in "abc"}}
    scheduler = ProbedScheduler(fast, said, polls=dict.fromkeys("abc", 30))
    run(store, scheduler, many_layouts(), clock=scheduler.clock)
    where = [scheduler.nodes_of[trial_id][0] for trial_id in sorted(scheduler.nodes_of)]
    first_of_others = next(number for number, name in enumerate(where) if name != "odd")
    assert where[:first_of_others] == ["odd"] * first_of_others, "nobody else had answered"
    assert "odd" not in where[first_of_others:]
    failed = store.node_checks(store.sweep_named("t").id)["odd"].failed
    assert failed is not None and "versions" in failed


def test_a_stored_sweep_reads_as_before_where_nobody_asked() -> None:
    assert "preflight" not in spec().model_dump_json()
    assert '"preflight":false' in spec(measurement={"preflight": False}).model_dump_json()


# -- faulty, by what is measured on them -----------------------------------------------------------


def many_layouts() -> SweepSpec:
    """Two cells of 28 layouts each."""
    return spec(
        gpus=1,
        precision="bf16",
        sequence_length=[512, 1024],
        global_batch_size=64,
        axes={
            "micro_batch_size": [1, 2, 4, 8, 16, 32, 64],
            "recompute": ["none", "full", "selective_ops", "selective_attention"],
        },
        search={"strategy": "exhaustive"},
    )


def physics(
    scheduler: Callable[[], FakeScheduler], slower: Mapping[str, float], **unlike: float
) -> Script:
    """What H100s would take, with 1 % noise and some nodes slower.

    `unlike`: fields of the trainer that are not what a search believes.
    """
    noise = random.Random(0)

    def script(request: TrialRequest) -> float:
        cell = Cell(
            model=request.model,
            num_gpus=request.layout.world_size,
            sequence_length=request.sequence_length,
            global_batch_size=request.layout.global_batch_size,
        )
        seconds = float(
            predict_step_time(
                LayoutTable.of([request.layout]),
                cell,
                H100,
                gpus_per_node=1,
                trainer=replace(llama_trainer(request.options, on_gpu=True), **unlike),
            ).total[0]
        )
        (where,) = scheduler().nodes_of[request.trial_id]
        return seconds * noise.lognormvariate(0.0, 0.01) * (1 + slower.get(where, 0.0))

    return script


def eight_nodes(slower: Mapping[str, float]) -> FakeScheduler:
    made: list[FakeScheduler] = []
    made.append(
        FakeScheduler(
            physics(lambda: made[0], slower, launch_share=1.0, traffic_share=1.0, host_share=1.0),
            device=Device.CUDA,
            nodes={f"n{i}": 1 for i in range(8)},
        )
    )
    return made[0]


def counting_nodes(store: Store) -> Counter[str]:
    """How many measurements that count were taken on each node."""
    return Counter(name for row in store.node_runs(store.sweep_named("t").id) for name in row.nodes)


def superseded_on(store: Store) -> set[tuple[str, ...] | None]:
    """Where the attempts ran whose numbers count no more."""
    trials = store.trials(store.sweep_named("t").id)
    return {
        attempt.nodes
        for trial in trials
        for attempt in store.trial(trial.id).attempts
        if attempt.superseded
    }


def test_a_slow_node_is_benched_and_what_it_measured_is_measured_again(store: Store) -> None:
    scheduler = eight_nodes({"n3": 0.25})
    result = run(store, scheduler, many_layouts())
    sweep_id = store.sweep_named("t").id
    (bench,) = store.benches(sweep_id)
    assert (bench.node, bench.reason, bench.until) == ("n3", BenchReason.SLOW, None)
    assert bench.evidence is not None and 0.15 < bench.evidence["slower"] < 0.35
    assert result.counts[TrialState.MEASURED] == 56
    assert result.finished
    assert "n3" not in counting_nodes(store)
    assert superseded_on(store) == {("n3",)}, "kept, and marked"
    assert [
        event.event for event in store.events(sweep_id, limit=10_000) if event.trial_id is None
    ] == ["benched"]


def test_the_next_call_uses_no_benched_node(store: Store) -> None:
    store.ensure_sweep("t", spec(gpus=1).model_dump_json(), spec(gpus=1).conditions())
    store.bench(store.sweep_named("t").id, "n1", reason=BenchReason.ASKED, is_remeasured=False)
    scheduler = FakeScheduler(fast, device=Device.CUDA, nodes={"n0": 1, "n1": 1})
    run(store, scheduler)
    assert used(scheduler) == {"n0"}


def test_healthy_nodes_are_all_used_to_the_end(store: Store) -> None:
    scheduler = eight_nodes({})
    run(store, scheduler, many_layouts())
    assert store.benches(store.sweep_named("t").id) == []
    assert set(counting_nodes(store)) == {f"n{i}" for i in range(8)}


def test_what_a_person_benches_is_seen_while_the_sweep_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pool, "REFRESH_SECONDS", 0.0)
    scheduler = eight_nodes({})
    inner = scheduler._script

    def script(request: TrialRequest) -> float | FailureKind:
        if request.trial_id == 9:
            store.bench(
                store.sweep_named("t").id, "n5", reason=BenchReason.ASKED, is_remeasured=True
            )
        return inner(request)

    scheduler._script = script
    result = run(store, scheduler, many_layouts())
    assert result.counts[TrialState.MEASURED] == 56
    assert "n5" not in counting_nodes(store)
    assert superseded_on(store) == {("n5",)}


# -- faulty, by what fails on them -----------------------------------------------------------------


def failing_on(bad: str, kind: FailureKind, *, times: int = 1000) -> FakeScheduler:
    made: list[FakeScheduler] = []
    left = [times]

    def script(request: TrialRequest) -> float | FailureKind:
        if made[0].nodes_of[request.trial_id][0] == bad and left[0]:
            left[0] -= 1
            return kind
        return fast(request)

    made.append(FakeScheduler(script, device=Device.CUDA, nodes={"n0": 1, "n1": 1, "n2": 1}))
    return made[0]


def test_a_node_on_which_two_trials_failed_by_its_fault_is_benched(store: Store) -> None:
    scheduler = failing_on("n1", FailureKind.DEVICE_ERROR)
    result = run(store, scheduler)
    (bench,) = store.benches(store.sweep_named("t").id)
    assert (bench.node, bench.reason, bench.is_remeasured) == ("n1", BenchReason.FAULTS, False)
    assert result.counts[TrialState.MEASURED] == 6
    assert len(scheduler.started) == 8, "six trials, and two that failed on n1"


@pytest.mark.parametrize(
    ("kind", "times", "why"),
    [
        (FailureKind.USER_ERROR, 1000, "the program's fault"),
        (FailureKind.OOM_GPU, 1000, "a result"),
        (FailureKind.DEVICE_ERROR, 1, "once is bad luck"),
    ],
)
def test_other_failures_bench_nobody(store: Store, kind: FailureKind, times: int, why: str) -> None:
    run(store, failing_on("n1", kind, times=times))
    assert store.benches(store.sweep_named("t").id) == [], why


def test_a_node_that_was_lost_once_with_all_its_gangs_is_not_benched(store: Store) -> None:
    def script(request: TrialRequest) -> float | FailureKind:
        is_lost = (
            request.attempt == 1
            and request.trial_id <= 6
            and scheduler.nodes_of[request.trial_id] == ("n0",)
        )
        return FailureKind.NODE_LOST if is_lost else fast(request)

    scheduler = FakeScheduler(script, device=Device.CUDA, nodes={"n0": 3, "n1": 3})
    run(store, scheduler)
    assert store.node_faults(store.sweep_named("t").id) == {"n0": 3}
    assert store.benches(store.sweep_named("t").id) == []


def test_two_faults_half_an_hour_apart_bench_nobody(store: Store) -> None:
    now = [0.0]
    scheduler = failing_on("n1", FailureKind.DEVICE_ERROR, times=2)
    inner = scheduler._script

    def script(request: TrialRequest) -> float | FailureKind:
        ending = inner(request)
        now[0] += 1801.0 if isinstance(ending, FailureKind) else 0.0
        return ending

    scheduler._script = script
    run(
        store,
        scheduler,
        spec(gpus=1, measurement={"limits": {"total": 100_000}}),
        clock=lambda: now[0],
    )
    assert store.benches(store.sweep_named("t").id) == []


def test_a_trial_that_fails_wherever_it_runs_benches_nobody(store: Store) -> None:
    def script(request: TrialRequest) -> float | FailureKind:
        return (
            FailureKind.NODE_LOST
            if request.layout.micro_batch_size == 4 and request.layout.recompute.mode == "full"
            else fast(request)
        )

    run(store, FakeScheduler(script, device=Device.CUDA, nodes={"n0": 1, "n1": 1}))
    assert store.benches(store.sweep_named("t").id) == []


def test_the_last_node_that_can_do_the_work_is_not_benched(store: Store) -> None:
    failures: Counter[int] = Counter()

    def script(request: TrialRequest) -> float | FailureKind:
        failures[request.trial_id] += 1
        return (
            FailureKind.DEVICE_ERROR
            if failures[request.trial_id] == 1 and request.trial_id in (1, 3, 5)
            else fast(request)
        )

    result = run(store, FakeScheduler(script, device=Device.CUDA, nodes={"only": 1}))
    assert store.benches(store.sweep_named("t").id) == []
    assert result.counts[TrialState.MEASURED] == 6


def test_where_a_gang_of_several_nodes_hangs_nobody_is_blamed(store: Store) -> None:
    failures: Counter[int] = Counter()

    def script(request: TrialRequest) -> float | FailureKind:
        failures[request.trial_id] += 1
        return (
            FailureKind.HUNG
            if failures[request.trial_id] == 1 and request.trial_id % 2
            else fast(request)
        )

    class TwoReports(FakeScheduler):
        def poll(self, timeout_seconds: float) -> list[Any]:
            return [
                replace(e, reports=[*e.reports, *e.reports]) if hasattr(e, "reports") else e
                for e in super().poll(timeout_seconds)
            ]

    scheduler = TwoReports(script, device=Device.CUDA, nodes={f"n{i}": 1 for i in range(4)})
    run(store, scheduler, spec(gpus=2, gpus_per_node=1, search={"max_parallel_trials": 1}))
    assert store.benches(store.sweep_named("t").id) == []


@pytest.mark.parametrize("kind", sorted(HANG_KINDS))
def test_a_node_on_which_two_trials_hung_that_ran_elsewhere_is_benched(
    store: Store, kind: FailureKind
) -> None:
    result = run(store, failing_on("n1", kind))
    assert [(bench.node, bench.reason) for bench in store.benches(store.sweep_named("t").id)] == [
        ("n1", BenchReason.FAULTS)
    ]
    assert result.counts[TrialState.MEASURED] == 6


@pytest.mark.parametrize("kind", sorted(HANG_KINDS))
def test_layouts_that_hang_wherever_they_run_bench_nobody(store: Store, kind: FailureKind) -> None:
    def script(request: TrialRequest) -> float | FailureKind:
        return kind if request.layout.micro_batch_size > 1 else fast(request)

    result = run(
        store, FakeScheduler(script, device=Device.CUDA, nodes={"n0": 1, "n1": 1, "n2": 1})
    )
    assert store.benches(store.sweep_named("t").id) == []
    assert (result.counts[TrialState.MEASURED], result.counts[TrialState.FAILED]) == (2, 4)


def test_the_bench_can_be_asked_about_in_sql(store: Store, sqlite_url: str) -> None:
    run(store, failing_on("n1", FailureKind.DEVICE_ERROR))
    rows = readonly.query(
        sqlite_url, "SELECT node, reason FROM node_bench WHERE until IS NULL"
    ).rows
    assert rows == [("n1", "faults")]


def test_a_trial_that_was_being_repeated_is_measured_again_once_that_has_ended(
    store: Store,
) -> None:
    held = Bench.on(store)
    trial_id = measured(held, 1, "bad")
    health = NodePool(held.sweep_id, held.epoch, store=store, prober=None, clock=time.monotonic)
    start_repeat(store, trial_id, held.epoch, ["good"])
    store.bench(held.sweep_id, "bad", reason=BenchReason.ASKED, is_remeasured=True)
    assert health.refresh({trial_id}, now=True) == set(), "its attempt is under way"
    record_measurement(store, trial_id, 2, epoch=held.epoch, measurement=measurement(1000.0))
    end = Finished(
        trial_id=trial_id,
        reports=[NodeReport(node="good", ranks=[])],
        failure=None,
        gpu_seconds=1.0,
    )
    assert health.ended(trial_id, end, set(), began=0.0) == {held.cell_id}
    assert store.trial(trial_id).trial.state is TrialState.QUEUED
