"""Selects the variables of a launcher's environment for its ranks: an allow-list without secrets.

A sweep file adds what a program needs: in `pass_env` by name or pattern, secrets in `env_from`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

# A Python program, its libraries or its tools cannot do without these on some machine.
NEEDED_NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "LANG", "LANGUAGE", "TZ", "TERM",
    "TMPDIR", "TMP", "TEMP",
    "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH",
    "CC", "CXX", "VIRTUAL_ENV",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy",
    "no_proxy",
    "RES_OPTIONS", "LOCALDOMAIN", "HOSTALIASES",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE",
    "HF_ENDPOINT",
    "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM",
})  # fmt: skip
# In order: Python and its environments, devices and their libraries, communication, frameworks and
# compilers, threads and memory of processors, the batch job of the node.
NEEDED_PREFIXES = (
    "LC_", "PYTHON", "CONDA_",
    "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NVTE_", "HIP_", "HSA_", "ROCM_", "ROCR_", "AMD_",
    "MIOPEN_",
    "NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "OFI_NCCL_", "NVSHMEM_", "IBV_", "MLX5_", "RDMAV_",
    "TORCH_", "TORCHINDUCTOR_", "TORCHELASTIC_", "PYTORCH_", "TRITON_", "XLA_", "JAX_", "TF_CPP_",
    "TF_GPU_", "TF_XLA_", "NUMBA_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "MALLOC_",
    "SLURM_", "PMI_", "PMIX_", "OMPI_", "I_MPI_",
)  # fmt: skip

# A rank's place in its gang, as torchrun sets it. A program that starts its node's ranks itself
# gets none of these.
RANKS_OWN = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RUN_ID",
})  # fmt: skip
# With other values, ranks would use others' GPUs.
DEVICES_OWN = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"})
# The launcher sets these. With other values, ranks would not find each other.
LAUNCHERS_OWN = RANKS_OWN | DEVICES_OWN
# The rank server sets these for itself; its ranks have them as the user set them.
RANK_SERVERS_OWN = ("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCH_WARM_POOL")
# Every process of a local Ray has this variable, the folder of that Ray, and is found by it.
RAY_FOLDER_VARIABLE = "SWEEP_RAY_FOLDER"
# No pattern passes these: this program's, Ray's, the database's, and the launcher's share of
# threads.
_BY_NAME_ONLY = ("SWEEP_", "RAY_", "PG", "OMP_NUM_THREADS")

_SECRET_WORD = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|KEY|APIKEY|PASS|PASSWD|PASSWORD|PASSPHRASE|PWD|CREDENTIAL|CRED|AUTH"
    r"|COOKIE|JWT|DSN|PAT)S?(?:_|$)"
    r"|(?:TOKEN|SECRET|PASSWORD|PASSWD|APIKEY|ACCESSKEY|PASSFILE)$",
    re.IGNORECASE,
)
# The words above in a place, a kind (RAY_AUTH_MODE=token) or an amount (MAX_TOKENS=4096).
_NO_SECRET = re.compile(
    r"^(?:OLD)?PWD$"
    r"|_(?:PATH|FILE|DIR|SOCK|MODE|TYPE|METHOD|LIMIT|COUNT|SIZE|LENGTH|PREFIX)$"
    r"|^(?:MAX|MIN|NUM)_(?:\w+_)?(?:TOKEN|KEY)S$",
    re.IGNORECASE,
)
_URL_WITH_PASSWORD = re.compile(r"://[^\s/@]*:[^\s@]*@")


def needed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks see by default."""
    return {
        name: value
        for name, value in environment.items()
        if (name in NEEDED_NAMES or name.startswith(NEEDED_PREFIXES))
        and not holds_secret(name, value)
        and not _is_rays(name, value)
    }


def python_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of Python, which a Ray of ours does not see as the user set them."""
    seen = needed(environment).items()
    return {name: value for name, value in seen if name.startswith("PYTHON")}


def ray_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the processes of a local Ray see.

    These are the ones of ranks, Ray's and this program's, without those that open the store.
    """
    ours = {
        name: value
        for name, value in environment.items()
        if name.startswith(("RAY_", "SWEEP_")) and not name.startswith("SWEEP_DB")
    }
    return needed(environment) | ours


def named(patterns: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `pass_env` adds by name, or by a pattern, which adds no secret."""
    found: dict[str, str] = {}
    for pattern in patterns:
        if "*" in pattern:
            found |= {
                name: value
                for name, value in environment.items()
                if fnmatchcase(name, pattern)
                and name not in LAUNCHERS_OWN
                and not name.startswith(_BY_NAME_ONLY)
                and not holds_secret(name, value)
            }
        elif pattern in environment:
            found[pattern] = environment[pattern]
    return found


def is_secret_name(name: str) -> bool:
    """Return whether a variable's name shows that its value is a secret: HF_TOKEN, PGPASSWORD."""
    return _SECRET_WORD.search(name) is not None and _NO_SECRET.search(name) is None


def holds_secret(name: str, value: str) -> bool:
    """Return whether a variable's name shows a secret, or its value is a URL with a password."""
    return is_secret_name(name) or _URL_WITH_PASSWORD.search(value) is not None


def _is_rays(name: str, value: str) -> bool:
    """Return whether Ray set a variable in its own processes; it replaces the user's value."""
    return name == "PYTHONBREAKPOINT" and value.startswith("ray.")


def secret_values(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values must not be repeated, by their names."""
    return {name: value for name, value in environment.items() if is_secret_name(name)}
