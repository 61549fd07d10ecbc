"""Suggests changes from a profile: a few lines, each from one rule with a measured condition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.rank_profile import RankProfile
from orchestrator.core.trial.trace_split import AttentionKernel, Part

MOST_LINES = 3
# The host needs nearly as long to launch a step's kernels as the device to run them.
HOST_BOUND_RATIO = 0.9
# The device must have waited for it, too: what merely comes close costs nothing yet.
HOST_BOUND_SHARE = 0.05
EXPOSED_DP_SHARE = 0.10
BUBBLE_SHARE = 0.20
OPTIMIZER_SHARE = 0.10
# A launch costs the host about 5 us: kernels of this length keep it busy all the time.
TINY_KERNEL_NANOSECONDS = 10_000
TINY_KERNELS_SHARE = 0.20


@dataclass(frozen=True, kw_only=True)
class Advice:
    # The share of the step that is at stake, 0 to 1.
    share: float
    text: str


_Rule = Callable[[RankProfile, Layout], Advice | None]


def advice(profile: RankProfile, layout: Layout) -> list[str]:
    """Return at most three lines, first where most of the step is at stake."""
    found = [rule(profile, layout) for rule in RULES]
    given = sorted((one for one in found if one is not None), key=lambda one: -one.share)
    return [one.text for one in given[:MOST_LINES]]


def _unfused_attention(profile: RankProfile, _: Layout) -> Advice | None:
    if profile.attention not in (AttentionKernel.MATH, AttentionKernel.EAGER):
        return None
    how = {
        AttentionKernel.MATH: "torch's math fallback computes attention",
        AttentionKernel.EAGER: "attention is computed by single products and a softmax",
    }[profile.attention]
    return Advice(
        share=1.0,
        text=f"{how}, with the whole score matrix in memory: use a fused kernel (`attention: auto`,"
        " or scaled_dot_product_attention without a dense mask)",
    )


def _host_bound(profile: RankProfile, _: Layout) -> Advice | None:
    host, device = profile.host_nanoseconds, profile.computing_nanoseconds
    share = profile.share(Part.HOST_BOUND)
    if host is None or host <= HOST_BOUND_RATIO * device or share <= HOST_BOUND_SHARE:
        return None
    fix = "a larger micro-batch" if profile.is_compiled else "compile, or a larger micro-batch"
    return Advice(
        share=share,
        text=f"host-bound: the device waited {share:.0%} of the step for launches; try {fix}",
    )


def _exposed_data_parallelism(profile: RankProfile, _: Layout) -> Advice | None:
    share = profile.share(Part.EXPOSED_DP)
    if share <= EXPOSED_DP_SHARE:
        return None
    return Advice(
        share=share,
        text=f"{share:.0%} of the step is exposed communication of data parallelism: accumulate"
        " more micro-batches per step, reduce in bf16 (`reduce_dtype`), or use larger buckets"
        " (`bucket_megabytes`)",
    )


def _bubble(profile: RankProfile, layout: Layout) -> Advice | None:
    share = profile.share(Part.BUBBLE)
    if share <= BUBBLE_SHARE or layout.pipeline_parallel_size == 1:
        return None
    return Advice(
        share=share,
        text=f"{share:.0%} of the step is the pipeline's bubble: more micro-batches per step"
        f" (now {layout.grad_accum_steps}), or an interleaved schedule",
    )


def _optimizer(profile: RankProfile, layout: Layout) -> Advice | None:
    share = profile.share(Part.OPTIMIZER)
    if share <= OPTIMIZER_SHARE or layout.data_parallel_size == 1 or layout.zero_stage > 0:
        return None
    return Advice(
        share=share,
        text=f"the optimizer takes {share:.0%} of the step on each of"
        f" {layout.data_parallel_size} replicas: ZeRO 1 divides it among them",
    )


def _tiny_kernels(profile: RankProfile, _: Layout) -> Advice | None:
    median, share = profile.median_kernel_nanoseconds, profile.share(Part.OTHER)
    if profile.is_compiled or not profile.is_on_device or median is None:
        return None
    if median >= TINY_KERNEL_NANOSECONDS or share <= TINY_KERNELS_SHARE:
        return None
    return Advice(
        share=share,
        text=f"{profile.num_kernels // profile.num_steps:,} kernels a step, half of them shorter"
        f" than {median / 1000:.1f} us, and {share:.0%} of the step is neither products nor"
        " attention: compile fuses them",
    )


RULES: Sequence[_Rule] = (
    _unfused_attention,
    _host_bound,
    _exposed_data_parallelism,
    _bubble,
    _optimizer,
    _tiny_kernels,
)
