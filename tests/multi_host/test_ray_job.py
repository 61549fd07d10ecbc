"""`ray job submit -- sweep run ...` with token authentication: watched, stopped and resumed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.command import CommandHere, write_sweep
from tests.multi_host.hosts import PROJECT, Host, Network
from tests.multi_host.ray_hosts import RAY, SWEEP, RayHosts, runs_one

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.timeout(900)]

JOB_SECONDS = 300.0  # on a busy machine
OF_OURS = ("orchestrator.node.rank_server", "NodeAgent", "sweep run")
MORE_THAN_A_JOB_MAY_UPLOAD = 101 << 20  # Ray refuses 100 MiB


@dataclass
class Told:
    """Results of three jobs: one that hangs and is stopped, its repetition, one without a store."""

    during: Any = None  # `sweep status --json` from a shell
    after_stop: Any = None  # `sweep show --json`, and `status`
    state_after_stop: str = ""
    second_code: int | None = None
    second_said: str = ""
    at_the_end: Any = None
    refused_code: int | None = None
    refused_said: str = ""
    in_the_upload: list[str] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def head(namespaces: None) -> Iterator[RayHosts]:
    with Network(["head"]) as network:
        cluster = RayHosts(network)
        cluster.start(num_cpus=2, dashboard=True)
        yield cluster


@pytest.fixture(scope="module")
def told(head: RayHosts) -> Told:
    told, host = Told(), head.head
    project, kept = host.folder / "project", host.base / "kept"
    (host.folder / "kept").mkdir()
    _write(project)
    store = {"SWEEP_DB": f"sqlite:///{kept}/sweep.sqlite"}
    here = CommandHere(host.folder, f"sqlite:///{host.folder}/kept/sweep.sqlite")
    # Ray's default of 3 s is short on a busy machine.
    of_job = store | {"SWEEP_HOME": str(kept / "home"), "RAY_JOB_STOP_WAIT_TIME_S": "60"}
    command = ["--", "sweep", "run", "mine.yaml"]

    refused = head.job(*command, cwd=host.base / "project", env={})
    first = head.job("--submission-id", "first", *command, cwd=host.base / "project", env=of_job)
    told.during = _until_it_runs(head, store)
    host.ok(RAY, "job", "stop", "first")
    first.communicate(timeout=JOB_SECONDS)
    told.after_stop = here.json("show", "1")
    told.state_after_stop = head.answer("status", env=store)["sweeps"][0]["state"]

    second = head.job(*command, cwd=host.base / "project", env=of_job)
    told.second_said, _ = second.communicate(timeout=JOB_SECONDS)
    told.second_code = second.returncode
    told.at_the_end = here.json("show", "1")
    told.refused_said, _ = refused.communicate(timeout=JOB_SECONDS)
    told.refused_code = refused.returncode
    told.in_the_upload = [path.name for path in _upload(host).iterdir()]
    told.left = _still_there(host)
    return told


def test_a_job_is_looked_at_from_outside_while_it_runs(told: Told) -> None:
    (sweep,) = told.during["sweeps"]
    assert sweep["state"] == "running"
    assert sweep["num_trials"]["running"] == 1


def test_to_stop_a_job_is_to_end_its_trials_in_order_and_they_wait(told: Told) -> None:
    assert told.state_after_stop == "stopped"  # not "running", as after kill -9
    (attempt,) = told.after_stop["attempts"]
    assert (attempt["state"], attempt["failure"]["kind"]) == ("requeued", "cancelled")


def test_the_same_job_again_goes_on(told: Told) -> None:
    assert told.second_code == 0, told.second_said
    assert [attempt["state"] for attempt in told.at_the_end["attempts"]] == ["requeued", "measured"]
    assert "succeeded" in told.second_said


def test_a_store_in_the_folder_of_the_job_is_refused_with_what_to_do(told: Told) -> None:
    assert told.refused_code == 1
    assert "exit code 2" in told.refused_said
    assert "the folder that Ray has unpacked for this job and will delete" in told.refused_said
    assert '"SWEEP_DB"' in told.refused_said


def test_what_git_ignores_is_not_uploaded_however_large(told: Told) -> None:
    assert sorted(told.in_the_upload) == [".gitignore", "mine.yaml"]


def test_nothing_is_left_of_jobs_that_ended(told: Told) -> None:
    assert told.left == []


def test_a_client_without_the_token_is_told_what_to_look_at(head: RayHosts) -> None:
    host = head.head
    write_sweep(host.folder)
    asked = host.run(
        SWEEP,
        "run",
        "t.yaml",
        "--ray-address",
        "auto",
        env={"RAY_AUTH_TOKEN_PATH": str(host.base / "absent")},
    )
    assert asked.returncode == 75, asked.stdout
    assert (
        "does RAY_AUTH_TOKEN_PATH name the cluster's token (RAY_AUTH_MODE=token)?" in asked.stdout
    )


def _write(project: Path) -> None:
    """A sweep of one layout whose first attempt hangs, and a large file that git ignores."""
    project.mkdir()
    hang = {"fault": "hang", "at": "step_3", "first_attempt_only": True}
    write_sweep(
        project,
        "mine",
        axes={"micro_batch_size": [8], "recompute": ["none"], "zero_stage": [0]},
        workload={"name": "synthetic", "options": {"faults": [hang]}},
    )
    (project / ".gitignore").write_text("*.bin\n")
    with (project / "weights.bin").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, MORE_THAN_A_JOB_MAY_UPLOAD)


def _until_it_runs(head: RayHosts, store: dict[str, str]) -> Any:
    deadline = time.monotonic() + JOB_SECONDS
    while not runs_one(head.head.folder / "kept/sweep.sqlite"):
        assert time.monotonic() < deadline, f"no trial runs after {JOB_SECONDS} s"
        time.sleep(0.1)
    return head.answer("status", env=store)


def _still_there(host: Host) -> list[int]:
    """Processes of ours that do not end."""
    until = time.monotonic() + JOB_SECONDS
    while (
        left := [pid for text in OF_OURS for pid in host.processes(text)]
    ) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _upload(host: Host) -> Path:
    (found,) = (host.folder / "ray").glob(
        "session_2*/runtime_resources/working_dir_files/_ray_pkg_*/"
    )
    return found


def test_the_doctor_finds_a_cluster_with_a_token_in_order_and_one_whose_token_is_readable_not(
    head: RayHosts,
) -> None:
    host = head.head
    env = _without_torch(host)
    said = host.run(SWEEP, "doctor", "--ray-address", "auto", env=env).stdout
    assert "others on this machine can read the token" not in said, said
    assert "ok    ray access" in said, said
    token = host.folder / "token"
    token.chmod(0o644)
    try:
        said = host.run(SWEEP, "doctor", "--ray-address", "auto", env=env).stdout
    finally:
        token.chmod(0o600)
    assert "others on this machine can read the token" in " ".join(said.split()), said


def _without_torch(host: Host) -> dict[str, str]:
    """The environment of a doctor for which torch, which takes seconds, cannot be imported."""
    stubs = host.folder / "stubs"
    (stubs / "stub-1.dist-info").mkdir(parents=True)  # our programs keep such a folder
    (stubs / "torch.py").write_text("raise ImportError('not in this test')\n")
    return {"PYTHONPATH": f"{host.base}/stubs:{PROJECT}"}
