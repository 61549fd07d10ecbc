"""A whole trial as a launcher runs it: forked ranks, a request in, results or notes out."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from orchestrator.core.problem.hardware import from_driver_name
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from orchestrator.core.sweepfile.capabilities import CAPABILITIES
from orchestrator.core.sweepfile.workload_options import TokenDtype
from orchestrator.core.trial.measurement import measure
from orchestrator.core.trial.protocol import (
    REQUEST_FILE,
    RUN_DIR_VARIABLE,
    Device,
    KnownPeak,
    MeasurementPlan,
    Phase,
    PhaseLimits,
    RankFailure,
    RankResult,
    TrialRequest,
    decode_failure,
    decode_result,
    encode,
    failure_file,
    result_file,
)
from orchestrator.node.reserved_port import reserve_port
from workloads.llama import main
from workloads.llama.data import Tokens
from workloads.llama.gradient_norm import gradient_norm
from workloads.llama.memory import LiveMemory, MemoryReport
from workloads.llama.model import Llama
from workloads.llama.optimizer import AdamW
from workloads.llama.peak_flops import measured_peak, trial_peak
from workloads.llama.refusals import check
from workloads.llama.stack import describe_stack
from workloads.llama.train import train
from workloads.llama.trained_part import DTYPES
from workloads.llama.training_loop import TrainingLoop
from workloads.rank import ConfigRejected, NotFinite, Rank, context

TINY = PRESETS["llama-tiny"]
PLAN = MeasurementPlan(warmup_steps=2, min_steps=4, max_steps=8, relative_confidence=0.02)


def request(layout: Layout, *, device: Device = Device.CPU, **options: object) -> TrialRequest:
    return TrialRequest(
        sweep="trial",
        trial_id=1,
        attempt=1,
        workload="llama",
        options=options,
        model=TINY,
        sequence_length=64,
        layout=layout,
        device=device,
        measurement=PLAN,
        limits=PhaseLimits(
            start=60, rendezvous=60, first_step=60, steady=60, teardown=60, total=60
        ),
        seed=1,
    )


def run_rank(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.exit(main())


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Forks ranks from a process that has imported the workload and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workloads.llama"])
    return context


def run_trial(
    trial: TrialRequest, run_dir: Path, server: ForkServerContext
) -> list[RankResult | RankFailure]:
    (run_dir / REQUEST_FILE).write_bytes(encode(trial))
    world_size = trial.layout.world_size
    ranks = []
    with closing(reserve_port()) as reserved:
        for rank in range(world_size):
            environment = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
                "MASTER_PORT": reserved.getsockname()[1],
            }
            process = server.Process(
                target=run_rank,
                args=(
                    {name: str(v) for name, v in environment.items()}
                    | {"MASTER_ADDR": "127.0.0.1", RUN_DIR_VARIABLE: str(run_dir)},
                ),
            )
            process.start()
            ranks.append(process)
        for process in ranks:
            process.join(timeout=400)  # a bound for what hangs
    outcomes: list[RankResult | RankFailure] = []
    for rank, process in enumerate(ranks):
        assert process.exitcode in (0, 1)
        outcomes.append(
            decode_result((run_dir / result_file(rank)).read_bytes())
            if process.exitcode == 0
            else decode_failure((run_dir / failure_file(rank)).read_bytes())
        )
    return outcomes


@pytest.mark.parametrize(
    "layout",
    [
        Layout(micro_batch_size=2, grad_accum_steps=2, precision=Precision.FP32),
        pytest.param(
            Layout(
                data_parallel_size=2,
                micro_batch_size=2,
                recompute=Recompute.parse("full"),
                precision=Precision.FP32,
            ),
            marks=pytest.mark.long,
        ),
        pytest.param(
            Layout(
                data_parallel_size=2,
                micro_batch_size=1,
                grad_accum_steps=2,
                recompute=Recompute.parse("selective:2"),
                zero_stage=1,
            ),
            marks=pytest.mark.long,
        ),
        Layout(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            micro_batch_size=1,
            grad_accum_steps=4,
            pipeline_schedule=PipelineSchedule.parse("interleaved:2"),
        ),
        pytest.param(
            Layout(context_parallel_size=2, micro_batch_size=4, zero_stage=3),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda layout: layout.key,
)
def test_a_trial_measures_its_layout(
    layout: Layout, tmp_path: Path, server: ForkServerContext
) -> None:
    results = run_trial(request(layout, learning_rate=2e-3), tmp_path, server)
    assert all(isinstance(result, RankResult) for result in results), results
    measured = measure(results, model=TINY, sequence_length=64, layout=layout, plan=PLAN)
    assert measured.mfu is not None
    assert measured.hfu is not None
    assert 0 < measured.mfu <= measured.hfu < 1
    assert PLAN.min_steps <= measured.step_time.num_steps <= PLAN.max_steps
    result = results[0]
    assert len(result.warmup_seconds) == PLAN.warmup_steps
    assert result.tokens_per_step == 4 * 64
    assert result.loss_first == pytest.approx(math.log(TINY.vocab_size), rel=0.05)
    assert result.loss_last < result.loss_first
    assert sum(result.memory_bytes_by_part.values()) == result.peak_memory_allocated_bytes
    assert result.peak_memory_reserved_bytes is None
    assert result.device_memory_bytes is None
    assert result.peak_flops_source.startswith("measured: matmul")
    assert result.peak_flops_source.endswith("1 threads, in trial 1")
    assert result.stack.torch == torch.__version__
    assert result.stack.device_name
    assert result.stack.cuda is None
    assert set(result.phase_seconds) == {
        Phase.START,
        Phase.RENDEZVOUS,
        Phase.FIRST_STEP,
        Phase.STEADY,
        Phase.TEARDOWN,
    }
    assert (
        result.phase_seconds[Phase.RENDEZVOUS] + result.phase_seconds[Phase.FIRST_STEP] < 10
    )  # 0.2 s on a quiet machine
    assert {r.loss_last for r in results} == {result.loss_last}
    assert {r.compile_seconds for r in results} == {0.0}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_layers_compiled_by_inductor_train_the_same_and_the_time_of_compiling_is_told(
    tmp_path: Path, server: ForkServerContext
) -> None:
    layout = Layout(
        micro_batch_size=2, recompute=Recompute.parse("selective_ops"), precision=Precision.FP32
    )
    plan = PLAN.model_copy(update={"max_steps": PLAN.min_steps})
    results = []
    for is_compiled in (False, True):
        folder = tmp_path / str(is_compiled)
        folder.mkdir()
        asked = request(layout, compile=is_compiled).model_copy(update={"measurement": plan})
        (result,) = run_trial(asked, folder, server)
        assert isinstance(result, RankResult), result
        results.append(result)
    plain, compiled = results
    assert compiled.loss_first == pytest.approx(plain.loss_first, rel=1e-6)
    assert compiled.loss_last == pytest.approx(plain.loss_last, rel=1e-6)
    assert not plain.compile_seconds
    first_step = compiled.phase_seconds[Phase.FIRST_STEP]
    assert 0.1 < compiled.compile_seconds < first_step
    # The first step does little else: each later one takes some milliseconds.
    assert first_step - compiled.compile_seconds < compiled.compile_seconds


def test_a_limited_cpu_runs_out_of_memory_in_its_first_step(
    tmp_path: Path, server: ForkServerContext
) -> None:
    states = 16 * TINY.num_parameters
    outcomes = run_trial(
        request(
            Layout(micro_batch_size=16, precision=Precision.FP32),
            memory_limit_bytes=states + (8 << 20),
        ),
        tmp_path,
        server,
    )
    failure = outcomes[0]
    assert isinstance(failure, RankFailure)
    assert failure.out_of_memory
    assert failure.phase is Phase.FIRST_STEP
    assert failure.exception == "torch.OutOfMemoryError"


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_training_that_diverges_is_not_measured(
    replicas: int, tmp_path: Path, server: ForkServerContext
) -> None:
    layout = Layout(
        data_parallel_size=replicas,
        micro_batch_size=1,
        grad_accum_steps=4 // replicas,
        precision=Precision.FP32,
    )
    outcomes = run_trial(request(layout, learning_rate=1e9), tmp_path, server)
    assert all(isinstance(outcome, RankFailure) for outcome in outcomes), outcomes
    assert {outcome.exception for outcome in outcomes} == {"workloads.rank.NotFinite"}
    assert re.match(r"the loss of step [1-9] is (nan|inf);", outcomes[0].message), outcomes[
        0
    ].message


def test_what_does_not_fit_two_replicas_fits_when_they_share_the_optimizer_states_out(
    tmp_path: Path, server: ForkServerContext
) -> None:
    def run(zero_stage: int) -> list[RankResult | RankFailure]:
        folder = tmp_path / str(zero_stage)
        folder.mkdir()
        layout = Layout(data_parallel_size=2, micro_batch_size=1, zero_stage=zero_stage)
        # States alone: 16, or 4 + 12/2.
        return run_trial(
            request(layout, memory_limit_bytes=15 * TINY.num_parameters), folder, server
        )

    assert any(isinstance(outcome, RankFailure) and outcome.out_of_memory for outcome in run(0))
    assert all(isinstance(outcome, RankResult) for outcome in run(1))


def test_importing_the_workload_asks_nothing_of_cuda_and_starts_no_thread() -> None:
    program = """
