"""Selects the environment variables that tell ranks how to communicate.

Names are allow-listed by their beginnings. A name or value that looks like a secret is never
included.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from orchestrator.core.trial.rank_environment import holds_secret

# NCCL and its network plugins, gloo, UCX, libfabric, verbs, torch's switches for them, its
# allocator.
RECORDED = (
    *("NCCL_", "GLOO_", "UCX_", "FI_", "OFI_NCCL_", "NVSHMEM_", "IBV_", "MLX5_", "RDMAV_"),
    *("TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)
# A node of a cluster lacks the orchestrator's environment. It gets these, which win over its own.
# Hugging Face's each by name: HF_TOKEN is a secret, which `env_from` passes on.
PASSED = (
    *(*RECORDED, "TORCH_", "PYTORCH_", "OMP_NUM_THREADS", "MKL_", "CUDA_DEVICE_ORDER"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"),
    "HF_ENDPOINT",
)
PRINTING = ("NCCL_DEBUG",)  # changes only what a library prints
MAX_CHARACTERS = 500  # of a recorded value


def passed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the orchestrator's variables that the nodes of a cluster get."""
    return _beginning(PASSED, environment)


def recorded(environment: Mapping[str, str], *, without: Collection[str] = ()) -> dict[str, str]:
    """Return what is recorded of a rank's environment, `without` a sweep file's secrets."""
    kept = _beginning(RECORDED, environment)
    return {
        name: _readable(value)[:MAX_CHARACTERS]
        for name, value in sorted(kept.items())
        if name not in without
    }


def counted(environment: Mapping[str, str], *, by_launcher: Collection[str]) -> dict[str, str]:
    """Return the recorded settings that make numbers incomparable.

    A variable set only `by_launcher` does not, nor one that changes only what is printed.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in by_launcher and not name.startswith(PRINTING)
    }


def over_nodes(
    environments: Mapping[str, Mapping[str, str]],
) -> dict[str, str | dict[str, str | None]]:
    """Merge nodes' environments: name to value, or to the value on each node if they differ."""
    merged: dict[str, str | dict[str, str | None]] = {}
    for name in sorted({name for environment in environments.values() for name in environment}):
        values = {node: environment.get(name) for node, environment in environments.items()}
        first = next(iter(values.values()))
        merged[name] = first if first is not None and set(values.values()) == {first} else values
    return merged


def _beginning(prefixes: tuple[str, ...], environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(prefixes) and not holds_secret(name, value)
    }


def _readable(value: str) -> str:
    """Escape bytes that are not UTF-8, which Python represents as surrogates and SQL refuses."""
    return value.encode(errors="surrogateescape").decode(errors="backslashreplace")
