"""Profiles the layout of a stored trial: its gang again, a few steps under a profiler.

Nothing of it is a measurement: it has tables of its own, and no trial, attempt or search sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from db.read.rows import TrialDetail
from db.store import Store
from db.write.writes import ProfileEnd
from orchestrator.cluster.contract import Finished, Scheduler, shapes_of
from orchestrator.core.errors import ResourcesInsufficient, UsageInvalid
from orchestrator.core.machines.packing import Shape
from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.workload_options import LlamaOptions
from orchestrator.core.sweepfile.workload_section import (
    compiles_layers,
    is_one_process_per_node,
    options_of,
    reports_on_last_node,
)
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.limits import resolve_limits
from orchestrator.core.trial.profile_advice import advice
from orchestrator.core.trial.protocol import Device, PhaseLimits, TrialRequest
from orchestrator.core.trial.rank_profile import ProfilePlan

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
# To write and read a trace takes minutes if steps have many kernels.
STEADY_SECONDS = 600.0
TOTAL_SECONDS = 3600.0


def refusal(spec: SweepSpec) -> str | None:
    """Return why trials of this sweep cannot be profiled, and the fix. None: they can."""
    match spec.workload.options:
        case LlamaOptions():
            return None
        case CommandOptions(traces=True):
            return None
        case CommandOptions():
            return (
                "workload command runs a program of yours, which this cannot look into: let it"
                " write Chrome traces into SWEEP_PROFILE_DIR, and set workload.options.traces: true"
            )
    return f"workload {spec.workload.name} trains nothing: there is nothing to profile"


class ProfileUnderWay:
    """A profile whose gang was started. Its owner polls it until it has ended."""

    def __init__(
        self, request: TrialRequest, nodes: tuple[str, ...], *, scheduler: Scheduler, store: Store
    ) -> None:
        self._request, self._nodes = request, nodes
        self._scheduler, self._store = scheduler, store
        self._is_cancelled = False
        self.has_ended = False

    def poll(self) -> ProfileEnd | None:
        """Wait a moment. Return what was found, which is then stored; None: it goes on."""
        for event in self._scheduler.poll(POLL_SECONDS):
            if isinstance(event, Finished) and event.trial_id == self._request.trial_id:
                self.has_ended = True
                result = _judged(event, self._request, self._nodes)
                if result.failure is not None and result.failure.kind is FailureKind.CANCELLED:
                    result = replace(result, failure=self._cancelled)
                self._store.end_profile(result)
                return result
        return None

    def cancel(self) -> None:
        """End its gang; go on polling until it is gone."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._scheduler.cancel(self._request.trial_id)

    def interrupt(self) -> None:
        """Store that the profile was interrupted: its end is not awaited."""
        nothing = ProfileEnd(
            trial_id=self._request.trial_id,
            number=self._request.attempt,
            nodes=self._nodes,
            gpu_seconds=0.0,
            ranks={},
            advice=(),
            failure=self._cancelled,
        )
        self._store.end_profile(nothing)

    @property
    def _cancelled(self) -> Failure:
        return Failure(
            kind=FailureKind.CANCELLED,
            message=(
                "the profile was cancelled before it ended; `sweep profile"
                f" {self._request.trial_id}` takes it, and so does the next `sweep run` if its file"
                " asks for profiles"
            ),
        )


@contextmanager
def started_profile(
    detail: TrialDetail,
    spec: SweepSpec,
    plan: ProfilePlan,
    *,
    scheduler: Scheduler,
    store: Store,
    epoch: int | None = None,
) -> Iterator[ProfileUnderWay]:
    """Start to profile a trial's layout. Poll the profile to its end within the context.

    `epoch` is that of the sweep's owner; None: a person asks. Raises UsageInvalid if the workload
    cannot be profiled, ResourcesInsufficient if no gang of this size fits.
    """
    if (why := refusal(spec)) is not None:
        raise UsageInvalid(why)
    cell = detail.cell.cell
    asked = spec.gpus_per_node
    per_node = asked if isinstance(asked, int) else scheduler.slots.per_node
    shape = shapes_of([cell], scheduler.slots, gpus_per_node=per_node, device=spec.device)[cell]
    nodes = _nodes_for(detail, shape, scheduler.slots.nodes)
    number = store.begin_profile(detail.trial.id, epoch=epoch)
    request = _request(detail, spec, plan, number, scheduler.slots.device, nodes)
    under_way = ProfileUnderWay(request, nodes, scheduler=scheduler, store=store)
    try:
        scheduler.start(request, shape, nodes)
        yield under_way
    finally:
        if not under_way.has_ended:
            under_way.interrupt()


