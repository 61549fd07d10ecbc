"""Properties of a training program in the arithmetic of memory: not of the model or the GPU.

Named trainers are starting points, taken from how these programs are built; your own trials correct
them (core/physics/calibration_fit.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from orchestrator.core.physics.traced_memory import TracedMemory
from orchestrator.core.problem.layout import Precision

GIB = 1 << 30
# For a loss that is computed with the head, in chunks.
FUSED_LOGIT_BYTES = 1.0
# What a calibration fits: factors, then amounts. And those that a micro-batch depends on.
MEMORY_CONSTANTS = (
    "activation_factor",
    "pipeline_activation_factor",
    "logit_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "gathered_inputs",
    "gathered_inputs_in_pipeline",
    "reserve_bytes",
)
# The share of the memory limit that a peak may fill. At 97 % published runs ended, and from 94 % on
# their allocators thrashed, at a fifth of the speed.
USABLE_SHARE = 0.955
MICRO_BATCH_CONSTANTS = ("logit_bytes", "gathered_inputs", "gathered_inputs_in_pipeline")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """The defaults are `workloads/llama`: 16 bytes per weight, and no additions of an allocator."""

    parameter_bytes: float = 2.0
    """Per weight in mixed precision: 2 in bf16, with the fp32 master in the optimizer; 4 if weights
    are fp32 and rounded at each use."""
    gradient_bytes: float = 2.0
    """Per weight in mixed precision: 2 kept in bf16; 4 in fp32 only; 6 if bf16 gradients are added
    to an fp32 copy."""
    bucket_bytes: float = 0.0
    """Per weight, what all-reduce buckets hold in addition to gradients if every rank keeps all of
    these (ZeRO 0, more than one rank)."""
    optimizer_bytes: float = 12.0
    """Per weight in mixed precision: fp32 master and the two moments of Adam."""
    stepping_bytes: float = 0.0
    """Per weight that a rank owns, while the optimizer steps and no activation is alive: copies of
    an update made for all at once."""
    eager_attention: bool = False
    """True if the scores of attention, the square of the sequence length, are kept."""
    repeats_keys: tuple[Precision, ...] = ()
    """Precisions in which fused attention gets a head of keys and values for each head of queries,
    and keeps them all: its kernel has no groups."""
    sequence_parallel: bool = True
    """True if tensor parallelism also splits what is between its products: norms and residuals."""
    gathered_inputs: float = 1.0
    """Share of the gathered inputs of column-parallel products that every rank keeps whole; 0:
    gathered again."""
    gathered_inputs_in_pipeline: float = 1.0
    """The same with p pipeline stages, times 1 - 2/p: gathered again or not, buffers of that size
    leave holes between micro-batches."""
    activation_factor: float = 1.0
    """On what layers keep for the backward pass: blocks that an allocator can't fill."""
    pipeline_activation_factor: float = 1.0
    """The same if micro-batches in flight interleave, and leave more holes."""
    stages_by_work: bool = False
    """True if pipeline stages are balanced with the head's work: the first hold more layers."""
    logit_bytes: float = 12.0
    """Per logit at the loss: in fp32, its exponential, its gradient; 6 in bf16, less in chunks."""
    accumulated_logits: float = 0.0
    """Additional share of those bytes if a step has several micro-batches: blocks of the previous
    micro-batch that the next one can't reuse."""
    gathered_units: float = 2.0
    """Units (a layer, or the embedding) whose weights are gathered at once under ZeRO 3: the one in
    use and the next."""
    reserve_bytes: float = 0.0
    """Held in addition by every layout: buffers of an allocator and a communication library."""
    fully_shards: bool = False
    """True if ZeRO 1 to 3 shard fp32 weights (torch's fully_shard): the shards are the masters, and
    what computes are copies, gathered for it. Its collectives overlap with computing."""
    replicas: int = 1
    """Groups of ranks that each hold all shards: between them, gradients are summed up."""
    scatters_each: bool = True
    """True if gradients are reduced after each micro-batch; false: after the last of a step, and
    until then each rank holds them whole."""
    reduce_bytes: float = 0.0
    """Bytes in which a gradient is reduced, at least those of its element."""
    copied_reductions: float = 0.0
    """Copies of what it reduces that the communication library makes: 1 with gloo, on CPUs."""
    reduction_bucket_bytes: float = 25.0 * (1 << 20)
    """Gradients are reduced in buckets of this size, each a collective with its own latency. The
    default is that of torch's DistributedDataParallel; programs with larger buckets show a smaller
    latency."""
    frees_gradients: bool = False
    """True if a step of one micro-batch makes its gradients in the backward pass and frees them
    after the optimizer's step."""
    loss_chunks: int = 0
    """Parts of a micro-batch, at most, whose loss is computed in turn, forward and backward, so
    that the logits of one are alive at once (core/problem/loss_chunks.py); 0: as a whole."""
    pipeline_buffers: bool = False
    """True if a pipeline stage keeps a buffer for what it receives of each micro-batch."""
    gathers_context: bool = False
    """True if context parallelism gathers keys and values once, and scatters their gradients;
    false: they go round a ring."""
    has_masks: bool = False
    """True if attention over pieces of a sequence keeps its masks, as on CPUs."""
    compiled: bool = False
    """True if each layer is compiled: fused kernels keep and move less."""
    keeps_recomputed_products: bool = False
    """True if a layer that is recomputed as a whole keeps its product of queries, keys and values
    nevertheless."""
    launch_share: float = 1.0
    """Share of a layer's kernels in plain torch that are launched."""
    traffic_share: float = 1.0
    """Factor on `activation_traffic_bytes`: less than 1 for fused kernels, more where plain torch
    is known to move more."""
    half_efficiency_share: float = 1.0
    """Factor on `half_efficiency_seconds`: less than 1 where small products are known to be
    fast."""
    host_share: float = 0.0
    """The host's time for a layer, over that of workload llama in plain torch; 0: it is not known,
    and does not count."""
    counted: bool = False
    """True if its ranks were seen to count as much memory as the formulas say, within 2 % but for
    few layouts (workload llama)."""
    usable_share: float = USABLE_SHARE
    """Share of the memory limit that a peak may fill."""
    traced: TracedMemory | None = None
    """What layers, head and loss hold, by a trace; None: the closed forms of a Llama."""


