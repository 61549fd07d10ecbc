"""The split of a step's time, on traces whose arithmetic is in the test."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from orchestrator.core.trial.kernel_names import Axis
from orchestrator.core.trial.trace_events import read_trace
from orchestrator.core.trial.trace_split import AttentionKernel, Part, Split, split
from tests.core.trial.traces import annotation, document, host, kernel, launch, nccl

GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopB_TNT"
FLASH = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdam>"


def of(*rows: Any, steps: tuple[int, int] = (0, 100), **keys: Any) -> Split:
    found = split(read_trace(document(*rows, steps=steps, **keys)))
    assert sum(found.parts.values()) == found.window == (steps[1] - steps[0]) * 1000
    return found


def parts(found: Split) -> dict[str, int]:
    """Those above zero, in microseconds."""
    return {part.value: spent // 1000 for part, spent in found.parts.items() if spent}


def test_kernels_of_each_kind_take_their_own_time() -> None:
    found = of(
        kernel(GEMM, 0, 40),
        kernel(FLASH, 40, 60),
        kernel(ADD, 60, 75),
        kernel(ADAM, 75, 85),
        kernel("mystery_kernel_v3", 85, 100),
    )
    assert parts(found) == {
        "matmul": 40,
        "attention": 20,
        "other_kernels": 15,
        "optimizer": 10,
        "unknown": 15,
    }
    assert found.unknown == [("mystery_kernel_v3", 15_000)]
    assert found.num_kernels == 5
    assert found.median_kernel == 15_000


def test_communication_behind_kernels_is_overlapped_and_the_rest_is_exposed() -> None:
    # 10 to 70, of which the kernels run until 50 and again from 60: exposed 50 to 60.
    found = of(kernel(GEMM, 0, 50), nccl(10, 70, "dp"), kernel(GEMM, 60, 100))
    assert parts(found) == {"matmul": 90, "exposed_dp": 10}
    assert found.overlapped[Axis.DP] == 50_000


def test_each_axis_has_its_own_exposed_communication() -> None:
    found = of(
        nccl(0, 10, "tp"),
        nccl(10, 30, "cp", "AllGather"),
        nccl(30, 60, "dp"),
        kernel(GEMM, 60, 100),
    )
    assert parts(found) == {"matmul": 40, "exposed_tp": 10, "exposed_cp": 20, "exposed_dp": 30}


def test_where_two_axes_communicate_at_once_the_moment_counts_once() -> None:
    # Both run from 20 to 40, which belongs to tp; dp has 40 to 60.
    found = of(nccl(0, 40, "tp"), nccl(20, 60, "dp", stream=21), kernel(GEMM, 60, 100))
    assert parts(found) == {"matmul": 40, "exposed_tp": 40, "exposed_dp": 20}


def test_two_kernels_on_two_streams_at_once_count_once_for_the_first_kind() -> None:
    found = of(kernel(GEMM, 0, 60), kernel(ADD, 40, 100, stream=8))
    assert parts(found) == {"matmul": 60, "other_kernels": 40}


def test_kernels_launched_in_the_optimizer_are_its_own_whatever_their_name() -> None:
    found = of(
        annotation("Optimizer.step#AdamW.step", 10, 20),
        launch(5, 6, 1),
        launch(12, 13, 2),
        kernel(ADD, 30, 50, 1),
        kernel(ADD, 50, 100, 2),
    )
    assert parts(found) == {"host_bound": 6, "idle": 24, "other_kernels": 20, "optimizer": 50}


def test_a_gap_is_host_bound_until_the_next_kernel_is_launched_and_idle_after_that() -> None:
    # The device is free from 20. The next kernel is launched at 50 and starts at 60.
    found = of(kernel(GEMM, 0, 20, 1), launch(45, 50, 2), kernel(GEMM, 60, 100, 2))
    assert parts(found) == {"matmul": 60, "host_bound": 30, "idle": 10}


def test_a_gap_is_idle_if_the_next_kernel_was_launched_before_it() -> None:
    found = of(launch(1, 2, 2), kernel(GEMM, 0, 20, 1), kernel(GEMM, 60, 100, 2))
    assert parts(found) == {"matmul": 60, "idle": 40}


def test_what_follows_the_last_kernel_is_the_hosts() -> None:
    assert parts(of(kernel(GEMM, 0, 90))) == {"matmul": 90, "host_bound": 10}


def test_events_are_cut_at_the_window_of_the_steps() -> None:
    found = of(kernel(GEMM, 0, 30), kernel(GEMM, 190, 300), kernel(ADD, 5, 9), steps=(20, 200))
    # 20 to 30 and 190 to 200; between them nothing ran.
    assert parts(found) == {"matmul": 20, "idle": 160}


def test_a_message_that_takes_longer_than_the_fastest_waited_for_its_stage() -> None:
    # Three messages of one size: 10, 40 and 10. The one of 40 waited for 30.
    message = {"In msg nelems": 4096}
    found = of(
        nccl(0, 10, "pp", "SendRecv", **message),
        nccl(20, 60, "pp", "SendRecv", **message),
        nccl(60, 70, "pp", "SendRecv", **message),
        kernel(GEMM, 70, 100),
    )
    assert parts(found) == {"matmul": 30, "exposed_pp": 30, "bubble": 30, "idle": 10}


def test_a_message_takes_as_long_wherever_in_the_step_it_is() -> None:
    message = {"In msg nelems": 4096}
    found = of(
        kernel(GEMM, 0, 30),
        nccl(30, 40, "pp", "SendRecv", **message),
        nccl(40, 80, "pp", "SendRecv", **message),
        kernel(GEMM, 80, 100),
    )
    assert parts(found) == {"matmul": 50, "exposed_pp": 20, "bubble": 30}


def test_a_small_message_needs_no_longer_than_a_larger_one() -> None:
    # 8192 elements took 10, so 16 of the 26 for 4 elements were waiting.
    found = of(
        nccl(0, 10, "pp", "SendRecv", **{"In msg nelems": 8192}),
        nccl(10, 36, "pp", "SendRecv", **{"In msg nelems": 4}),
        kernel(GEMM, 36, 100),
    )
    assert parts(found) == {"matmul": 64, "exposed_pp": 20, "bubble": 16}


def test_waiting_behind_a_kernel_is_no_bubble() -> None:
    message = {"In msg nelems": 4096}
    found = of(
        nccl(0, 10, "pp", "SendRecv", **message),
        kernel(GEMM, 10, 90),
        nccl(10, 100, "pp", "SendRecv", **message),
    )
    assert parts(found) == {"matmul": 80, "exposed_pp": 20}
    assert found.overlapped[Axis.PP] == 80_000


def test_the_group_of_a_kernel_is_taken_from_its_call_on_the_host() -> None:
    named = {"Process Group Name": "3", "External id": 9}
    found = of(
        host("record_param_comms", 0, 1, **named),
        kernel("ncclDevKernel_AllGather_RING_LL", 0, 100, **{"External id": 9}),
        distributedInfo={"pg_config": [{"pg_name": "3", "pg_desc": "mesh_tp"}]},
    )
    assert parts(found) == {"exposed_tp": 100}


def test_the_program_may_say_which_axis_a_group_serves() -> None:
    group = {"Process Group Name": "5", "Process Group Description": "undefined"}
    rows = [kernel("ncclDevKernel_AllGather_RING_LL", 0, 100, **group)]
    assert parts(of(*rows)) == {"exposed_other": 100}
    assert parts(of(*rows, sweep_axes={"5": "cp"})) == {"exposed_cp": 100}


def test_the_only_axis_has_all_communication() -> None:
    trace = read_trace(document(kernel("ncclDevKernel_AllReduce", 0, 100)))
    assert split(trace, single_axis=Axis.DP).parts[Part.EXPOSED_DP] == 100_000


def test_the_host_is_busy_except_where_it_waits_for_the_device() -> None:
    # Four launches of 2; the one that took 42 waited for 40. The synchronisation waits for 20.
    found = of(
        *(launch(at, at + 2, at) for at in (1, 4, 7, 10)),
        launch(20, 62, 20),
        launch(70, 90, 0, "cudaDeviceSynchronize"),
        kernel(GEMM, 0, 100, 1),
    )
    assert found.host == 100_000 - 40_000 - 20_000


def test_on_a_cpu_the_outermost_operation_that_computes_has_the_time() -> None:
    # The copy within the product belongs to it; views and nodes of autograd are the host's.
    found = of(
        host("aten::linear", 0, 40),
        host("aten::t", 0, 5),
        host("aten::addmm", 5, 40),
        host("aten::copy_", 6, 9),
        host("autograd::engine::evaluate_function: MulBackward0", 50, 70),
        host("MulBackward0", 52, 70),
        host("aten::mul", 55, 65),
        host("aten::_scaled_dot_product_flash_attention_for_cpu", 70, 90),
    )
    assert parts(found) == {
        "matmul": 40,
        "attention": 20,
        "other_kernels": 10,
        "host_bound": 30,
    }
    assert found.host is None
    assert not found.is_on_device
    assert found.attention is AttentionKernel.FUSED


def test_on_a_cpu_an_unknown_operation_has_what_nothing_within_it_has() -> None:
    found = of(
        host("mine::special", 10, 60),
        host("aten::mm", 20, 30),
        host("mine::inner", 40, 50),
    )
    assert parts(found) == {"matmul": 10, "unknown": 40, "host_bound": 50}
    assert found.unknown == [("mine::special", 30_000), ("mine::inner", 10_000)]


def test_on_a_cpu_the_optimizer_has_all_that_it_calls() -> None:
    found = of(
        annotation("Optimizer.step#AdamW.step", 0, 50),
        host("aten::mul", 10, 20),
        host("aten::_fused_adamw_", 20, 40),
    )
    assert parts(found) == {"optimizer": 50, "host_bound": 50}


def test_gloo_in_the_optimizer_is_communication_and_not_the_optimizer() -> None:
    found = of(
        annotation("sweep::optimizer", 0, 100),
        annotation("gloo:all_gather", 60, 90, thread=5),
        annotation("sweep::axis::dp", -20, -10),
        annotation("gloo:all_reduce", -18, -12, thread=5),
    )
    assert parts(found) == {"optimizer": 70, "exposed_dp": 30}


def test_threads_of_gloo_tell_the_axis_and_messages_are_the_pipelines() -> None:
    found = of(
        annotation("sweep::axis::tp", -40, -30),
        annotation("gloo:all_reduce", -38, -32, thread=5),
        annotation("sweep::axis::dp", -20, -10),
        annotation("gloo:all_reduce", -18, -12, thread=6),
        annotation("gloo:all_gather", 0, 10, thread=5),
        annotation("gloo:all_reduce", 10, 30, thread=6),
        annotation("gloo:recv", 30, 60),
        host("aten::mm", 60, 100),
    )
    assert parts(found) == {"exposed_tp": 10, "exposed_dp": 20, "exposed_pp": 30, "matmul": 40}


@pytest.mark.parametrize(
    ("names", "kernel_"),
    [
        (["aten::_scaled_dot_product_attention_math"], AttentionKernel.MATH),
        (["aten::_scaled_dot_product_cudnn_attention"], AttentionKernel.FUSED),
        (["aten::_scaled_dot_product_efficient_attention"], AttentionKernel.FUSED),
        (["aten::bmm", "aten::_softmax", "aten::add"], AttentionKernel.EAGER),
        (["aten::bmm", "aten::_softmax"], AttentionKernel.EAGER),
        (["aten::bmm"], None),
        (["aten::mm", "aten::_log_softmax"], None),
    ],
)
def test_operations_tell_how_attention_was_computed(
    names: list[str], kernel_: AttentionKernel | None
) -> None:
    assert of(*(host(name, 0, 10) for name in names)).attention is kernel_


_times = some.tuples(some.integers(-20, 130), some.integers(0, 60))
_names = some.sampled_from([GEMM, FLASH, ADD, ADAM, "what_is_this"])
_device_rows = some.lists(
    some.one_of(
        some.builds(
            lambda name, at, stream, launch_id: kernel(
                name, at[0], at[0] + at[1], launch_id, stream=stream
            ),
            _names,
            _times,
            some.integers(1, 3),
            some.integers(0, 5),
        ),
        some.builds(
            lambda at, group, size: nccl(at[0], at[0] + at[1], group, **{"In msg nelems": size}),
            _times,
            some.sampled_from(["dp", "tp", "pp", "cp", "unheard"]),
            some.integers(1, 3),
        ),
        some.builds(lambda at, i: launch(at[0], at[0] + at[1], i), _times, some.integers(1, 5)),
        some.builds(
            lambda at: annotation("Optimizer.step#AdamW.step", at[0], at[0] + at[1]), _times
        ),
    ),
    max_size=20,
)
_host_rows = some.lists(
    some.builds(
        lambda name, at, thread: host(
            name,
            at[0],
            at[0] + at[1],
            thread=thread,
            category="cpu_op" if "::" in name else "user_annotation",
        ),
        some.sampled_from(
            [
                "aten::mm",
                "aten::view",
                "aten::mul",
                "mine::op",
                "autograd::x",
                "gloo:all_reduce",
                "gloo:recv",
                "Optimizer.step#SGD.step",
                "sweep::axis::dp",
            ]
        ),
        _times,
        some.integers(1, 3),
    ),
    max_size=20,
)


@given(some.one_of(_device_rows, _host_rows))
def test_parts_are_never_negative_and_add_up_to_the_window(rows: list[Any]) -> None:
    found = of(*rows)
    assert set(found.parts) == set(Part)
    assert all(spent >= 0 for spent in found.parts.values())
    assert all(0 <= spent <= found.window for spent in found.overlapped.values())
    assert found.host is None or 0 <= found.host <= found.window


@given(_device_rows)
def test_each_moment_has_the_first_kind_that_runs(rows: list[Any]) -> None:
    """An independent count, microsecond by microsecond, of computation and exposed axes."""
    # Without a kernel it would be a CPU's trace.
    rows = [*rows, kernel("what_is_this", 0, 1)]
    found = of(*rows)
    counted = {GEMM: Part.MATMUL, FLASH: Part.ATTENTION, ADAM: Part.OPTIMIZER, ADD: Part.OTHER}
    launches = {r["args"]["correlation"]: r["ts"] for r in rows if r["cat"] == "cuda_runtime"}
    steps = [(r["ts"], r["ts"] + r["dur"]) for r in rows if r["name"].startswith("Optimizer.step")]

    def part_of(row: Any) -> Part:
        if "nccl" in row["name"]:
            group = row["args"]["Process Group Name"]
            return Part(f"exposed_{'other' if group == 'unheard' else group}")
        at = launches.get(row["args"].get("correlation"))
        if at is not None and any(a <= at < b for a, b in steps):
            return Part.OPTIMIZER
        return counted.get(row["name"], Part.UNKNOWN)

    running = [(r["ts"], r["ts"] + r["dur"], part_of(r)) for r in rows if r["cat"] == "kernel"]
    spent = dict.fromkeys(Part, 0)
    for moment in range(100):
        now = {part for start, end, part in running if start <= moment < end}
        if now:
            spent[min(now, key=list(Part).index)] += 1000
    for part in (Part.MATMUL, Part.ATTENTION, Part.OPTIMIZER, Part.OTHER, Part.UNKNOWN):
        assert found.parts[part] == spent[part]
    assert found.parts[Part.EXPOSED_TP] == spent[Part.EXPOSED_TP]
    assert found.parts[Part.EXPOSED_CP] == spent[Part.EXPOSED_CP]
    # Waiting for a stage is no communication: other axes may have that moment.
    assert found.parts[Part.EXPOSED_PP] + found.parts[Part.BUBBLE] <= spent[Part.EXPOSED_PP]


def test_a_launch_that_takes_less_than_five_usual_ones_is_the_host_s_work() -> None:
    """The usual ones take 2, others take 9 and 10; the one of 11 waited for 9."""
    found = of(
        *(launch(at, at + 2, at) for at in (1, 4, 7, 10)),
        launch(20, 29, 20),
        launch(40, 51, 40),
        launch(60, 70, 60),
        kernel(GEMM, 0, 100, 1),
    )
    assert found.host == 100_000 - 9_000


def test_calls_without_a_usual_launch_all_wait_for_the_device() -> None:
    found = of(launch(10, 20, 0, "cudaMemcpyAsync"), kernel(GEMM, 0, 100, 1))
    assert found.host == 100_000 - 10_000


def test_what_only_touches_the_steps_is_no_kernel_of_theirs() -> None:
    for row in (kernel, host):
        found = of(*(row("aten::mm", at, at + 100) for at in (-100, 0, 100)))
        assert (found.num_kernels, found.median_kernel) == (1, 100_000)


def test_a_launch_as_the_optimizer_begins_is_its_own_and_one_as_it_ends_is_not() -> None:
    found = of(
        annotation("Optimizer.step#AdamW.step", 10, 20),
        launch(10, 11, 1),
        launch(20, 21, 2),
        kernel(ADD, 0, 40, 1),
        kernel(ADD, 40, 100, 2),
    )
    assert parts(found) == {"optimizer": 40, "other_kernels": 60}


def test_the_five_longest_unknown_kernels_are_named() -> None:
    found = of(*(kernel(f"mystery_{lasts}", lasts * 10, lasts * 11) for lasts in range(1, 7)))
    assert found.unknown == [(f"mystery_{lasts}", lasts * 1000) for lasts in (6, 5, 4, 3, 2)]


def test_an_unknown_operation_that_another_fills_has_no_time() -> None:
    assert of(host("mine::special", 10, 60), host("aten::mm", 10, 60)).unknown == []


def test_a_thread_may_communicate_as_long_as_the_annotation_of_its_axis() -> None:
    found = of(
        annotation("sweep::axis::tp", -40, -30),
        annotation("gloo:all_reduce", -40, -30, thread=5),
        annotation("an annotation of the user", -20, -10),
        annotation("gloo:all_reduce", -20, -10, thread=6),
        annotation("gloo:all_gather", 0, 10, thread=5),
        annotation("gloo:all_gather", 10, 30, thread=6),
    )
    assert parts(found) == {"exposed_tp": 10, "exposed_other": 20, "host_bound": 70}


@pytest.mark.parametrize(
    ("one", "other", "more"),
    [
        ("SendRecv", "SendRecv", {"Collective name": "recv"}),
        # The kernel's own name counts where none is given.
        ("SendRecv_A", "SendRecv_B", {}),
    ],
)
def test_a_message_is_compared_with_those_of_its_kind_alone(
    one: str, other: str, more: dict[str, str]
) -> None:
    sent = dict.fromkeys(more, "send")
    found = of(
        nccl(0, 10, "pp", one, **{"In msg nelems": 4, **sent}),
        nccl(20, 60, "pp", other, **{"In msg nelems": 4, **more}),
        kernel(GEMM, 60, 100),
    )
    assert parts(found) == {"matmul": 40, "exposed_pp": 50, "idle": 10}


def test_the_host_s_time_is_that_of_the_steps_wherever_they_begin() -> None:
    found = of(
        launch(41, 43, 1),
        launch(70, 90, 0, "cudaDeviceSynchronize"),
        kernel(GEMM, 40, 100, 1),
        steps=(40, 100),
    )
    assert found.host == 60_000 - 20_000
