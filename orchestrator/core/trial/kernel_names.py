"""Finds the kind of work of a kernel or operation, and the axis of a process group, by names.

The tables know the names of torch, cuBLAS, CUTLASS, cuDNN, FlashAttention, Transformer Engine,
Triton and NCCL, and on CPUs those of aten and gloo. A name that no table has is unknown, and is
reported as such.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum


class Work(StrEnum):
    """The kinds of computation."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    OPTIMIZER = "optimizer"
    OTHER = "other_kernels"
    UNKNOWN = "unknown"


class Axis(StrEnum):
    """The axes of a layout that communicate."""

    DP = "dp"
    TP = "tp"
    PP = "pp"
    CP = "cp"
    # No single axis, or it is unknown which.
    OTHER = "other"


_Table = Sequence[tuple[Work, re.Pattern[str]]]


def _table(*rows: tuple[Work, str]) -> _Table:
    return tuple((work, re.compile(pattern, re.IGNORECASE)) for work, pattern in rows)


# Names of kernels on a device. The first that matches counts.
KERNELS: _Table = _table(
    # Inductor names these after all that it has fused into them.
    (Work.OTHER, r"^triton_(poi|red|per|for)_"),
    (Work.ATTENTION, r"flash|fmha|sdpa|\bmha_|attention|attn"),
    # Foreach kernels are recognised by their functor: other uses, such as norms, have others.
    (Work.OPTIMIZER, r"adam|lambstage|\blamb_|fused_?sgd|\bsgd|\blion_|\bmuon|adagrad|optimizer"),
    (
        Work.MATMUL,
        r"gemm|gemv|nvjet|xmma|cutlass|cublas|splitk|wgrad|dgrad|\bmatmul|_mm_|_mm$|\bdot_"
        r"|triton_mm|Cijk_",
    ),
    (
        Work.OTHER,
        r"elementwise|vectorized|reduce|norm|softmax|copy|memcpy|memset|fill|index|embedding"
        r"|gather|scatter|concat|\bcat|nll_loss|cross_entropy|sort|scan|triton|at::native|at_cuda"
        r"|multi_tensor_apply|rotary|rope|swiglu|silu|gelu|relu|dropout|transpose|permute|cast"
        r"|quantize|distribution|arange|unrolled|cub::|thrust|radix|activation|bias|amax|scale"
        r"|nvte|split_|pad_|unique|mask|where",
    ),
)

# Names of operations on a CPU.
OPERATIONS: _Table = _table(
    (Work.ATTENTION, r"scaled_dot_product|flash_attn|flash_attention|efficient_attention"),
    (Work.OPTIMIZER, r"_fused_(adam|adamw|sgd|adagrad)_"),
    (
        Work.MATMUL,
        r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|linear_backward|einsum|_scaled_mm|addmv|mv"
        r"|dot|vdot|outer|_int_mm|_grouped_mm|_addmm_activation)_?$"
        r"|mkldnn_linear|mkl_linear|packed_linear|_cpp_bmm|micro_gemm|cpp_gemm",
    ),
    (
        Work.OTHER,
        r"^aten::|_cpp_fused|^torch(::|\.)distributed|^torchao::|^quantized::|^prims::",
    ),
)

# Operations that compute nothing: views, allocations, dispatch, nodes of autograd, and calls that
# hand work to a process group. Their own time is the host's.
_HOST_OPERATIONS = re.compile(
    r"^aten::(view|_unsafe_view|reshape|_reshape_alias|as_strided_?|t_?|transpose_?|permute|expand"
    r"|expand_as|select|slice|narrow|split|split_with_sizes|chunk|unbind|squeeze_?|unsqueeze_?"
    r"|flatten|unflatten|alias|detach_?|empty\w*|new_empty\w*|to|_to_copy|contiguous|item"
    r"|_local_scalar_dense|result_type|resolve_conj|resolve_neg|lift_fresh|is_nonzero|set_|resize_"
    r"|resize_as_|unfold|movedim|view_as|view_as_real|view_as_complex|real|imag|diagonal|conj"
    r"|_conj|broadcast_tensors|numpy_T|mT|type_as|stride|size|can_cast|zeros|ones|zeros_like"
    r"|ones_like|full|full_like|data|requires_grad_|record_stream|_has_compatible_\w+)$"
    r"|^autograd::|^torch::autograd|^c10d::|^c10d_functional::|^_c10d_functional::"
    r"|^record_param_comms|^fsdp::|^FSDP::|^## |^TorchDynamo|^Torch-Compiled|^inductor::"
    # Python's identifiers: functions of autograd, and what programs name themselves.
    r"|^[A-Za-z_][A-Za-z0-9_. -]*$"
)

