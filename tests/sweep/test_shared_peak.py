"""All trials of a sweep rest on one peak per node, and a sweep that goes on after a kill on the
same one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from db.store import Store
from orchestrator.cluster.contract import Finished, SchedulerEvent
from orchestrator.core.machines.packing import Shape
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.protocol import Device, TrialRequest
from orchestrator.sweep.run import run_sweep
from tests.sweep.fake_scheduler import FakeScheduler

TINY = PRESETS["llama-tiny"]
# 8 sequences of 64 tokens, nothing recomputed, on one device.
FLOPS_OF_A_STEP = 8 * 64 * TINY.flops_per_token(64)


class Measuring(FakeScheduler):
    """Its ranks have a peak to rest on, as those of workload llama: the one they are told, else
    what they measure, each trial something else.
    """

    def __init__(
        self,
        peaks: Sequence[float],
        *,
        seconds: Sequence[float] = (1.0,) * 20,
        slots: int = 1,
        device: Device = Device.CPU,
    ) -> None:
        left = iter(seconds)
        super().__init__(lambda _: next(left), slots=slots, device=device)
        self._peaks = iter(peaks)
        self.requests: dict[int, TrialRequest] = {}

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        super().start(request, shape, nodes)
        self.requests[request.trial_id] = request

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        return [
            self._with_peak(event) if isinstance(event, Finished) else event
            for event in super().poll(timeout_seconds)
        ]

    def _with_peak(self, event: Finished) -> Finished:
        (report,), request = event.reports, self.requests[event.trial_id]
        (outcome,) = report.ranks
        assert outcome.result is not None
        told = next(((p.flops, p.source) for p in request.peaks if p.node == report.node), None)
        if told is None or FLOPS_OF_A_STEP / outcome.result.step_seconds[0] > told[0]:
            told = (next(self._peaks), f"measured: matmul, in trial {event.trial_id}")
        result = outcome.result.model_copy(
            update={"peak_flops": told[0], "peak_flops_source": told[1]}
        )
        return replace(event, reports=[replace(report, ranks=[replace(outcome, result=result)])])


def run(store: Store, scheduler: FakeScheduler, **search: Any) -> None:
    spec = SweepSpec.model_validate(
        {
            "name": "t",
            "model": "llama-tiny",
            "sequence_length": 64,
            "global_batch_size": 8,
            "precision": "fp32",
            "gpus": 1,
            "axes": {"micro_batch_size": [1, 2, 4, 8], "recompute": ["none"]},
            "search": {"confirm": {"repeats": 0}} | search,
        }
    )
    code = Fingerprint(orchestrator_version="test")
    run_sweep(
        spec,
        store=store,
        open_scheduler=lambda: scheduler,
        code=code,
        hardware=lambda _: None,
        clock=time.monotonic,
    )


def peaks(store: Store) -> list[tuple[float | None, str | None]]:
    """What each trial's MFU rests on, oldest first."""
    details = [store.trial(trial.id) for trial in store.trials(store.sweep_named("t").id)]
    numbers = [
        attempt.measurement
        for detail in details
        for attempt in detail.attempts
        if attempt.measurement is not None
    ]
    return [(n.peak_flops, n.peak_flops_source) for n in numbers]


def test_the_first_trial_on_a_node_measures_and_all_others_rest_on_that(store: Store) -> None:
    run(store, Measuring([4 * FLOPS_OF_A_STEP]))
    assert peaks(store) == [(4 * FLOPS_OF_A_STEP, "measured: matmul, in trial 1")] * 4
    assert {trial.mfu for trial in store.trials(store.sweep_named("t").id)} == {0.25}


def test_a_sweep_that_goes_on_keeps_its_peak(store: Store) -> None:
    run(store, Measuring([4 * FLOPS_OF_A_STEP]), max_trials=2)
    run(store, Measuring([]))  # nobody measures again
    assert peaks(store) == [(4 * FLOPS_OF_A_STEP, "measured: matmul, in trial 1")] * 4


def test_of_trials_that_began_together_the_first_that_ends_gives_the_peak(store: Store) -> None:
    scheduler = Measuring(
        [4 * FLOPS_OF_A_STEP, 5 * FLOPS_OF_A_STEP, 6 * FLOPS_OF_A_STEP], slots=3, device=Device.CUDA
    )
    run(store, scheduler)
    assert scheduler.most_at_once == 3
    assert {flops for flops, _ in peaks(store)} == {4 * FLOPS_OF_A_STEP}


def test_a_trial_faster_than_the_peak_measures_it_anew_for_those_after_it_and_for_the_next_call(
    store: Store,
) -> None:
    run(
        store,
        Measuring([2 * FLOPS_OF_A_STEP, 8 * FLOPS_OF_A_STEP], seconds=[1.0, 0.25, 1.0]),
        max_trials=3,
    )
    run(store, Measuring([]))
    assert [flops / FLOPS_OF_A_STEP for flops, _ in peaks(store) if flops is not None] == [
        2,
        8,
        8,
        8,
    ]
    assert {source for _, source in peaks(store)} == {
        "measured: matmul, in trial 1",
        "measured: matmul, in trial 2",
    }


def test_invalidated_trials_tell_no_peak(store: Store) -> None:
    run(store, Measuring([4 * FLOPS_OF_A_STEP]))
    store.invalidate("state = 'measured'", sweep="t", holder_is_dead=lambda _: True)
    assert store.measured_peaks(store.sweep_named("t").id) == []
    run(store, Measuring([5 * FLOPS_OF_A_STEP]))
    assert [flops / FLOPS_OF_A_STEP for flops, _ in peaks(store) if flops is not None].count(5) == 4
