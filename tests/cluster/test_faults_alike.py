"""Every fault of workload synthetic at every place: real ranks and their simulation end alike."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from db.store import Store
from orchestrator.cluster.contract import Finished, SchedulerEvent
from orchestrator.cluster.simulated import SimulatedScheduler, simulated
from orchestrator.cluster.simulated_attempt import CLEAN_UP_SECONDS
from orchestrator.core.machines.packing import Shape
from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.synthetic_options import FaultKind
from orchestrator.core.trial.failure_kinds import Failure, FailureKind, may_retry
from orchestrator.core.trial.failures import proves_out_of_memory
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import Device, Phase, TrialRequest
from orchestrator.node.launcher import NodeLauncher
from orchestrator.sweep.run import run_sweep
from tests.node.launching import faulty, order
from tests.sweep.fake_scheduler import FakeScheduler

K, P, F = FailureKind, Phase, FaultKind

# The places of faults, and the phase of the rank there.
PLACES = {
    "init": P.RENDEZVOUS,
    "forward": P.FIRST_STEP,
    "step_1": P.FIRST_STEP,
    "step_3": P.STEADY,
    "teardown": P.TEARDOWN,
}
BEFORE_THE_RESULT = ("init", "forward", "step_1", "step_3")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The failure that a fault leads to at each place; at others it does no harm."""

    kinds: Mapping[str, FailureKind]
    phase: Phase | None = None  # if other than the place's

    def at(self, place: str) -> tuple[FailureKind, Phase] | None:
        return (self.kinds[place], self.phase or PLACES[place]) if place in self.kinds else None


def fails(kind: FailureKind) -> Expected:
    """Before the result is handed over; afterwards it is measured, however its process ends."""
    return Expected(kinds=dict.fromkeys(BEFORE_THE_RESULT, kind))


def hangs() -> Expected:
    return Expected(kinds=dict.fromkeys(BEFORE_THE_RESULT, K.HUNG) | {"init": K.START_TIMEOUT})


HARMLESS = Expected(kinds={})
EXPECTED: Mapping[FaultKind, Expected] = {
    F.OOM: fails(K.OOM_GPU),
    F.HOST_OOM: fails(K.OOM_HOST),
    F.CONFIG_REJECTED: fails(K.CONFIG_REJECTED),
    F.CRASH: fails(K.USER_ERROR),
    F.EXIT: fails(K.USER_ERROR),
    F.SEGFAULT: fails(K.SEGFAULT),
    F.ABORT: fails(K.SEGFAULT),
    F.LOST_RANK: fails(K.KILLED),
    F.HANG: hangs(),
    F.HANG_IN_C: hangs(),
    F.HANG_IGNORING_SIGNALS: hangs(),
    F.STOP: hangs(),
    F.NCCL_NOISE: HARMLESS,
    F.NCCL_ERROR: fails(K.NCCL),
    F.NAN_LOSS: fails(K.NOT_FINITE),
    F.PREEMPTED: fails(K.PREEMPTED),
    F.XID: fails(K.XID),
    F.PORT_CLASH: fails(K.PORT_CLASH),
    F.RUBBISH_RESULT: Expected(
        kinds=dict.fromkeys(PLACES, K.BAD_RESULT), phase=P.TEARDOWN
    ),  # over a good one, too
    F.NO_RESULT: fails(K.BAD_RESULT),
    F.LEAK_CHILDREN: HARMLESS,
    F.LEAK_UNMARKED_CHILD: HARMLESS,
    F.LOG_FLOOD: HARMLESS,
}
CASES = [
    pytest.param(fault, place, id=f"{fault}-{place}") for fault in EXPECTED for place in PLACES
]
# A real hang is waited for. A simulated launch takes no more than half of each limit.
SHORT = {"rendezvous": 0.3, "first_step": 0.3, "steady": 0.3, "teardown": 0.3}
HANGS = [fault for fault, expected in EXPECTED.items() if K.HUNG in expected.kinds.values()]

_trial_ids = itertools.count(1)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeLauncher]:
    launcher = NodeLauncher(tmp_path_factory.mktemp("alike"), node="node-0")
    yield launcher
    launcher.close()


def struck(fault: FaultKind, place: str, **known: Any) -> LaunchOrder:
    limits = SHORT if fault in HANGS else None
    return order(trial_id=next(_trial_ids), options=faulty(fault, at=place, **known), limits=limits)


def simulation() -> SimulatedScheduler:
    return SimulatedScheduler(
        simulated(
            SweepSpec.model_validate(
                {
                    "name": "s",
                    "model": "llama-tiny",
                    "gpus": 2,
                    "gpus_per_node": 2,
                    "device": "h100-sxm",
                    "sequence_length": 128,
                    "global_batch_size": 2,
                    "workload": "synthetic",
                }
            )
        )
    )


