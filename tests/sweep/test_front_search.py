"""A sweep with several objectives: it looks for a front, and confirms what is on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from db.store import Store
from orchestrator.cluster.contract import Finished, SchedulerEvent
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.layout import Layout, RecomputeMode
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.front import Front
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.merit import Merit
from orchestrator.core.trial.node_report import GpuUsage, NodeReport
from orchestrator.core.trial.protocol import Device, RankResult, TrialRequest
from orchestrator.sweep.progress import StopReason
from orchestrator.sweep.stored_confirmation import confirmation_of
from tests.sweep.fake_scheduler import FakeScheduler
from tests.sweep.test_loop import out_of_memory_above, run, spec, states

BOTH = ["tokens_per_second_per_gpu", "memory_headroom"]
GIB = 1 << 30


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


def asked(*, repeats: int = 0, **changes: Any) -> SweepSpec:
    known = {"gpus": 1, "objective": BOTH, "device_memory_gib": 100.0}
    return spec(repeats=repeats, **known | changes)


def trained(request: TrialRequest) -> RankResult:
    """The larger the micro-batch, the faster and the fuller; recomputation halves both."""
    layout = request.layout
    plain = layout.recompute.mode is RecomputeMode.NONE
    seconds = (1.0 + 1.0 / layout.micro_batch_size) * (1.0 if plain else 2.0)
    peak = 10 * layout.micro_batch_size * (2 if plain else 1)
    steps = [seconds * (1 + 0.001 * step) for step in range(8)]
    return RankResult(
        warmup_seconds=[seconds] * 3,
        step_seconds=steps,
        peak_memory_allocated_bytes=peak * GIB,
        peak_memory_reserved_bytes=peak * GIB,
        device_memory_bytes=100 * GIB,
        stack=Stack(torch="2.13.0"),
    )


def front_of(store: Store, *merits: Merit) -> tuple[Front, dict[int, str]]:
    """The front of the only cell, from what is in the store; and its trials' layouts."""
    sweep = store.sweep_named("t")
    (cell,) = store.cells(sweep.id)
    trials = store.trials(sweep.id)
    confirmation = confirmation_of(trials, store.repeats(cell.id), merits=merits)
    return confirmation.front().front, {trial.id: trial.layout.short for trial in trials}


def test_each_layout_of_the_front_is_repeated_and_no_other(store: Store) -> None:
    run(
        store, trained, spec=asked(repeats=1, search={"anchor_every": 0, "confirm": {"repeats": 1}})
    )
    front, names = front_of(store, Merit.SPEED, Merit.HEADROOM)
    # 20, 40 and 80 GiB without recomputation, 10 GiB with it. The others have 20 GiB at twice and
    # 40 GiB at more than twice the time.
    assert sorted(names[key].split(" ", 1)[1].removesuffix(" fp32") for key in front.on) == [
        "mbs1 ga8 full",
        "mbs1 ga8 none",
        "mbs2 ga4 none",
        "mbs4 ga2 none",
    ]
    assert not front.possible
    trials = store.trials(store.sweep_named("t").id)
    assert {t.id for t in trials if t.num_measurements == 2} == set(front.on)


def test_the_same_call_again_launches_nothing(store: Store) -> None:
    run(store, trained, spec=asked(repeats=1))
    _, scheduler = run(store, trained, spec=asked(repeats=1))
    assert scheduler.started == []


def test_no_trial_is_ended_early_since_slow_layouts_may_be_on_the_front(store: Store) -> None:
    to_beat = []

    def script(request: TrialRequest) -> RankResult:
        to_beat.append(request.measurement.beat_seconds)
        return trained(request)

    scheduler = FakeScheduler(script, device=Device.CUDA)
    run(store, script, scheduler=scheduler, spec=asked())
    assert len(to_beat) == 6
    assert set(to_beat) == {None}


def test_a_plateau_is_one_of_the_volume_of_the_front(store: Store) -> None:
    # One plateau of the speed would end it after the fastest and two others.
    axes = {"micro_batch_size": [1, 2, 4, 8], "recompute": ["none", "full"]}
    search = {"plateau": {"trials": 2, "gain": 0.01}, "strategy": "random", "seed": 2}
    result, _ = run(store, trained, spec=asked(axes=axes, search=search))
    assert set(result.stopped.values()) == {StopReason.PLATEAU}
    front, _ = front_of(store, Merit.SPEED, Merit.HEADROOM)
    assert len(front.on) >= 3