# Collectives: kernels of NCCL and RCCL, of symmetric memory, and what gloo annotates.
_COMMUNICATION = re.compile(
    r"nccl|rccl|nvshmem|symm_mem|multimem_|one_shot_all_reduce|two_shot_all_reduce|^gloo:"
    r"|userbuffers|\bub_|deep_ep",
    re.IGNORECASE,
)
_POINT_TO_POINT = re.compile(r"send|recv|batch_isend_irecv", re.IGNORECASE)

# Descriptions of process groups: of torch's meshes, torchtitan, Megatron-LM and DeepSpeed. First
# come those that name several axes: the axes of data parallelism take others in.
_GROUPS: Sequence[tuple[Axis, re.Pattern[str]]] = tuple(
    (axis, re.compile(pattern, re.IGNORECASE))
    for axis, pattern in (
        (Axis.DP, r"(^|_)(dp|fsdp|hsdp|ddp)|data_parallel|replicate|shard"),
        (Axis.TP, r"(^|_)tp($|_)|tensor"),
        (Axis.PP, r"(^|_)pp($|_)|pipeline"),
        (Axis.CP, r"(^|_)(cp|sp|ulysses)($|_)|context|sequence"),
    )
)
# The group of all ranks.
WORLD_GROUPS = frozenset({"default_pg", "default", ""})

# How attention is computed if no fused kernel does it, by operations.
_MATH_ATTENTION = re.compile(r"_scaled_dot_product_attention_math")
_FUSED_ATTENTION = re.compile(
    r"_scaled_dot_product_(\w*flash|efficient|cudnn|fused)\w*|flash_attn|flex_attention|fmha"
)

# What torch.compile makes: kernels of Triton or C++, and regions around them.
_COMPILED = re.compile(
    r"^triton_(poi|red|per|for|tem)_|_cpp_fused|^Torch-Compiled Region|^Compiled"
)

# Why the device waited for the host: the host waited for the device, so it had nothing to launch.
SYNCHRONISING = re.compile(r"Synchronize|cudaMemcpy$|cuMemcpy|hipMemcpy$")


def is_communication(name: str) -> bool:
    return _COMMUNICATION.search(name) is not None


def is_point_to_point(name: str) -> bool:
    return _POINT_TO_POINT.search(name) is not None


def work_of_kernel(name: str) -> Work:
    """Return the kind of work of a kernel on a device."""
    return _first(KERNELS, name)


def work_of_operation(name: str) -> Work | None:
    """Return the kind of work of an operation on a CPU. None: it computes nothing."""
    if _HOST_OPERATIONS.search(name) is not None and "_fused_" not in name:
        return None
    return _first(OPERATIONS, name)


def axis_of_group(description: str) -> Axis | None:
    """Return the axis that a process group serves. None: its description does not show it."""
    if description.lower() in WORLD_GROUPS:
        return None
    return next((axis for axis, pattern in _GROUPS if pattern.search(description)), None)


def is_math_attention(operation: str) -> bool:
    return _MATH_ATTENTION.search(operation) is not None


def is_fused_attention(operation: str) -> bool:
    return _FUSED_ATTENTION.search(operation) is not None


def is_compiled(name: str) -> bool:
    """Return whether a kernel or region of this name comes from torch.compile."""
    return _COMPILED.search(name) is not None


def _first(table: _Table, name: str) -> Work:
    return next((work for work, pattern in table if pattern.search(name)), Work.UNKNOWN)
