"""The kernel of attention that a trial uses: chosen by our rule, pinned, and seen to run.

Left alone, torch would choose by its own version and cuDNN's, and fall back to the score matrix.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.core.problem.layout import Precision
from orchestrator.core.sweepfile.workload_options import AttentionKind
from orchestrator.core.trial.protocol import Device
from workloads.rank import ConfigRejected

_BACKENDS = {
    AttentionKind.CUDNN: SDPBackend.CUDNN_ATTENTION,
    AttentionKind.FLASH: SDPBackend.FLASH_ATTENTION,
    AttentionKind.FLASH3: SDPBackend.FLASH_ATTENTION,
    AttentionKind.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}
# torch's own rule has the same bounds: older versions are slower than flash, or wrong.
_FIRST_SM_OF_CUDNN = (9, 0)
_LAST_SLOW_CUDNN = 91500
_OPERATOR = "aten::_scaled_dot_product_"


def check_attention(kind: AttentionKind, device: Device, precision: Precision) -> None:
    """Raise ConfigRejected if no device of this type has the kernel."""
    if kind in (AttentionKind.AUTO, AttentionKind.EAGER):
        return
    if device is Device.CPU:
        possible = {AttentionKind.FLASH}
    elif precision is Precision.FP32:
        possible = {AttentionKind.EFFICIENT}
    else:
        possible = set(_BACKENDS)
    if kind not in possible:
        names = ", ".join(sorted({*possible, AttentionKind.AUTO, AttentionKind.EAGER}))
        raise ConfigRejected(
            f"workload.options.attention: {kind} does not exist for {precision} on {device}; "
            f"possible are {names}"
        )


def choose_attention(
    kind: AttentionKind, device: torch.device, precision: Precision
) -> AttentionKind:
    """Return the kind that `auto` means here; make FlashAttention 3 torch's flash if asked for.

    Raises ConfigRejected where FlashAttention 3 is not installed.
    """
    if kind is AttentionKind.FLASH3:
        _activate_flash3()
    if kind is not AttentionKind.AUTO:
        return kind
    if device.type != "cuda":
        return AttentionKind.FLASH
    if precision is Precision.FP32:
        return AttentionKind.EFFICIENT
    cudnn = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    is_new = torch.cuda.get_device_capability(device) >= _FIRST_SM_OF_CUDNN
    return AttentionKind.CUDNN if is_new and cudnn > _LAST_SLOW_CUDNN else AttentionKind.FLASH


def pinned(kind: AttentionKind) -> AbstractContextManager[object]:
    """Let torch use this kernel alone: it raises an error rather than take another."""
    return nullcontext() if kind is AttentionKind.EAGER else sdpa_kernel([_BACKENDS[kind]])


class SeenKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """The kernels of attention that run while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith(_OPERATOR):
            self._names.add(func.name().removeprefix(_OPERATOR))
        return func(*args, **(kwargs or {}))

    def summary(self, kind: AttentionKind) -> str:
        """Return the kernels that ran: `cudnn_attention`, `flash_attention_for_cpu`, ...

        It is `eager` if none of them ran.
        """
        version = " (FlashAttention 3)" if kind is AttentionKind.FLASH3 else ""
        return ", ".join(f"{name}{version}" for name in sorted(self._names)) or "eager"


def _activate_flash3() -> None:
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    try:
        if activate is None:
            raise ValueError(f"torch {torch.__version__} cannot use it")
        activate("FA3")
    except (ImportError, ValueError, RuntimeError) as exc:
        raise ConfigRejected(
            f"workload.options.attention: flash3 needs FlashAttention 3 on this node: {exc}"
        ) from exc
