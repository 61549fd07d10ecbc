"""One rank of a profile: the layout of a trial again, a few steps under torch.profiler.

Its times are no measurement: the profiler slows the host down. Steps without it are timed as well,
so that one can see by how much.
"""

from __future__ import annotations

import gc
import gzip
import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function, schedule
from torch.profiler import profile as torch_profile

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.group_axis import axis_of_ranks, single_axis
from orchestrator.core.trial.kernel_names import Axis
from orchestrator.core.trial.memory_timeline import TIMELINE_STEPS, MemoryKind, Moment
from orchestrator.core.trial.protocol import Phase, RankResult
from orchestrator.core.trial.rank_profile import ProfilePlan, RankProfile
from orchestrator.core.trial.trace_events import (
    AXES_KEY,
    AXIS_ANNOTATION,
    STEPS_ANNOTATION,
    read_trace,
)
from orchestrator.core.trial.trace_split import OPTIMIZER_ANNOTATION, split
from workloads.llama.allocations import AllocatorHistory, StepMarks, TrackedTensors, local
from workloads.llama.refusals import check
from workloads.llama.stack import describe_stack
from workloads.llama.timing import synchronize
from workloads.llama.train import open_device
from workloads.llama.training_loop import TrainingLoop, training_loop
from workloads.rank import Rank, seconds_since_process_start
from workloads.rendezvous import join_gang

# Calls of each group at once before the profiled steps: more than gloo has threads for a group. One
# rank comes later, so that calls of the others hold a thread each; then another one does.
_CALLS_OF_A_GROUP = 8
_LATER_SECONDS = 0.05


def trace_file(rank: int) -> str:
    """Return the name of a rank's trace, in its run directory."""
    return f"trace-{rank}.json.gz"


def profile(rank: Rank) -> RankResult:
    """Profile the layout of a rank's request. Raises ConfigRejected if it cannot run here."""
    plan = rank.request.profile
    assert plan is not None
    start_seconds = seconds_since_process_start()
    begin = time.perf_counter()
    rank.heartbeat(Phase.RENDEZVOUS)
    options = check(rank.request)
    device = open_device(rank, options)
    if rank.world_size > 1:
        join_gang(rank, device)
    loop = training_loop(rank, options, device=device)
    built = time.perf_counter()
    steps = _Steps(rank, loop, device)
    rank.heartbeat(Phase.FIRST_STEP)
    moments = _memory(loop, steps, device) if plan.memory else []
    while steps.number < rank.request.measurement.warmup_steps:
        steps.run()
    first_step = time.perf_counter()
    plain = [steps.run() for _ in range(plan.num_steps)]
    found = _profiled(rank, plan, loop, steps, device)
    found = found.model_copy(
        update={
            "plain_step_seconds": statistics.median(plain),
            "memory": [
                {"step": one.step, "part": one.part, "num_bytes": dict(one.num_bytes)}
                for one in moments
            ],
        }
    )
    result = RankResult(
        step_seconds=plain,
        phase_seconds=rank.with_teardown(
            {
                **({Phase.START: start_seconds} if start_seconds is not None else {}),
                Phase.RENDEZVOUS: built - begin,
                Phase.FIRST_STEP: first_step - built,
                Phase.STEADY: time.perf_counter() - first_step,
            }
        ),
        profile=RankProfile.model_validate(found.model_dump()),
        stack=describe_stack(device),
    )
    rank.finish(result)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


class _Steps:
    """Runs optimizer steps one after the other, with a heartbeat before each."""

    def __init__(self, rank: Rank, loop: TrainingLoop, device: torch.device) -> None:
        self._rank, self._loop, self._device = rank, loop, device
        self.number = 0

    def run(self) -> float:
        """Run a step to its end. Returns its seconds."""
        micro_batches = self._loop.micro_batches(self.number)
        synchronize(self._device)
        start = time.perf_counter()
        self.launch(micro_batches)
        synchronize(self._device)
        return time.perf_counter() - start

    def launch(self, micro_batches: list[tuple[Tensor, Tensor]] | None = None) -> None:
        """Run a step; on a GPU its kernels may still run."""
        self._rank.heartbeat(Phase.STEADY if self.number else Phase.FIRST_STEP, self.number)
        self._loop.step(micro_batches or self._loop.micro_batches(self.number))
        self.number += 1


# -- time ----------------------------------------------------------------------------------------


def _profiled(
    rank: Rank, plan: ProfilePlan, loop: TrainingLoop, steps: _Steps, device: torch.device
) -> RankProfile:
    """Trace steps, split them, and keep the traces that are asked for."""
    raw = rank.run_dir / f".trace-{rank.rank}.json"
    _trace(raw, plan, loop, steps, layout=rank.request.layout, device=device)
    rank.heartbeat(Phase.STEADY, steps.number)
    axis = single_axis(rank.request.layout)
    trace = read_trace(json.loads(raw.read_bytes()), num_steps=plan.num_steps)
    found = RankProfile.of(split(trace, single_axis=axis))
    working = _of_all_ranks(found.working_share, rank, device)
    slowest = max(range(rank.world_size), key=lambda one: working[one])
    path = None
    if rank.rank in {0, slowest, *plan.ranks}:
        path = rank.run_dir / trace_file(rank.rank)
        _compress(raw, path)
    raw.unlink()
    kept = str(path) if path is not None else None
    return found.model_copy(update={"is_slowest": rank.rank == slowest, "trace_path": kept})


