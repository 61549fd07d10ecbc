"""Ranks see the variables that they need or a sweep file names, and no secret by default."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.rank_environment import is_secret_name, named, needed, ray_environment

OF_A_USER = {
    "PATH": "/bin", "HOME": "/home/me", "LANG": "C.UTF-8", "LC_ALL": "C", "TMPDIR": "/tmp",
    "LD_LIBRARY_PATH": "/cuda", "PYTHONHASHSEED": "0", "VIRTUAL_ENV": "/venv", "CUDA_HOME": "/cuda",
    "NVIDIA_TF32_OVERRIDE": "0", "NCCL_P2P_DISABLE": "1", "TORCH_HOME": "/t",
    "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HOME": "/hf",
    "SLURM_JOB_ID": "7", "HTTPS_PROXY": "http://proxy:3128",
}  # fmt: skip
OF_NOBODY_ELSE = {
    "SWEEP_DB": "sqlite:////s", "SWEEP_DB_READER": "postgresql://r@h/d", "PGHOST": "h",
    "PGPASSWORD": "x", "PGPASSFILE": "/x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_PROFILE": "me",
    "HF_TOKEN": "x", "WANDB_API_KEY": "x", "SSH_AUTH_SOCK": "/s", "RAY_AUTH_TOKEN": "x",
    "SLURM_JWT": "x", "HTTP_PROXY": "http://me:pw@proxy", "MY_SETTING": "on",
    "NCCL_AUTH_TOKEN": "x", "TF_VAR_secret": "x",
}  # fmt: skip


def test_ranks_see_what_they_need_and_nothing_else() -> None:
    assert needed(OF_A_USER | OF_NOBODY_ELSE) == OF_A_USER


def test_a_ray_of_our_own_sees_its_switches_too_but_not_the_store() -> None:
    switches = {
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_AUTH_TOKEN": "x",
        "SWEEP_HOME": "/s",
        "SWEEP_LAUNCHER": "1",
    }
    assert ray_environment(OF_A_USER | OF_NOBODY_ELSE | switches) == OF_A_USER | switches


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (("MY_SETTING",), {"MY_SETTING"}),
        (("MY_*",), {"MY_SETTING"}),
        (("AWS_*",), {"AWS_PROFILE"}),  # not the key
        (("RAY_ADDRESS",), set()),  # not set
        (("PG*", "SWEEP_*", "RAY_*"), set()),
        (("*SETTING", "AWS_PROFILE"), {"MY_SETTING", "AWS_PROFILE"}),
    ],
)
def test_a_pattern_passes_what_it_names_but_no_secret(
    patterns: tuple[str, ...], names: set[str]
) -> None:
    assert set(named(patterns, OF_NOBODY_ELSE)) == names


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "PGPASSWORD",
        "PGPASSFILE",
        "GITHUBTOKEN",
        "MYAPIKEY",
        "SLURM_JWT",
        "SENTRY_DSN",
        "DB_PWD",
        "db_password",
        "GH_PAT",
    ],
)
def test_names_that_mean_a_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "PWD",
        "OLDPWD",
        "TOKENIZERS_PARALLELISM",
        "KEYBOARD",
        "MONKEY",
        "AUTHOR",
        "RAY_AUTH_TOKEN_PATH",
        "RAY_AUTH_MODE",
        "MAX_TOKENS",
        "MAX_NEW_TOKENS",
        "TOKEN_LIMIT",
        "KEY_PREFIX",
        "SSH_AUTH_SOCK",
        "PATTERN",
        "COMPASS",
    ],
)
def test_names_that_do_not(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("name", "value", "is_passed"),
    [
        ("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace", False),
        ("PYTHONBREAKPOINT", "ipdb.set_trace", True),
        ("PYTHONPATH", "ray.d", True),
    ],
)
def test_of_python_s_variables_only_the_breakpoint_that_ray_sets_is_kept_back(
    name: str, value: str, is_passed: bool
) -> None:
    assert needed({name: value}) == ({name: value} if is_passed else {})
