"""Profiles of real gangs on CPUs: their traces, their splits, and the memory of the first steps."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.problem.layout import Layout, Precision
from orchestrator.core.sweepfile.capabilities import CAPABILITIES
from orchestrator.core.trial.kernel_names import Axis
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.memory_timeline import TIMELINE_STEPS, MemoryKind
from orchestrator.core.trial.rank_profile import MemoryMoment, ProfilePlan, RankProfile
from orchestrator.core.trial.step_part import StepPart
from orchestrator.core.trial.trace_events import read_trace
from orchestrator.core.trial.trace_split import AttentionKernel, Part, split
from orchestrator.node.launcher import NodeLauncher
from tests.node.launching import order

pytestmark = pytest.mark.long


class Profiler:
    """Profiles layouts on one launcher, whose rank server imports torch once for all of them."""

    def __init__(self, launcher: NodeLauncher) -> None:
        self._launcher, self._trial_ids = launcher, itertools.count(1)

    def profiles(self, layout: Layout, plan: ProfilePlan) -> tuple[Path, list[RankProfile]]:
        """Return the folder of a new trial, and what each rank reports."""
        trial_id = next(self._trial_ids)
        asked = order("workloads.llama", trial_id=trial_id, world_size=layout.world_size)
        request = asked.request.model_copy(update={"layout": layout, "profile": plan})
        report = self._launcher.run(
            LaunchOrder(request=request, program=asked.program, local_world_size=layout.world_size)
        )
        assert report.failure is None, report.failure
        found = [outcome.result.profile for outcome in report.ranks if outcome.result is not None]
        folder = self._launcher.root / f"trial-{trial_id}"
        return folder, [one for one in found if one is not None]


@pytest.fixture(scope="module")
def profiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profiler]:
    with closing(NodeLauncher(tmp_path_factory.mktemp("runs"), node="here")) as launcher:
        yield Profiler(launcher)


@pytest.fixture(scope="module")
def gang(profiler: Profiler) -> tuple[Path, list[RankProfile]]:
    """Two replicas, profiled once for all tests."""
    layout = Layout(data_parallel_size=2, micro_batch_size=2, grad_accum_steps=2)
    return profiler.profiles(layout, ProfilePlan(num_steps=2, ranks=(1,)))


def test_every_rank_reports_a_split_that_adds_up(gang: tuple[Path, list[RankProfile]]) -> None:
    _, found = gang
    assert len(found) == 2
    for one in found:
        assert sum(one.parts.values()) == one.window_nanoseconds > 0
        assert one.num_steps == 2
        assert min(one.share(Part.MATMUL), one.share(Part.ATTENTION)) > 0
        assert min(one.share(Part.OPTIMIZER), one.share(Part.OTHER)) > 0
        assert one.parts[Part.UNKNOWN] <= 0.03 * one.window_nanoseconds
        assert one.attention is AttentionKernel.FUSED
        assert not one.is_on_device
        assert one.plain_step_seconds is not None
    assert sum(one.is_slowest for one in found) == 1


def test_the_gradients_of_replicas_are_communication_of_data_parallelism(
    gang: tuple[Path, list[RankProfile]],
) -> None:
    _, found = gang
    for one in found:
        assert one.parts[Part.EXPOSED_DP] + one.overlapped[Axis.DP] > 0
        others = (Part.EXPOSED_TP, Part.EXPOSED_CP, Part.EXPOSED_PP, Part.EXPOSED_OTHER)
        assert one.share(*others, Part.BUBBLE, Part.IDLE) == 0


def test_traces_are_kept_apart_from_measured_attempts_and_open_in_perfetto(
    gang: tuple[Path, list[RankProfile]],
) -> None:
    trial, found = gang
    assert not (trial / "attempt-1").exists()
    folder = trial / "profile-1" / "node-0"
    assert sorted(path.name for path in folder.glob("*trace*")) == [
        "trace-0.json.gz",
        "trace-1.json.gz",
    ]
    for rank, one in enumerate(found):
        assert one.trace_path == str(folder / f"trace-{rank}.json.gz")
        document = json.loads(gzip.decompress(Path(one.trace_path).read_bytes()))
        _check_chrome_trace(document)
        # The trace alone gives the split again.
        again = split(read_trace(document, num_steps=2), single_axis=Axis.DP)
        assert dict(again.parts) == one.parts


def _check_chrome_trace(document: Any) -> None:
    """Check what Perfetto needs of the JSON format: complete events, and names of threads."""
    events = document["traceEvents"]
    assert {event["ph"] for event in events} >= {"X", "M"}
    for event in events:
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["ts"], int | float)
            assert {"pid", "tid"} <= event.keys()
    names = {event["name"] for event in events}
    assert {"sweep::steps", "sweep::optimizer", "aten::mm", "gloo:all_reduce"} <= names
    assert "thread_name" in names


def test_only_the_traces_of_rank_0_and_the_slowest_are_kept(profiler: Profiler) -> None:
    trial, found = profiler.profiles(Layout(data_parallel_size=3), ProfilePlan(num_steps=1))
    slowest = next(rank for rank, one in enumerate(found) if one.is_slowest)
    kept = {rank for rank, one in enumerate(found) if one.trace_path is not None}
    assert kept == {0, slowest}
    files = sorted(path.name for path in trial.glob("profile-1/node-0/*trace*"))
    assert files == [f"trace-{rank}.json.gz" for rank in sorted(kept)]


@pytest.mark.parametrize(
    ("layout", "axes", "bubbles"),
    [
        (
            Layout(data_parallel_size=2, tensor_parallel_size=2, precision=Precision.FP32),
            {Axis.DP, Axis.TP},
            False,
        ),
        (
            Layout(pipeline_parallel_size=2, grad_accum_steps=4, precision=Precision.FP32),
            {Axis.PP},
            True,
        ),
    ],
)
def test_each_axis_has_its_own_communication(
    profiler: Profiler, layout: Layout, axes: set[Axis], bubbles: bool
) -> None:
    refusal = CAPABILITIES["llama"].refusal(layout)
    if refusal is not None:
        pytest.skip(f"workload llama cannot run {layout.key}: {refusal}")
    _, found = profiler.profiles(layout, ProfilePlan(num_steps=2))
    for one in found:
        spent = {
            axis for axis in Axis if one.parts[Part(f"exposed_{axis}")] + one.overlapped[axis] > 0
        }
        assert spent == axes
        assert (one.parts[Part.BUBBLE] > 0) == bubbles


def test_the_memory_of_the_first_steps_has_the_known_shape(profiler: Profiler) -> None:
    """Activations rise, gradients build up, and optimizer states come in step 1 and stay."""
    layout = Layout(micro_batch_size=4, precision=Precision.FP32)
    _, (found,) = profiler.profiles(layout, ProfilePlan(num_steps=1, memory=True))
    assert {moment.step for moment in found.memory} == set(range(1, TIMELINE_STEPS + 1))
    for step in range(1, TIMELINE_STEPS + 1):
        forward = _of(found.memory, step, StepPart.FORWARD, MemoryKind.ACTIVATIONS)
        backward = _of(found.memory, step, StepPart.BACKWARD, MemoryKind.ACTIVATIONS)
        assert forward == sorted(forward), "activations rise"
        assert forward[0] < max(forward) / 2
        assert max(forward + backward) == max(forward[-1], backward[0])
        assert backward[-1] < max(backward) / 4, "and are freed again"
        states = _of(found.memory, step, StepPart.OPTIMIZER, MemoryKind.OPTIMIZER)
        assert states[-1] > 0
    before = [
        size
        for part in (StepPart.FORWARD, StepPart.BACKWARD)
        for size in _of(found.memory, 1, part, MemoryKind.OPTIMIZER)
    ]
    assert set(before) == {0}, "no optimizer states before the end of step 1"
    parameters = found.memory[0].num_bytes[MemoryKind.PARAMETERS]
    later = {moment.num_bytes[MemoryKind.OPTIMIZER] for moment in found.memory if moment.step > 1}
    # Two moments of fp32 for fp32 weights: exactly two copies, up to constants and counters.
    assert len(later) == 1
    assert later.pop() == pytest.approx(2 * parameters, rel=0.05)


def _of(moments: list[MemoryMoment], step: int, part: StepPart, kind: MemoryKind) -> list[int]:
    return [one.num_bytes[kind] for one in moments if (one.step, one.part) == (step, part)]