def simulate(asked: LaunchOrder) -> Finished:
    scheduler = simulation()
    scheduler.start(asked.request, Shape(num_nodes=1, slots_per_node=2), ["node-0"])
    (event,) = scheduler.poll(1.0)
    assert isinstance(event, Finished)
    return event


def came_to(failure: Failure | None) -> tuple[FailureKind, str | None] | None:
    return None if failure is None else (failure.kind, failure.phase)


def decisions(failure: Failure | None) -> tuple[list[bool], bool] | None:
    """Return whether a trial is retried after its first three failures, and proves others."""
    if failure is None:
        return None
    again = [may_retry(failure.kind, Counter({failure.kind: times})) for times in (0, 1, 2)]
    return again, proves_out_of_memory(failure, on_cpu=True)


def test_every_fault_is_in_the_table() -> None:
    assert set(EXPECTED) == set(FaultKind)


@pytest.mark.parametrize(("fault", "place"), CASES)
def test_a_fault_comes_to_the_same_in_a_rank_and_in_a_simulation(
    launcher: NodeLauncher, fault: FaultKind, place: str
) -> None:
    asked = struck(fault, place, rank=1)
    real, pretended = launcher.run(asked), simulate(asked)
    assert came_to(real.failure) == EXPECTED[fault].at(place), real.failure
    assert came_to(pretended.failure) == EXPECTED[fault].at(place), pretended.failure
    assert decisions(pretended.failure) == decisions(real.failure)
    results = [outcome.result is not None for outcome in real.ranks]
    assert all(results) is (pretended.reports[0].ranks[0].result is not None)
    if real.failure is not None and pretended.failure is not None:
        assert (pretended.failure.rank, pretended.failure.step) == (
            real.failure.rank,
            real.failure.step,
        )


@pytest.mark.parametrize("fault", [F.OOM, F.HANG])
def test_a_fault_of_a_rank_that_is_not_there_does_no_harm(
    launcher: NodeLauncher, fault: FaultKind
) -> None:
    asked = struck(fault, "forward", rank=2)
    assert came_to(launcher.run(asked).failure) is came_to(simulate(asked).failure) is None
    alone = order(
        trial_id=next(_trial_ids),
        options=faulty(fault, rank=1),
        one_rank_per_node=True,
    )
    assert came_to(launcher.run(alone).failure) is came_to(simulate(alone).failure) is None


@pytest.mark.parametrize(
    ("place", "name"), [("init", "rendezvous"), ("forward", "first_step"), ("step_3", "steady")]
)
def test_a_simulated_hang_is_told_as_a_real_one_is_and_holds_its_gang_until_the_limit(
    launcher: NodeLauncher, place: str, name: str
) -> None:
    asked = struck(F.HANG, place, rank=1)
    real, pretended = launcher.run(asked), simulate(asked)
    assert real.failure is not None
    assert pretended.failure is not None
    # Nothing runs in a simulation that could hang somewhere.
    place_of_hang = re.compile(r"in _hang \(faults\.py:\d+\): ")
    assert place_of_hang.search(real.failure.message)
    assert pretended.failure.message == place_of_hang.sub("", real.failure.message)
    assert pretended.reports[0].seconds > SHORT[name] + CLEAN_UP_SECONDS


@pytest.mark.parametrize(
    ("name", "seconds"), [("first_step", 0.4), ("steady", 0.4), ("total", 8.0)]
)
def test_a_step_over_its_limit_is_hung_in_both(
    launcher: NodeLauncher, name: str, seconds: float
) -> None:
    """A step takes 2 s here: longer than a launcher on a busy machine may pause."""
    options = {"sleep": True, "noise": 0.0, "time_scale": 2.0 / STEP_SECONDS}
    limits = {"first_step": 30.0, "steady": 30.0, name: seconds}
    asked = order(trial_id=next(_trial_ids), options=options, limits=limits)
    real, pretended = launcher.run(asked), simulate(asked)
    expected = {"first_step": P.FIRST_STEP, "steady": P.STEADY, "total": P.STEADY}[name]
    assert came_to(real.failure) == came_to(pretended.failure) == (K.HUNG, expected)
    assert real.failure is not None and pretended.failure is not None
    assert f"{name} limit" in real.failure.message
    assert f"{name} limit" in pretended.failure.message


def _step_seconds() -> float:
    result = simulate(order(options={"noise": 0.0})).reports[0].ranks[0].result
    assert result is not None
    return result.step_seconds[0]


STEP_SECONDS = _step_seconds()


