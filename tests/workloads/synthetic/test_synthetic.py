"""The synthetic workload: its physics has the right shape, its noise a seed, and no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from orchestrator.core.pretend.synthetic import memory, step_seconds, strikes
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.sweepfile.synthetic_options import FaultKind, SyntheticFault
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.node.launcher import NodeLauncher
from tests.node.launching import faulty, order

MODEL = PRESETS["llama-3.1-8b"]
GIB = 1 << 30


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeLauncher]:
    launcher = NodeLauncher(tmp_path_factory.mktemp("runs"), node="node-a")
    yield launcher
    launcher.close()


_trial_ids = count(1)


def run(launcher: NodeLauncher, options: dict[str, Any] | None = None, **known: Any) -> NodeReport:
    return launcher.run(order(trial_id=next(_trial_ids), options=options, **known))


def test_the_same_seed_gives_the_same_samples_and_another_attempt_others(
    launcher: NodeLauncher,
) -> None:
    first, again, other = (run(launcher, attempt=attempt).ranks[0].result for attempt in (1, 1, 2))
    assert first is not None and again is not None and other is not None
    assert first.step_seconds == again.step_seconds != other.step_seconds
    assert first.peak_flops == 989e12 and first.peak_flops_source == "table: h100-sxm"


def test_without_noise_every_step_takes_what_the_model_says(launcher: NodeLauncher) -> None:
    result = run(launcher, {"noise": 0.0}, world_size=1).ranks[0].result
    assert result is not None
    expected = step_seconds(PRESETS["llama-tiny"], Layout(), 128, DEVICES["h100-sxm"])
    assert result.step_seconds == pytest.approx([expected] * len(result.step_seconds))


@pytest.mark.parametrize(
    ("capacity_gib", "phase"), [(1, "rendezvous"), (1.004, "first_step"), (1.016, "steady")]
)
def test_memory_runs_out_where_it_would(
    launcher: NodeLauncher, capacity_gib: float, phase: str
) -> None:
    # llama-tiny on one rank: 1 GiB for the runtime, 2.8 MiB of weights, 9.3 MiB with gradients and
    # activations, 26 MiB with Adam.
    report = run(launcher, {"device_memory_bytes": int(capacity_gib * GIB)}, world_size=1)
    assert report.failure is not None
    assert (report.failure.kind, report.failure.phase) == (FailureKind.OOM_GPU, phase)


def test_a_fault_of_the_first_attempt_spares_the_second(launcher: NodeLauncher) -> None:
    options = faulty("lost_rank", rank=1, first_attempt_only=True)
    assert run(launcher, options).failure is not None
    assert run(launcher, options, attempt=2).failure is None


def test_a_fault_strikes_only_the_layouts_it_names_and_as_often_as_it_says() -> None:
    request = order().request
    fault = SyntheticFault(
        fault=FaultKind.CRASH, only_if={"micro_batch_size": 2, "recompute": "full:4"}
    )
    assert not strikes(fault, request, 0)
    layout = replace(request.layout, micro_batch_size=2, recompute=Recompute.parse("full:4"))
    assert strikes(fault, request.model_copy(update={"layout": layout}), 0)
    sometimes = SyntheticFault(fault=FaultKind.CRASH, probability=0.3)
    num_struck = sum(
        strikes(sometimes, request.model_copy(update={"attempt": attempt}), 0)
        for attempt in range(1, 1001)
    )
    # 300 expected; four standard deviations are 58.
    assert 240 < num_struck < 360


def test_options_with_a_mistake_are_told(launcher: NodeLauncher) -> None:
    for options, named in (({"nosie": 0.1}, "nosie"), ({"device_name": "h900"}, "h900")):
        report = run(launcher, options)
        assert report.failure is not None and report.failure.kind is FailureKind.CONFIG_REJECTED
        assert named in report.failure.log_tail


def test_a_precision_that_its_device_lacks_is_refused_with_those_that_it_has(
    launcher: NodeLauncher,
) -> None:
    report = run(launcher, {"device_name": "v100-32gb"})  # the order's layout is bf16
    assert report.failure is not None and report.failure.kind is FailureKind.CONFIG_REJECTED
    assert (
        "precision bf16 is none that v100-32gb (device_name) has; it has fp16, fp32"
        in report.failure.log_tail
    )


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (Layout(micro_batch_size=1), Layout(micro_batch_size=2)),
        (Layout(recompute=Recompute.parse("full")), Layout(recompute=Recompute.parse("selective"))),
        (Layout(recompute=Recompute.parse("selective")), Layout()),
        (Layout(recompute=Recompute.parse("full:16")), Layout(recompute=Recompute.parse("full:8"))),
        (Layout(data_parallel_size=8, zero_stage=3), Layout(data_parallel_size=8, zero_stage=2)),
        (Layout(data_parallel_size=8, zero_stage=2), Layout(data_parallel_size=8, zero_stage=1)),
        (Layout(data_parallel_size=8, zero_stage=1), Layout(data_parallel_size=8)),
        (Layout(tensor_parallel_size=2), Layout()),
        (Layout(pipeline_parallel_size=2), Layout()),
    ],
)
def test_memory_orders_layouts_as_training_does(less: Layout, more: Layout) -> None:
    assert memory(MODEL, less, 4096).step_2 < memory(MODEL, more, 4096).step_2


def test_states_take_sixteen_bytes_a_parameter() -> None:
    with_states = memory(MODEL, Layout(), 1)
    activations_of_one_token = 34 * MODEL.hidden_size * MODEL.num_layers + 6 * MODEL.vocab_size
    assert with_states.step_2 == (1 << 30) + 16 * MODEL.num_parameters + activations_of_one_token


def test_time_has_the_shape_of_training() -> None:
    def tokens_per_second(layout: Layout) -> float:
        return (
            layout.global_batch_size
            * 4096
            / step_seconds(MODEL, layout, 4096, DEVICES["h100-sxm"])
            / layout.world_size
        )

    assert tokens_per_second(Layout(micro_batch_size=2)) > tokens_per_second(
        Layout(micro_batch_size=1)
    )
    assert tokens_per_second(Layout(recompute=Recompute.parse("full"))) < tokens_per_second(
        Layout()
    )
    assert tokens_per_second(
        Layout(pipeline_parallel_size=4, grad_accum_steps=32)
    ) > tokens_per_second(Layout(pipeline_parallel_size=4, grad_accum_steps=4))
    assert tokens_per_second(Layout(tensor_parallel_size=8)) < tokens_per_second(Layout())
    peak = DEVICES["h100-sxm"].peak_flops[Layout().precision]
    assert (
        0.2
        < tokens_per_second(Layout(micro_batch_size=4)) * MODEL.flops_per_token(4096) / peak
        < 0.6
    )


@pytest.mark.parametrize("heavy", ["torch", "numpy"])
def test_rank_programs_that_compute_nothing_import_nothing_to_compute_with(heavy: str) -> None:
    """A rank server starts anew with each agent: numpy alone was a quarter of that."""
    code = (  # to import it raises
        f"import sys; sys.modules[{heavy!r}] = None; import workloads.synthetic, workloads.command"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