_NANOTRON = Trainer(
    gradient_bytes=6.0,
    bucket_bytes=1.0,
    activation_factor=1.05,
    pipeline_activation_factor=1.2,
    stages_by_work=True,
    logit_bytes=1.05 * 10.0,
    accumulated_logits=0.2,
    reserve_bytes=0.25 * GIB,
)

# Names that a sweep file may use. Bytes per weight: 16, 20 (21 with buckets), 20, 18, 16, 8 (10 in
# the step).
TRAINERS: Mapping[str, Trainer] = MappingProxyType(
    {
        "llama": Trainer(),
        # bf16 gradients are added to an fp32 copy; DDP's buckets come on top without ZeRO; stages
        # are balanced by work; what the allocator reserves is measured, and a pipeline's
        # interleaved micro-batches leave it more holes; with accumulation, one more block of bf16
        # logits (10 + 2 bytes). Gathers again in the backward.
        "nanotron": replace(_NANOTRON, gathered_inputs=0.0, gathered_inputs_in_pipeline=0.7),
        # Before it gathered again: what was gathered is kept, except in pipelines.
        "nanotron-early": replace(_NANOTRON, gathered_inputs=1.0, gathered_inputs_in_pipeline=0.0),
        "megatron": Trainer(
            gradient_bytes=4.0,
            gathered_inputs=0.0,
            gathered_inputs_in_pipeline=0.0,
            reserve_bytes=1.0 * GIB,
        ),
        # Fully sharded: buffers of gathers and reductions are in the pools of other streams
        # (ESTIMATORS: 8-10 GiB for 8B).
        "fsdp": Trainer(gathered_units=3.0, reserve_bytes=2.0 * GIB),
        # Fine-tuning programs that load weights in bf16 and keep all their states in it; their
        # AdamW updates all weights at once.
        "bf16-states": Trainer(
            optimizer_bytes=4.0, stepping_bytes=2.0, logit_bytes=8.0, gathered_units=3.0
        ),
    }
)


# Kernels of attention that keep its scores. Megatron's own fuses only the softmax; torch's is
# meant where a kernel of another package is the alternative.
_EAGER_PARTS = ("eager", "naive", "math", "unfused", "fused_softmax")
_EAGER_WORDS = frozenset({"torch", "megatron", "native", "vanilla", "standard"})


def keeps_scores(kernel: str) -> bool:
    """Return whether an attention kernel of this name keeps the scores. Unknown ones do not."""
    word = kernel.lower()
    return word in _EAGER_WORDS or any(part in word for part in _EAGER_PARTS)


def with_options(trainer: Trainer, options: Mapping[str, object]) -> Trainer:
    """Return a trainer with what everybody knows of the words of its options that vary.

    That is attention alone: a search has to find out what other words do.
    """
    kernels = [
        str(value)
        for name, value in options.items()
        if "attention" in name.lower() or "attn" in name.lower()
    ]
    if not any(map(keeps_scores, kernels)):
        return trainer
    return replace(trainer, eager_attention=True)


# What compiled layers launch and move, over the constants of step time: kernels and the host's time
# for them, and the bytes of elementwise kernels.
COMPILED_LAUNCHES, COMPILED_TRAFFIC = 0.3, 0.4
# Factor on `activation_traffic_bytes` for workload llama's layers on GPUs if they are not compiled.
# SwiGLU alone moves 112 bytes per element in the 1B: 14 reads and writes of 2 bytes, 4 times as
# wide. On an H200 eager steps of the 1B are predicted up to 12 % too short with 60 bytes, and
# within 7 % with 240 (benchmarks/results/gpu.md).
EAGER_TRAFFIC = 4.0
# Workspaces of cuBLAS and cuBLASLt, 32 MiB each on GPUs of SM 9.0 (torch's notes on CUDA). On an
# H200, 64.1 to 66.4 MiB more than the formulas count without them were measured, in all but four
# layouts (benchmarks/results/gpu.md). Older GPUs have smaller workspaces.
WORKSPACE_BYTES = 64.0 * (1 << 20)
# The usable share with expandable segments, which ranks on GPUs get: fragments take nearly nothing.
# A layout whose peak was 98.9 % of an H200 ran at full speed, and 0.75 GiB of the device, which are
# 1 % of 80 GiB, were not the allocator's (benchmarks/results/gpu.md). NCCL is assumed to need as
# much.
EXPANDABLE_SHARE = 0.98