import os, torch
def asked(*_, **__):
    raise AssertionError("import asked CUDA something: ranks forked from here could not use it")
names = "is_available device_count current_device get_device_properties get_device_capability"
for name in (*names.split(), "_lazy_init"):
    setattr(torch.cuda, name, asked)
import workloads.llama
assert not torch.cuda.is_initialized()
assert len(os.listdir("/proc/self/task")) == 1
"""
    one_thread = {
        "OPENBLAS_NUM_THREADS": "1"
        # Numpy's BLAS starts threads when imported, and handles forks itself.
    }
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, timeout=60, env=os.environ | one_thread
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("layout", "options", "reason"),
    [
        (Layout(precision=Precision.FP8), {}, "precision fp8 needs a GPU"),
        (
            Layout(),
            {"attentoin": "flash"},
            "attentoin: Extra inputs.*Allowed are compile, attention",
        ),
        (Layout(), {"attention": "ring"}, "attention: Input should be 'auto', 'cudnn'"),
        (Layout(), {"attention": "cudnn"}, "attention: cudnn does not exist for bf16 on cpu"),
        (Layout(), {"loss": "chunked:0"}, "loss: String should match"),
        (Layout(), {"gradient_dtype": "fp16"}, "gradient_dtype"),
    ],
)
def test_what_cannot_run_is_refused_with_its_field(
    layout: Layout, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigRejected, match=reason):
        check(request(layout, **options))


def test_a_refusal_reaches_the_launcher_as_a_failure_note(
    tmp_path: Path, server: ForkServerContext
) -> None:
    failure = run_trial(request(Layout(tensor_parallel_size=4)), tmp_path, server)[0]
    assert isinstance(failure, RankFailure)
    assert failure.exception.endswith("ConfigRejected")
    assert not failure.out_of_memory


def test_the_synthetic_and_the_command_workload_refuse_nothing() -> None:
    layout = Layout(
        tensor_parallel_size=64,
        pipeline_parallel_size=16,
        context_parallel_size=8,
        zero_stage=3,
        precision=Precision.FP8,
    )
    assert CAPABILITIES["synthetic"].refusal(layout) is None
    assert CAPABILITIES["command"].refusal(layout) is None


def token_file(tmp_path: Path, ids: list[int], dtype: str = "uint16") -> Path:
    path = tmp_path / "tokens.bin"
    np.array(ids, dtype=dtype).tofile(path)
    return path


@pytest.mark.parametrize("dtype", TokenDtype)
def test_sequences_follow_one_another_through_a_token_file(
    tmp_path: Path, dtype: TokenDtype
) -> None:
    path = token_file(tmp_path, list(range(100, 117)), dtype.value)
    tokens = Tokens(vocab_size=200, sequence_length=4, seed=0, token_file=path, dtype=dtype)
    assert tokens.sequence(step=0, index=0, global_batch_size=2).tolist() == [
        100,
        101,
        102,
        103,
        104,
    ]
    assert tokens.sequence(step=0, index=1, global_batch_size=2).tolist() == [
        104,
        105,
        106,
        107,
        108,
    ]
    assert tokens.sequence(step=1, index=1, global_batch_size=2).tolist() == [
        112,
        113,
        114,
        115,
        116,
    ]
    assert tokens.sequence(step=2, index=0, global_batch_size=2).tolist() == [
        100,
        101,
        102,
        103,
        104,
    ]  # the file is read again


def test_a_token_file_for_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tokens = Tokens(
        vocab_size=50, sequence_length=4, seed=0, token_file=token_file(tmp_path, [1, 2, 3, 77, 5])
    )
    with pytest.raises(ValueError, match="id 77 at 3 is not below vocab_size 50"):
        tokens.sequence(step=0, index=0, global_batch_size=1)


def test_a_token_file_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one sequence needs 5 ids"):
        Tokens(vocab_size=50, sequence_length=4, seed=0, token_file=token_file(tmp_path, [1, 2]))


def test_synthetic_tokens_depend_on_seed_step_and_place_alone() -> None:
    def ids(seed: int, step: int, index: int, global_batch_size: int = 8) -> list[int]:
        tokens = Tokens(vocab_size=1000, sequence_length=16, seed=seed)
        return tokens.sequence(step=step, index=index, global_batch_size=global_batch_size).tolist()

    assert ids(1, 2, 3) == ids(1, 2, 3, global_batch_size=64)
    assert len({tuple(ids(*key)) for key in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4))}) == 4
    assert all(0 <= i < 1000 for i in ids(1, 2, 3))


@pytest.mark.long
@pytest.mark.parametrize("precision", [one for one in Precision if one is not Precision.FP8])
def test_the_measured_peak_is_named_and_no_product_beats_it_by_far(precision: Precision) -> None:
    torch.set_num_threads(1)
    peak = measured_peak(torch.device("cpu"), precision)
    again = measured_peak(torch.device("cpu"), precision)
    assert peak is not None
    assert again is not None
    assert peak.source.startswith("measured: matmul")
    assert peak.source.endswith("1 threads")
    assert 1 / 3 < peak.flops / again.flops < 3  # the machine may be busy


def test_a_peak_in_fp8_is_unknown_without_a_data_sheet() -> None:
    """torch's plain products have no fp8; the trial counts without an MFU."""
    trial = request(Layout(precision=Precision.FP8))
    cpu = torch.device("cpu")
    assert trial_peak(trial, node="n1", device=cpu, device_name="a CPU", achieved_flops=1e9) is None


