"""Makes the request of an attempt: what its ranks run, how they measure, and their limits."""

from __future__ import annotations

from orchestrator.core.sweepfile.workload_section import (
    compiles_layers,
    is_one_process_per_node,
    reports_on_last_node,
    steps_per_line,
    varying_options,
)
from orchestrator.core.trial.limits import resolve_limits
from orchestrator.core.trial.line_count import counting_plan
from orchestrator.core.trial.merit import Merit
from orchestrator.core.trial.protocol import Device, MeasurementPlan, TrialRequest
from orchestrator.core.trial.purpose import Purpose
from orchestrator.sweep.attempts import Attempt
from orchestrator.sweep.call import Call
from orchestrator.sweep.measured_peaks import MeasuredPeaks


class TrialRequests:
    """Makes the requests of one call of `run_sweep`."""

    def __init__(self, call: Call, peaks: MeasuredPeaks) -> None:
        """`peaks`: of the devices, as measured so far."""
        self._call, self._spec, self._peaks = call, call.spec, peaks
        self._limits = call.spec.measurement.limits.asked
        # By whether the attempt confirms a layout.
        self._plans = {
            confirms: call.spec.measurement.plan(call.scheduler.slots.device, confirms=confirms)
            for confirms in (False, True)
        }
        self._options = call.spec.workload.options.as_written()
        # A trial that cannot be the fastest may still be on a front.
        device, is_only_speed = call.scheduler.slots.device, call.spec.merits == (Merit.SPEED,)
        self._stops_early = is_only_speed and call.spec.search.stops_early(device)

    def of(self, attempt: Attempt) -> TrialRequest:
        """Return the request of an attempt that is in the store."""
        workload, layout = self._spec.workload, attempt.layout
        device, plan = self._call.scheduler.slots.device, self._plan(attempt)
        limits = resolve_limits(
            self._limits,
            plan=plan,
            num_ranks=layout.world_size,
            predicted=attempt.predicted,
            compiles=compiles_layers(workload, layout.options, on_gpu=device is Device.CUDA),
        )
        return TrialRequest(
            sweep=self._spec.name,
            trial_id=attempt.trial_id,
            attempt=attempt.number,
            workload=workload.name,
            options={**self._options, **varying_options(workload, layout)},
            model=attempt.cell.model,
            sequence_length=attempt.cell.sequence_length,
            layout=layout,
            device=device,
            measurement=plan,
            limits=limits,
            seed=self._spec.search.seed,
            one_rank_per_node=is_one_process_per_node(workload),
            reports_on_last_node=reports_on_last_node(workload),
            peaks=self._peaks.of(layout.precision),
            elapsed_seconds=self._call.seconds,
            nodes=attempt.nodes,
        )

    def _plan(self, attempt: Attempt) -> MeasurementPlan:
        """Return the plan of an attempt: it may count lines, or end early if it cannot win."""
        workload, search = self._spec.workload, self._call.searches[attempt.cell_id]
        plan = self._plans[attempt.purpose is Purpose.CONFIRMATION]
        may_count = workload.name == "command" and not attempt.is_repeat
        if may_count and search.told.has_to_count(attempt.layout):
            predicted = attempt.predicted
            seconds = predicted.seconds if predicted is not None else None
            every = steps_per_line(workload)
            return counting_plan(plan, predicted_seconds=seconds, steps_per_line=every)
        best = search.confirmation.runs.best()
        if best is None or not self._may_end_early(attempt):
            return plan
        return plan.model_copy(update={"beat_seconds": best[1]})

    def _may_end_early(self, attempt: Attempt) -> bool:
        """Return whether the attempt is ended if it cannot be the fastest."""
        # Only a trial's first attempt may be ended early.
        return self._stops_early and attempt.number == 1 and not attempt.is_repeat
