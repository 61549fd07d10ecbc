"""The environment variables by which ranks are told how to communicate: which reach every node, which are kept with an attempt, and
which of those make numbers incomparable. Names are allow-listed by their beginnings; what looks like a secret is none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from orchestrator.core.trial.rank_environment import holds_secret

# NCCL and its network plugins, gloo, UCX, libfabric, verbs, torch's own switches for them, and its allocator.
RECORDED = (
    "NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",
    "OFI_NCCL_",
    "NVSHMEM_",
    "IBV_",
    "MLX5_",
    "RDMAV_",
    "TORCH_NCCL_",
    "TORCH_GLOO_",
    "TORCH_DISTRIBUTED_",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
# A node of a cluster does not have the orchestrator's environment: these are handed to it, and win over its own.
# Hugging Face's each by its name: HF_TOKEN is a secret, for `env_from` to hand over.
PASSED = (
    *RECORDED,
    "TORCH_",
    "PYTORCH_",
    "OMP_NUM_THREADS",
    "MKL_",
    "CUDA_DEVICE_ORDER",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_CACHE",
    "HF_DATASETS_OFFLINE",
    "HF_ENDPOINT",
)
SAID = ("NCCL_DEBUG",)  # what a library says, not what it does
MAX_CHARACTERS = 500  # of a value that is kept


def passed(environment: Mapping[str, str]) -> dict[str, str]:
    """What the nodes of a cluster are told of the orchestrator's environment."""
    return _beginning(PASSED, environment)


def recorded(environment: Mapping[str, str], *, without: Collection[str] = ()) -> dict[str, str]:
    """What is kept of a rank's environment, `without` the names that a sweep file hands over as secrets."""
    kept = _beginning(RECORDED, environment)
    return {
        name: _readable(value)[:MAX_CHARACTERS]
        for name, value in sorted(kept.items())
        if name not in without
    }


def counted(environment: Mapping[str, str], *, chosen: Collection[str]) -> dict[str, str]:
    """Those of the recorded settings that make numbers incomparable: none that was `chosen` here, or is only about what is printed."""
    return {
        name: value
        for name, value in environment.items()
        if name not in chosen and not name.startswith(SAID)
    }


def over_nodes(
    environments: Mapping[str, Mapping[str, str]],
) -> dict[str, str | dict[str, str | None]]:
    """The environments of an attempt's nodes as one: name to value, or to the value on each node where they differ."""
    names = sorted({name for environment in environments.values() for name in environment})
    told: dict[str, str | dict[str, str | None]] = {}
    for name in names:
        values = {node: environment.get(name) for node, environment in environments.items()}
        first = next(iter(values.values()))
        told[name] = first if first is not None and set(values.values()) == {first} else values
    return told


def _beginning(prefixes: tuple[str, ...], environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(prefixes) and not holds_secret(name, value)
    }


def _readable(value: str) -> str:
    """As text that a database takes: Python stands surrogates for bytes of an environment that are not UTF-8."""
    return value.encode(errors="surrogateescape").decode(errors="backslashreplace")
