"""Names of kernels as published traces and libraries have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import pytest

from orchestrator.core.trial.kernel_names import (
    Axis,
    Work,
    axis_of_group,
    is_communication,
    work_of_kernel,
    work_of_operation,
)

_T = TypeVar("_T")

KERNELS: dict[Work, list[str]] = {
    Work.MATMUL: [
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3"
        "_nn_align8>",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, float>",
        "triton_tem_fused_mm_0",
    ],
    Work.ATTENTION: [
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Params)",
    ],
    Work.OTHER: [
        "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(lambda"
        "(float)#1)>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps<float>>>",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3",
        "triton_poi_fused__scaled_dot_product_cudnn_attention_clone_5",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMeta"
        "data<1>, at::native::(anonymous namespace)::LpNormFunctor<float, NormType::L2>>",
    ],
    Work.OPTIMIZER: [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizer"
        "TensorListMetadata<4>, FusedAdamMathFunctor<float, 4, ADAM_MODE::ADAMW, false>>",
    ],
    Work.UNKNOWN: [
        "my_company_secret_sauce",
    ],
}
OPERATIONS: dict[Work | None, list[str]] = {
    Work.MATMUL: [
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_mm",
    ],
    Work.ATTENTION: [
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "flash_attn::_flash_attn_forward",
    ],
    Work.OTHER: [
        "aten::mul",
        "aten::copy_",
        "aten::_log_softmax",
        "aten::_foreach_norm",
        "graph_0_cpp_fused_add_mul_1",
        "torch::distributed::reducer::mul_out",
    ],
    Work.OPTIMIZER: [
        "aten::_fused_adamw_",
    ],
    Work.UNKNOWN: [
        "mine::thing",
    ],
    None: [
        "aten::view",
        "aten::empty_strided",
        "aten::to",
        "autograd::engine::evaluate_function: MmBackward0",
        "_RMSNormFunctionBackward",
        "c10d::allreduce_",
    ],
}
GROUPS: dict[Axis | None, list[str]] = {
    Axis.DP: [
        "mesh_dp",
        "mesh_dp_cp",
        "mesh_dp_shard_cp",
        "mesh_fsdp",
        "DATA_PARALLEL_GROUP_WITH_CP",
    ],
    Axis.TP: [
        "mesh_tp",
        "TENSOR_MODEL_PARALLEL_GROUP",
    ],
    Axis.PP: [
        "mesh_pp",
        "PIPELINE_MODEL_PARALLEL_GROUP",
    ],
    Axis.CP: [
        "mesh_cp",
        "CONTEXT_PARALLEL_GROUP",
    ],
    None: [
        "default_pg",
        "undefined",
    ],
}


def _pairs(table: Mapping[_T, Sequence[str]]) -> list[tuple[str, _T]]:
    return [(name, kind) for kind, names in table.items() for name in names]


@pytest.mark.parametrize(("name", "work"), _pairs(KERNELS))
def test_a_kernel_is_known_by_its_name(name: str, work: Work) -> None:
    assert work_of_kernel(name) is work


@pytest.mark.parametrize(("name", "work"), _pairs(OPERATIONS))
def test_an_operation_is_known_by_its_name(name: str, work: Work | None) -> None:
    assert work_of_operation(name) is work


@pytest.mark.parametrize(("description", "axis"), _pairs(GROUPS))
def test_a_process_group_is_known_by_its_description(description: str, axis: Axis | None) -> None:
    assert axis_of_group(description) is axis


def test_collectives_are_no_computation() -> None:
    assert is_communication("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)")
    assert is_communication("gloo:all_reduce")
    assert not is_communication("aten::mm")
