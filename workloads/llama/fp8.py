"""Matrix products in fp8 by torchao, an optional package: weights and activations stay bf16."""

from __future__ import annotations

import torch

from workloads.llama.model import Llama
from workloads.rank import ConfigRejected

# The first GPUs with tensor cores for fp8.
_FIRST_SM = (8, 9)


def check_fp8(device: torch.device) -> None:
    """Raise ConfigRejected if a GPU has no fp8 products."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_SM:
        raise ConfigRejected(
            f"precision fp8 needs a GPU with SM {'.'.join(map(str, _FIRST_SM))} or newer; "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}"
        )


def use_fp8_products(model: Llama, *, emulated: bool = False) -> None:
    """Make the products of all layers fp8, scaled by tensor; the head keeps bf16.

    `emulated`: round factors to fp8, and multiply them in another precision, on any device. Raises
    ConfigRejected without torchao.
    """
    try:
        # An optional package, and slow to import.
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as exc:
        raise ConfigRejected(
            "precision fp8 needs torchao in the Python of the ranks: "
            f"pip install '.[fp8]' in the cloned folder ({exc})"
        ) from exc
    convert_to_float8_training(model.layers, config=Float8LinearConfig(emulate=emulated))
