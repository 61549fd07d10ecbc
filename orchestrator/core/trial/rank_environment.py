"""Which variables of the environment that a launcher runs in its ranks see: an allow-list, and no name or value that looks like a secret.

A sweep file names what a program needs besides: in `pass_env` by name or pattern, in `env_from` where the value is a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

# By whole name. Each is one that a Python program, its libraries or its tools cannot do without on some machine.
NEEDED_NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "CC", "CXX", "VIRTUAL_ENV",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "RES_OPTIONS", "LOCALDOMAIN", "HOSTALIASES",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT",
    "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM",
})  # fmt: skip
# By beginning.
NEEDED_PREFIXES = (
    # Language, Python and its environments.
    *("LC_", "PYTHON", "CONDA_"),
    # Devices and their libraries.
    *(
        "CUDA_",
        "CUDNN_",
        "CUBLAS_",
        "NVIDIA_",
        "NVTE_",
        "HIP_",
        "HSA_",
        "ROCM_",
        "ROCR_",
        "AMD_",
        "MIOPEN_",
    ),
    # Communication.
    *("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "OFI_NCCL_", "NVSHMEM_", "IBV_", "MLX5_", "RDMAV_"),
    # Frameworks and compilers.
    *(
        "TORCH_",
        "TORCHINDUCTOR_",
        "TORCHELASTIC_",
        "PYTORCH_",
        "TRITON_",
        "XLA_",
        "JAX_",
        "TF_CPP_",
        "TF_GPU_",
        "TF_XLA_",
        "NUMBA_",
    ),
    # Threads and memory of processors.
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "MALLOC_"),
    # The job that the node is part of.
    *("SLURM_", "PMI_", "PMIX_", "OMPI_", "I_MPI_"),
)

# What the launcher says to a rank; taken from elsewhere, ranks would not find each other, or use others' GPUs.
LAUNCHERS_OWN = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
})  # fmt: skip
# The folder of the local Ray that a process belongs to: every process of that Ray carries it, and is found by it.
RAY_FOLDER_VARIABLE = "SWEEP_RAY_FOLDER"
# No pattern passes these: this program's own, Ray's and the database's, and the threads that the launcher shares out.
_BY_NAME_ONLY = ("SWEEP_", "RAY_", "PG", "OMP_NUM_THREADS")

_SECRET_WORD = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|KEY|APIKEY|PASS|PASSWD|PASSWORD|PASSPHRASE|PWD|CREDENTIAL|CRED|AUTH|COOKIE|JWT|DSN|PAT)S?(?:_|$)"
    r"|(?:TOKEN|SECRET|PASSWORD|PASSWD|APIKEY|ACCESSKEY|PASSFILE)$",
    re.IGNORECASE,
)
# Words as above that say where something lies, of which kind it is (RAY_AUTH_MODE=token), or how much of it there is (MAX_TOKENS=4096).
_NO_SECRET = re.compile(
    r"^(?:OLD)?PWD$|_(?:PATH|FILE|DIR|SOCK|MODE|TYPE|METHOD|LIMIT|COUNT|SIZE|LENGTH|PREFIX)$|^(?:MAX|MIN|NUM)_(?:\w+_)?(?:TOKEN|KEY)S$",
    re.IGNORECASE,
)
_URL_WITH_PASSWORD = re.compile(r"://[^\s/@]*:[^\s@]*@")


def needed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks see by default."""
    return {
        name: value
        for name, value in environment.items()
        if _is_needed(name) and not holds_secret(name, value)
    }


def ray_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that processes of a Ray of our own see: those of ranks, Ray's and this program's, without those that open the store."""
    ours = {
        name: value
        for name, value in environment.items()
        if name.startswith(("RAY_", "SWEEP_")) and not name.startswith("SWEEP_DB")
    }
    return needed(environment) | ours


def named(patterns: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that `pass_env` adds, by name or by a pattern with `*`, which passes nothing that looks like a secret."""
    found: dict[str, str] = {}
    for pattern in patterns:
        if "*" in pattern:
            chosen = [
                name for name in environment if fnmatchcase(name, pattern) and _may_be_matched(name)
            ]
            found |= {
                name: environment[name]
                for name in chosen
                if not holds_secret(name, environment[name])
            }
        elif pattern in environment:
            found[pattern] = environment[pattern]
    return found


def is_secret_name(name: str) -> bool:
    """Say whether a variable's name tells that its value is a secret: HF_TOKEN, AWS_SECRET_ACCESS_KEY, PGPASSWORD."""
    return _SECRET_WORD.search(name) is not None and _NO_SECRET.search(name) is None


def holds_secret(name: str, value: str) -> bool:
    """Say whether a variable's name tells so, or its value is a URL with a password."""
    return is_secret_name(name) or _URL_WITH_PASSWORD.search(value) is not None


def secret_values(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables whose values must not be repeated, by their names."""
    return {name: value for name, value in environment.items() if is_secret_name(name)}


def _may_be_matched(name: str) -> bool:
    return name not in LAUNCHERS_OWN and not name.startswith(_BY_NAME_ONLY)


def _is_needed(name: str) -> bool:
    return name in NEEDED_NAMES or name.startswith(NEEDED_PREFIXES)