def profile_trial(
    detail: TrialDetail, spec: SweepSpec, plan: ProfilePlan, *, scheduler: Scheduler, store: Store
) -> ProfileEnd:
    """Profile a trial's layout for a person, and wait for its end. Raises as `started_profile`."""
    with started_profile(detail, spec, plan, scheduler=scheduler, store=store) as profile:
        while (result := profile.poll()) is None:
            pass
    return result


def _nodes_for(detail: TrialDetail, shape: Shape, slots: Mapping[str, int]) -> tuple[str, ...]:
    """Return nodes that are large enough, first those on which the trial was measured.

    Raises ResourcesInsufficient.
    """
    measured_on = set(detail.trial.nodes)
    large = [node for node, count in slots.items() if count >= shape.slots_per_node]
    if len(large) < shape.num_nodes:
        raise ResourcesInsufficient(
            f"trial {detail.trial.id} needs {shape.num_nodes} nodes of {shape.slots_per_node}"
            f" slots, and there are {len(large)}"
        )
    chosen = sorted(large, key=lambda node: (node not in measured_on, node))
    return tuple(sorted(chosen[: shape.num_nodes]))


def _request(
    detail: TrialDetail,
    spec: SweepSpec,
    plan: ProfilePlan,
    number: int,
    device: Device,
    nodes: tuple[str, ...],
) -> TrialRequest:
    layout, cell, workload = detail.trial.layout, detail.cell.cell, spec.workload
    return TrialRequest(
        sweep=spec.name,
        trial_id=detail.trial.id,
        attempt=number,
        workload=workload.name,
        options=options_of(workload, layout),
        model=cell.model,
        sequence_length=cell.sequence_length,
        layout=layout,
        device=device,
        measurement=spec.measurement.plan(device),
        limits=_limits(spec, layout, device),
        seed=spec.search.seed,
        one_rank_per_node=is_one_process_per_node(workload),
        reports_on_last_node=reports_on_last_node(workload),
        profile=plan,
        nodes=nodes,
    )


def _limits(spec: SweepSpec, layout: Layout, device: Device) -> PhaseLimits:
    measurement = spec.measurement
    limits = resolve_limits(
        measurement.limits.asked,
        plan=measurement.plan(device),
        num_ranks=layout.world_size,
        predicted=None,
        compiles=compiles_layers(spec.workload, layout.options, on_gpu=device is Device.CUDA),
    )
    longer = {
        "first_step": max(limits.first_step, STEADY_SECONDS),
        "steady": max(limits.steady, STEADY_SECONDS),
        "total": max(limits.total, TOTAL_SECONDS),
    }
    return limits.model_copy(update={**longer, "auto": (), "in_file": False})


def _judged(end: Finished, request: TrialRequest, nodes: Sequence[str]) -> ProfileEnd:
    """Return the results of the ranks of a profile."""
    assert request.profile is not None
    found = {
        outcome.rank: outcome.result.profile
        for report in end.reports
        for outcome in report.ranks
        if outcome.result is not None and outcome.result.profile is not None
    }
    failure = end.failure
    if failure is None and not found:
        failure = Failure(
            kind=FailureKind.BAD_RESULT, message="every rank ended well, and none left a profile"
        )
    if failure is not None:
        found = {}
    if found and not any(one.is_slowest for one in found.values()):
        # Programs of users do not compare themselves with each other.
        busiest = max(found, key=lambda rank: found[rank].working_share)
        found[busiest] = found[busiest].model_copy(update={"is_slowest": True})
    slowest = next((one for one in found.values() if one.is_slowest), None)
    kept = {
        rank: one
        for rank, one in sorted(found.items())
        if rank == 0 or one.is_slowest or rank in request.profile.ranks
    }
    # The slowest rank waits for no other, so its communication shows what communication costs.
    lines = advice(slowest, request.layout) if slowest is not None else ()
    return ProfileEnd(
        trial_id=request.trial_id,
        number=request.attempt,
        nodes=nodes,
        gpu_seconds=end.gpu_seconds,
        ranks=kept,
        advice=lines,
        failure=failure,
    )