class Launched(FakeScheduler):
    """Real ranks, one gang after the other, and the loop cannot tell it from Ray."""

    def __init__(self, launcher: NodeLauncher) -> None:
        super().__init__(lambda _: 1.0, nodes={"node-0": 2})
        self._launcher = launcher

    def poll(self, timeout_seconds: float) -> list[Any]:
        if not self._running:
            return []
        trial_id, (request, shape) = next(iter(self._running.items()))
        del self._running[trial_id]
        self._free_slots.give_back(trial_id)
        asked = LaunchOrder(
            # Another store has the same ids, and the launcher is the same.
            request=request.model_copy(update={"trial_id": next(_trial_ids)}),
            program="workloads.synthetic",
            local_world_size=shape.num_slots,
        )
        report = self._launcher.run(asked)
        return [
            Finished(
                trial_id=trial_id,
                reports=[report],
                failure=report.failure,
                gpu_seconds=report.seconds * shape.num_slots,
            )
        ]


RETRIED = [fault for fault, expected in EXPECTED.items() if expected.at("step_3") is not None]


@pytest.mark.parametrize("fault", RETRIED)
def test_a_sweep_tries_again_as_often_and_ends_alike(
    launcher: NodeLauncher, sqlite_store: Store, fault: FaultKind
) -> None:
    """Two of its four layouts are struck, one of them at its first attempt only."""
    faults = [
        {"fault": fault, "at": "step_3", "rank": 1, "only_if": {"micro_batch_size": 1}},
        {
            "fault": fault,
            "at": "step_3",
            "rank": 1,
            "only_if": {"micro_batch_size": 2},
            "first_attempt_only": True,
        },
    ]
    spec = sweep(
        {"faults": faults}, limits=SHORT if fault in HANGS else {}, axes={"recompute": "none"}
    )
    _run(spec, sqlite_store, Launched(launcher))
    pretended = SweepSpec.model_validate(spec.model_dump() | {"name": "simulated"})
    _run(pretended, sqlite_store, SimulatedScheduler(pretended))
    assert _ended(sqlite_store, "simulated") == _ended(sqlite_store, "real")


class Losing(SimulatedScheduler):
    """Its only node is lost during some attempts; it notes which."""

    def __init__(self, spec: SweepSpec) -> None:
        super().__init__(spec, node_loss_hours=0.03)
        self.lost: set[tuple[Layout, int]] = set()

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        super().start(request, shape, nodes)
        self._newest = request.layout, request.attempt

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        events = super().poll(timeout_seconds)
        if any(isinstance(event, Finished) and event.failure is not None for event in events):
            self.lost.add(self._newest)  # nothing else was under way
        return events


@pytest.mark.long
def test_a_sweep_tries_again_as_often_after_a_lost_node_and_after_a_simulated_one(
    sqlite_store: Store,
) -> None:
    """A lost node is no fault of a rank: a script says what Ray would."""
    pretended = sweep({}, name="simulated", axes={"recompute": ["none", "full"]}, seed=4)
    simulation = Losing(pretended)
    _run(pretended, sqlite_store, simulation)

    def script(request: TrialRequest) -> float | FailureKind:
        is_lost = (request.layout, request.attempt) in simulation.lost
        return K.NODE_LOST if is_lost else 1.0

    real = FakeScheduler(script, nodes={"node-0": 2}, device=Device.CUDA)
    _run(SweepSpec.model_validate(pretended.model_dump() | {"name": "real"}), sqlite_store, real)
    ended = _ended(sqlite_store, "real")
    assert _ended(sqlite_store, "simulated") == ended
    assert set(ended.values()) == {
        (TrialState.MEASURED, None, 1),
        (TrialState.MEASURED, None, 2),
        (TrialState.FAILED, K.NODE_LOST, 2),
    }


def sweep(
    options: dict[str, Any],
    *,
    axes: dict[str, Any],
    name: str = "real",
    limits: dict[str, float] | None = None,
    seed: int = 0,
) -> SweepSpec:
    """A sweep of four micro-batches and further axes, one gang at a time."""
    return SweepSpec.model_validate(
        {
            "name": name,
            "model": "llama-tiny",
            "gpus": 2,
            "gpus_per_node": 2,
            "device": "cpu",
            "sequence_length": 128,
            "global_batch_size": 16,
            "axes": {"micro_batch_size": [1, 2, 4, 8]} | axes,
            "workload": {"name": "synthetic", "options": options},
            "measurement": {
                "limits": limits or {},
                "warmup_steps": 2,
                "min_steps": 4,
                "max_steps": 6,
            },
            "search": {
                "confirm": {"repeats": 0},
                "strategy": "exhaustive",
                "max_parallel_trials": 1,
                "seed": seed,
            },
        }
    )


def _run(spec: SweepSpec, store: Store, scheduler: Any) -> None:
    code = Fingerprint(orchestrator_version="test")
    clock = getattr(scheduler, "clock", lambda: 0.0)
    run_sweep(
        spec,
        store=store,
        open_scheduler=lambda: scheduler,
        code=code,
        hardware=lambda _: None,
        clock=clock,
    )


def _ended(store: Store, sweep: str) -> dict[Layout, tuple[TrialState, FailureKind | None, int]]:
    rows = store.trials(store.sweep_named(sweep).id)
    return {row.layout: (row.state, row.failure_kind, row.num_attempts) for row in rows}