def test_every_precision_has_a_type_to_train_in() -> None:
    assert set(DTYPES) == set(Precision)


def peak_of(flops: float, **changes: object) -> KnownPeak:
    known = {
        "node": "n1",
        "device_name": "a CPU",
        "flops": flops,
        "source": "measured: matmul 512^3 float32, 1 threads, in trial 1",
    }
    return KnownPeak.model_validate(known | changes)


def the_peak(*known: KnownPeak, achieved_flops: float) -> tuple[float, str]:
    """What a second trial on node n1 rests on."""
    trial = request(Layout(precision=Precision.FP32)).model_copy(
        update={"trial_id": 2, "peaks": known}
    )
    found = trial_peak(
        trial,
        node="n1",
        device=torch.device("cpu"),
        device_name="a CPU",
        achieved_flops=achieved_flops,
    )
    assert found is not None
    return found.flops, found.source


def test_an_earlier_peak_of_this_node_is_taken_and_not_one_of_another_node_or_device() -> None:
    others = (peak_of(1e3, node="n2"), peak_of(1e4, device_name="another CPU"))
    assert the_peak(*others, peak_of(123e9), achieved_flops=1e9) == (123e9, peak_of(1).source)
    flops, source = the_peak(*others, achieved_flops=1.0)
    assert flops > 1e6  # its own, which is higher
    assert source.endswith("in trial 2")


