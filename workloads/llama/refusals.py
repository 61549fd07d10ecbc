"""Checks whether a rank can run its request with workload llama, before anything is built."""

from __future__ import annotations

from orchestrator.core.problem.layout import Precision
from orchestrator.core.sweepfile.capabilities import CAPABILITIES
from orchestrator.core.sweepfile.llama_rules import refusal as llama_refusal
from orchestrator.core.sweepfile.workload_options import LlamaOptions
from orchestrator.core.trial.protocol import Device, TrialRequest
from workloads.llama.attention_kernel import check_attention
from workloads.options import parse_options
from workloads.rank import ConfigRejected


def check(request: TrialRequest) -> LlamaOptions:
    """Return the options. Raises ConfigRejected, with the field and what is possible."""
    refusal = CAPABILITIES["llama"].refusal(request.layout)
    if refusal is not None:
        raise ConfigRejected(f"workload llama cannot run {request.layout.key}: {refusal}")
    options = parse_options(LlamaOptions, request.options)
    check_attention(options.attention, request.device, request.layout.precision)
    refusal = llama_refusal(
        request.layout,
        model=request.model,
        sequence_length=request.sequence_length,
        options=options,
    )
    if refusal is not None:
        raise ConfigRejected(f"workload llama cannot run {request.layout.key}: {refusal}")
    _check_fp8(request, options)
    if options.memory_limit_bytes is not None and request.device is not Device.CPU:
        raise ConfigRejected(
            "workload.options: memory_limit_bytes is for device cpu; a GPU has a limit of its own"
        )
    return options


def _check_fp8(request: TrialRequest, options: LlamaOptions) -> None:
    if request.layout.precision is not Precision.FP8:
        return
    if request.device is Device.CPU:
        raise ConfigRejected("precision fp8 needs a GPU; a CPU has no fp8 products")
    if options.compile is False:
        raise ConfigRejected(
            "workload.options.compile: false with precision fp8 would time the conversions of each "
            "product, which compiling fuses"
        )