def test_a_price_orders_layouts_as_speed_does_so_that_the_same_is_launched(store: Store) -> None:
    _, alone = run(store, trained, spec=spec(gpus=1))
    changes = {"objective": ["tokens_per_second_per_gpu", "dollars_per_billion_tokens"]}
    priced = spec(gpus=1, name="priced", price_per_gpu_hour=2.0, **changes)
    _, both = run(store, trained, spec=priced)
    assert both.started == alone.started
    first, second = (store.trials(store.sweep_named(name).id) for name in ("t", "priced"))
    assert [trial.why for trial in first] == [trial.why for trial in second]


def test_an_out_of_memory_rules_out_what_needs_more_here_too(store: Store) -> None:
    run(store, out_of_memory_above(1), spec=asked())
    assert states(store)[TrialState.MEASURED] >= 1
    assert states(store)[TrialState.OUT_OF_MEMORY] + states(store)[TrialState.PRUNED] == 2


def test_free_memory_is_refused_where_no_limit_is_known(store: Store) -> None:
    with pytest.raises(UsageInvalid, match="no memory size is known of what device auto means"):
        run(store, trained, spec=asked(device_memory_gib=None))


def test_a_program_that_tells_no_memory_is_compared_by_what_the_driver_saw(store: Store) -> None:
    def script(request: TrialRequest) -> RankResult:
        told = trained(request)
        unread = ("peak_memory_allocated_bytes", "peak_memory_reserved_bytes")
        unread = (*unread, "device_memory_bytes")
        return told.model_copy(update=dict.fromkeys(unread))

    scheduler = Powered(script, device=Device.CUDA, slots=1)
    run(store, script, scheduler=scheduler, spec=asked())
    (cell,) = store.cells(store.sweep_named("t").id)
    trials = store.trials(store.sweep_named("t").id)
    merits = (Merit.SPEED, Merit.HEADROOM)
    found = confirmation_of(
        trials, store.repeats(cell.id), merits=merits, device_memory_bytes=100 * GIB
    ).front()
    # 50 GiB without recomputation, and 30 with it, on a device of 100 GiB.
    names = {trial.id: trial.layout.short.removesuffix(" fp32") for trial in trials}
    kinds = [names[key] for key in found.front.on]
    assert kinds == ["dp1 mbs4 ga2 none", "dp1 mbs4 ga2 full"]
    assert not found.left_out


def test_dollars_without_a_price_are_refused_before_anything_starts(store: Store) -> None:
    with pytest.raises(UsageInvalid, match="the price of device auto is unknown here"):
        run(store, trained, spec=asked(objective=["dollars_per_billion_tokens"]))


def test_energy_is_refused_where_no_gpu_tells_it(store: Store) -> None:
    with pytest.raises(UsageInvalid, match="joules_per_token: the energy is read from GPUs"):
        run(store, trained, spec=asked(objective=["joules_per_token"]))


class Powered(FakeScheduler):
    """GPUs that draw less power with recomputation."""

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        layouts = {trial_id: request.layout for trial_id, (request, _) in self._running.items()}
        events = super().poll(timeout_seconds)
        return [
            replace(event, reports=[self._with_power(event, layouts[event.trial_id])])
            if isinstance(event, Finished)
            else event
            for event in events
        ]

    def _with_power(self, event: Finished, layout: Layout) -> NodeReport:
        is_plain = layout.recompute.mode is RecomputeMode.NONE
        watts = 600.0 if is_plain else 200.0
        peak = (50 if is_plain else 30) * GIB
        usage = GpuUsage(power_watts=watts, num_samples=3, peak_memory_bytes=peak)
        return replace(event.reports[0], gpu=usage)


def test_a_layout_that_uses_the_least_energy_is_on_the_front_of_energy(store: Store) -> None:
    objective = ["tokens_per_second_per_gpu", "joules_per_token"]
    scheduler = Powered(trained, device=Device.CUDA, slots=1)
    run(store, trained, scheduler=scheduler, spec=asked(objective=objective))
    front, names = front_of(store, Merit.SPEED, Merit.EFFICIENCY)
    # Recomputation takes twice the time and a third of the power.
    kinds = [names[key].removesuffix(" fp32") for key in front.on]
    assert kinds == ["dp1 mbs4 ga2 none", "dp1 mbs4 ga2 full"]
    trials = store.trials(store.sweep_named("t").id)
    (frugal,) = (trial for trial in trials if trial.id == front.on[1])
    # 512 tokens in 2.5 s, with the first step of eight 0.7 % faster than the last.
    assert frugal.joules_per_token == pytest.approx(200 * 2.5 / 512, rel=0.01)
    assert any("expected to enlarge the front by" in (trial.why or "") for trial in trials)