def test_a_trial_faster_than_the_peak_it_is_told_measures_again_and_takes_the_larger() -> None:
    flops, source = the_peak(peak_of(1e3), achieved_flops=2e3)
    assert flops > 2e3
    assert source.endswith("in trial 2")
    assert the_peak(peak_of(1e17), achieved_flops=1.5e17) == (
        1e17,
        peak_of(1).source,
    )  # refused by `measure`


def test_a_whole_trial_rests_on_the_peak_that_it_is_told(
    tmp_path: Path, server: ForkServerContext
) -> None:
    trial = request(Layout(data_parallel_size=2, micro_batch_size=2, precision=Precision.FP32))
    device_name = describe_stack(torch.device("cpu")).device_name
    known = peak_of(9e17, node=socket.gethostname(), device_name=device_name)
    results = run_trial(
        trial.model_copy(update={"trial_id": 2, "peaks": (known,)}), tmp_path, server
    )
    assert [(result.peak_flops, result.peak_flops_source) for result in results] == [
        (known.flops, known.source)
    ] * 2


@pytest.fixture
def told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[Phase, int, bool]]]:
    """Makes this process the only rank of a trial in fp32, and keeps its reports."""
    trial = request(Layout(micro_batch_size=1, precision=Precision.FP32))
    (tmp_path / REQUEST_FILE).write_bytes(encode(trial))
    names = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        RUN_DIR_VARIABLE: str(tmp_path),
    }
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    heartbeats: list[tuple[Phase, int, bool]] = []
    tell = Rank.heartbeat

    def listen(
        rank: Rank, phase: Phase, step: int = 0, *, timed: bool = False, enough: bool = False
    ) -> None:
        heartbeats.append((phase, step, timed))
        tell(rank, phase, step, timed=timed, enough=enough)

    monkeypatch.setattr(Rank, "heartbeat", listen)
    threads = torch.get_num_threads()
    yield heartbeats
    torch.set_num_threads(threads)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_training_whose_last_gradient_alone_is_not_finite_is_not_measured(
    number: float, told: list[tuple[Phase, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number of a gradient is spoilt, and no step is taken, so that losses stay finite."""

    def spoilt(gradients: list[Tensor], groups: list[object], **copies: object) -> Tensor:
        gradients[0].view(-1)[0] = number
        return gradient_norm(gradients, groups, **copies)

    monkeypatch.setattr("workloads.llama.training_loop.gradient_norm", spoilt)
    monkeypatch.setattr(AdamW, "step", lambda *_, **__: None)
    with pytest.raises(NotFinite) as raised:
        train(context())
    _, last, _ = told[-1]
    assert str(raised.value).startswith(f"the gradient norm of step {last + 1} is {number};")


def test_only_steps_after_the_warm_up_are_told_to_be_timed(
    told: list[tuple[Phase, int, bool]],
) -> None:
    result = train(context())
    timed = [(step, timed) for phase, step, timed in told if phase is Phase.STEADY]
    last = PLAN.warmup_steps + len(result.step_seconds) - 1
    assert timed == [
        (1, False),
        *((step, True) for step in range(PLAN.warmup_steps, last + 1)),
        (last, False),
    ]


def test_what_was_measured_stands_whatever_happens_while_memory_is_looked_at(
    told: list[tuple[Phase, int, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> MemoryReport:
        raise RuntimeError("CUDA error: misaligned address")

    # As on a GPU, whose allocator knows the peaks without a step of its own.
    peaks = MemoryReport(peak_allocated_bytes=7, bytes_by_part={}, device_used_bytes=9)
    monkeypatch.setattr(LiveMemory, "peaks", lambda _: peaks)
    monkeypatch.setattr(LiveMemory, "report", die)
    with pytest.raises(RuntimeError, match="misaligned"):
        train(context())
    result = decode_result((tmp_path / result_file(0)).read_bytes())
    assert len(result.step_seconds) >= PLAN.min_steps
    assert (result.peak_memory_allocated_bytes, result.device_used_bytes) == (7, 9)
    assert told[-1][0] is Phase.TEARDOWN, "its launcher takes the result, however the rank ends"


def test_a_look_at_memory_amends_the_result_that_was_handed_over(
    told: list[tuple[Phase, int, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LiveMemory, "peaks", lambda _: MemoryReport(peak_allocated_bytes=7, bytes_by_part={})
    )
    result = train(context())
    stored = decode_result((tmp_path / result_file(0)).read_bytes())
    assert stored == result
    assert stored.memory_bytes_by_part["parameters"] > 0
    # The launcher counts the teardown from the first time on.
    ended = [phase for phase, _, _ in told if phase is Phase.TEARDOWN]
    assert len(ended) == 2
    assert stored.phase_seconds[Phase.TEARDOWN] < 1.0


def test_a_peak_is_measured_when_the_model_is_gone_and_unknown_without_room(
    told: list[tuple[Phase, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[Llama]] = []
    alive_at_the_peak: list[bool] = []
    materialise = Llama.materialise

    def remember(model: Llama, device: torch.device, *, seed: int) -> None:
        models.append(weakref.ref(model))
        materialise(model, device, seed=seed)

    def no_room(*_: object, **__: object) -> float:
        alive_at_the_peak.append(models[0]() is not None)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Llama, "materialise", remember)
    monkeypatch.setattr("workloads.llama.peak_flops.product_flops", no_room)
    result = train(context())
    assert (result.peak_flops, result.peak_flops_source) == (None, None)
    assert alive_at_the_peak == [False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_no_step_waits_for_the_device(
    told: list[tuple[Phase, int, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = request(Layout(micro_batch_size=2), device=Device.CUDA)
    (tmp_path / REQUEST_FILE).write_bytes(encode(trial))
    step, prepare = TrainingLoop.step, TrainingLoop.micro_batches
    num_steps: list[int] = []

    def unsynchronised(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            # The first steps make what is made once.
            torch.cuda.set_sync_debug_mode("error" if len(num_steps) > 2 else "default")
            try:
                return call(*given)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return called

    def counted(*given: Any) -> Any:
        num_steps.append(1)
        return step(*given)

    monkeypatch.setattr(TrainingLoop, "step", unsynchronised(counted))
    monkeypatch.setattr(TrainingLoop, "micro_batches", unsynchronised(prepare))
    result = train(context())
    assert len(num_steps) == len(result.warmup_seconds) + len(result.step_seconds) > 5
    assert result.device_used_bytes > result.peak_memory_allocated_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("gradient_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("data_parallel_size", [1, 2])
def test_a_trial_measures_its_layout_on_gpus(
    data_parallel_size: int, gradient_dtype: str, tmp_path: Path, server: ForkServerContext
) -> None:
    if torch.cuda.device_count() < data_parallel_size:
        pytest.skip("a single CUDA device here")
    layout = Layout(
        data_parallel_size=data_parallel_size,
        micro_batch_size=2,
        grad_accum_steps=2,
        recompute=Recompute.parse("selective:2"),
        zero_stage=data_parallel_size - 1,
    )
    trial = request(layout, device=Device.CUDA, gradient_dtype=gradient_dtype).model_copy(
        update={"model": PRESETS["llama-60m"]}
    )
    results = run_trial(trial, tmp_path, server)
    assert all(isinstance(result, RankResult) for result in results), results
    result = results[0]
    assert result.memory_bytes_by_part["parameters"] == 2 * trial.model.num_parameters
    bytes_per_parameter = 4 + 12 / data_parallel_size
    assert (
        result.peak_memory_reserved_bytes
        >= result.peak_memory_allocated_bytes
        > bytes_per_parameter * trial.model.num_parameters
    )
    assert result.device_memory_bytes > result.peak_memory_reserved_bytes
    assert result.allocator_retries == 0
    known = from_driver_name(result.stack.device_name) is not None
    assert result.peak_flops_source.startswith("table: " if known else "measured: ")
    assert result.stack.cuda == torch.version.cuda
    assert (
        0
        < measure(results, model=trial.model, sequence_length=64, layout=layout, plan=PLAN).mfu
        < 1
    )