# Small products of workload llama are faster than those in published tables of other trainers,
# which gave the 60 us of `half_efficiency_seconds`. On an H200 the steps of the 1B with one
# sequence in a micro-batch are predicted 5 % too short to 9 % too long with 15 us; they were 13 to
# 40 % too long with 60 us and less traffic (benchmarks/results/gpu.md). No other GPU was measured.
HALF_EFFICIENCY_SHARE = 0.25


def llama_trainer(options: Mapping[str, object], *, on_gpu: bool) -> Trainer:
    """Return the trainer of workload llama with these options.

    `on_gpu`: layers are compiled unless the options say otherwise.
    """
    told = options.get("compile")
    compiled = on_gpu if told is None else bool(told)
    chunks = int(str(options.get("loss") or "whole").partition(":")[2] or 0)
    bucket = options.get("bucket_megabytes") or (200 if on_gpu else 25)
    return Trainer(
        gradient_bytes=6.0 if options.get("gradient_dtype") == "fp32" else 2.0,
        eager_attention=options.get("attention") == "eager",
        repeats_keys=_repeats_keys(options.get("attention"), on_gpu=on_gpu),
        fully_shards=True,
        replicas=int(str(options.get("replicas") or 1)),
        scatters_each=options.get("accumulate") != "last",
        reduce_bytes=2.0 if options.get("reduce_dtype") == "bf16" else 4.0,
        copied_reductions=0.0 if on_gpu else 1.0,
        reduction_bucket_bytes=float(str(bucket)) * (1 << 20),
        frees_gradients=True,
        reserve_bytes=WORKSPACE_BYTES if on_gpu else 0.0,
        loss_chunks=chunks,
        # A chunk holds the logits and their log-softmax, both in fp32.
        logit_bytes=8.0 if chunks else 12.0,
        pipeline_buffers=True,
        gathers_context=True,
        has_masks=not on_gpu,
        compiled=compiled,
        # So did torch 2.11 on an H200, in bf16 with fused attention: the 1B with 3 and 6 GiB, the
        # 8B with 1.5 and 4.5 GiB (benchmarks/results/gpu.md). On a CPU torch 2.13 keeps only the
        # layer's input.
        keeps_recomputed_products=compiled and on_gpu,
        launch_share=COMPILED_LAUNCHES if compiled else 1.0,
        traffic_share=COMPILED_TRAFFIC if compiled else EAGER_TRAFFIC if on_gpu else 1.0,
        half_efficiency_share=HALF_EFFICIENCY_SHARE if on_gpu else 1.0,
        host_share=COMPILED_LAUNCHES if compiled else 1.0,
        counted=True,
        # On CPUs a layout fails when its tensors exceed the limit: nothing else counts.
        usable_share=EXPANDABLE_SHARE if on_gpu else 1.0,
    )


def _repeats_keys(attention: object, *, on_gpu: bool) -> tuple[Precision, ...]:
    """Return the precisions in which workload llama uses torch's efficient kernel.

    The kernel needs a head of keys and values for each head of queries.
    """
    if attention == "efficient":
        return tuple(Precision)
    # On GPUs `auto` chooses it in fp32, which no other fused kernel has.
    return (Precision.FP32,) if on_gpu else ()


def profile_of_words(words: Mapping[str, str]) -> str:
    """Return the named trainer that the words of a run mean.

    The version of the program is not used: it is not known before a search.
    """
    sharding, kernel = words.get("sharding", "").lower(), words.get("attention_kernel", "").lower()
    if "fp32 grad" in words.get("precision", ""):
        return "nanotron"
    if words.get("peft") == "full-ft":
        return "bf16-states"
    if "fsdp" in sharding or "full_shard" in sharding:
        return "fsdp"
    if "megatron" in sharding or "megatron" in kernel or "distopt" in sharding:
        return "megatron"
    return "llama"


def trainer_of_words(words: Mapping[str, str]) -> Trainer:
    """Return the trainer that a table of runs describes in words.

    The words are columns of core/pretend/run_table.py. It is `workloads/llama` for what they do not
    describe.
    """
    name = profile_of_words(words)
    if name == "nanotron" and words.get("code_version", "").startswith("pre"):
        name = "nanotron-early"
    eager = keeps_scores(words.get("attention_kernel", ""))
    fused_loss = any("liger" in word.lower() for word in words.values())
    return replace(
        TRAINERS[name],
        eager_attention=eager,
        sequence_parallel=words.get("sequence_parallel", "").lower() != "false",
        logit_bytes=FUSED_LOGIT_BYTES if fused_loss else TRAINERS[name].logit_bytes,
    )