def _trace(
    path: Path,
    plan: ProfilePlan,
    loop: TrainingLoop,
    steps: _Steps,
    *,
    layout: Layout,
    device: torch.device,
) -> None:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    gc.collect()
    profiler = torch_profile(
        activities=activities,
        # The first step under the profiler is slower than the others.
        schedule=schedule(wait=0, warmup=1, active=plan.num_steps, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    )
    with _optimizer_annotated(loop), profiler:
        steps.launch()
        synchronize(device)
        profiler.step()
        profiler.add_metadata_json(AXES_KEY, json.dumps(_call_groups(layout, device)))
        prepared = [loop.micro_batches(steps.number + i) for i in range(plan.num_steps)]
        synchronize(device)
        with record_function(STEPS_ANNOTATION):
            for micro_batches in prepared:
                steps.launch(micro_batches)
            synchronize(device)
        for _ in range(plan.num_steps):
            profiler.step()


@contextmanager
def _optimizer_annotated(loop: TrainingLoop) -> Iterator[None]:
    """Mark all that the optimizer does, copies and collectives around torch's own included."""
    optimizer: Any = loop.optimizer
    step: Callable[..., Any] = optimizer.step

    def annotated(*args: Any, **kwargs: Any) -> Any:
        with record_function(OPTIMIZER_ANNOTATION):
            return step(*args, **kwargs)

    optimizer.step = annotated
    try:
        yield
    finally:
        del optimizer.step


def _call_groups(layout: Layout, device: torch.device) -> dict[str, str]:
    """Call each group within an annotation that tells its axis; return the groups' axes.

    Events of gloo tell no group, but each group has threads of its own.
    """
    if not dist.is_initialized():
        return {}
    ranks_of = {one: tuple(dist.get_process_group_ranks(one)) for one in _groups()}
    known = [
        (axis_of_ranks(ranks, layout), one) for one, ranks in ranks_of.items() if len(ranks) > 1
    ]
    # All ranks call groups in the same order, so that none waits forever for another.
    known.sort(key=lambda pair: (list(Axis).index(pair[0]), len(ranks_of[pair[1]])))
    for axis, group in known:
        for late_rank in ranks_of[group][:2]:
            if dist.get_rank() == late_rank:
                time.sleep(_LATER_SECONDS)
            with record_function(f"{AXIS_ANNOTATION}{axis}"):
                _call(group, device)
    return {group.group_name: axis.value for axis, group in known}


def _call(group: dist.ProcessGroup, device: torch.device) -> None:
    calls = [
        dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
        for _ in range(_CALLS_OF_A_GROUP)
    ]
    for call in calls:
        if call is not None:
            call.wait()
    synchronize(device)


def _groups() -> list[dist.ProcessGroup]:
    """The groups that this rank is in. torch has no public list of them."""
    world = getattr(dist.distributed_c10d, "_world", None)
    return list(getattr(world, "pg_map", ()))


def _of_all_ranks(value: float, rank: Rank, device: torch.device) -> list[float]:
    values = torch.zeros(rank.world_size, dtype=torch.float64, device=device)
    values[rank.rank] = value
    if dist.is_initialized():
        dist.all_reduce(values)
    return [float(one) for one in values.tolist()]


def _compress(raw: Path, path: Path) -> None:
    temporary = path.with_name(f".{path.name}")
    with raw.open("rb") as source, gzip.open(temporary, "wb", compresslevel=5) as target:
        shutil.copyfileobj(source, target)
    temporary.replace(path)


# -- memory --------------------------------------------------------------------------------------


def _memory(loop: TrainingLoop, steps: _Steps, device: torch.device) -> list[Moment]:
    """Run the first steps, and return the memory of their moments by kind."""
    _forget_optimizer_states(device)
    recorder = AllocatorHistory(device) if device.type == "cuda" else TrackedTensors()
    states = loop.states()
    constants = (*states.parameters, *states.constants)
    recorder.note(MemoryKind.PARAMETERS, map(local, constants))
    recorder.note(MemoryKind.GRADIENTS, map(local, states.gradients))
    recorder.note(MemoryKind.OPTIMIZER, map(local, states.optimizer))
    del states, constants
    marks = StepMarks(recorder=recorder)
    with recorder.recording(), marks.watching():
        for number in range(TIMELINE_STEPS):
            marks.begin(number + 1)
            steps.run()
            recorder.note(MemoryKind.OPTIMIZER, map(local, loop.states().optimizer))
        end = recorder.now()
    return marks.moments(end)


def _forget_optimizer_states(device: torch.device) -> None:
    """Let torch's optimizers make their states in the first step, as they do by themselves.

    A measured trial makes them before, so that its first step needs as much memory as the others.
    """
    for one in gc.get_objects():
        # By its type: to ask some of torch's modules for their class is deprecated.
        if issubclass(type(one), torch.optim.Optimizer):
            one.state.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
