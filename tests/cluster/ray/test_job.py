"""What the entrypoint of a Ray job derives from its folder and its environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.cluster.ray.job import JOB_VARIABLE, is_unpacked, threads_asked_for

# As Ray 2.60 gave it to an entrypoint, with an environment variable of the job's own.
OF_A_JOB = {
    "runtime_env": {"working_dir": "gcs://_ray_pkg_88600de1519989fc.zip", "env_vars": {}},
    "metadata": {
        "job_submission_id": "raysubmit_ZkUQVFKWTcVyTLsQ",
        "job_name": "raysubmit_ZkUQVFKWTcVyTLsQ",
    },
}


@pytest.mark.parametrize(
    ("path", "is_in_it"),
    [
        (
            "/tmp/ray/session_2026-11-21_21-20-29_381246_14/runtime_resources/working_dir_files"
            "/_ray_pkg_35c391bb364e3fe6/.sweep",
            True,
        ),
        ("/home/me/project/.sweep", False),
        ("/home/me/working_dir_files/.sweep", False),
    ],
)
def test_a_folder_that_ray_unpacked_for_a_job_is_known_by_its_path(
    path: str, is_in_it: bool
) -> None:
    assert is_unpacked(Path(path)) is is_in_it


def test_a_number_of_threads_counts_where_somebody_asked_for_it() -> None:
    assert threads_asked_for({}) is None
    assert threads_asked_for({"OMP_NUM_THREADS": "4"}) == "4"


def test_a_number_of_threads_that_ray_gave_a_job_does_not_count() -> None:
    given = {"OMP_NUM_THREADS": "1", JOB_VARIABLE: json.dumps(OF_A_JOB)}
    assert threads_asked_for(given) is None
    asked = OF_A_JOB | {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "4"}}}
    assert threads_asked_for({"OMP_NUM_THREADS": "4", JOB_VARIABLE: json.dumps(asked)}) == "4"
    assert (
        threads_asked_for(
            {"OMP_NUM_THREADS": "1", JOB_VARIABLE: json.dumps({"runtime_env": {}, "metadata": {}})}
        )
        is None
    )
