"""`sweep doctor` reports what each check found, and changes nothing."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import pytest

from db.schema import SCHEMA_VERSION
from db.store import Store
from orchestrator.cli.doctor import machine_checks
from orchestrator.core.machines.check import Status
from orchestrator.node import cgroups, exposure
from tests.cli.conftest import Sweep


def test_doctor_says_of_every_check_what_it_found(
    quick_imports: None, store: Store, sweep: Sweep
) -> None:
    out, _ = sweep("doctor", "--json", code=1)
    found = json.loads(out)
    checks = {check["name"]: check for check in found["checks"]}
    assert found["ok"] is False
    assert (checks["ray"]["status"], checks["torch"]["status"]) == ("fail", "fail")
    assert "No module named x" in checks["ray"]["found"]
    assert all(
        checks[name]["status"] == "ok"
        for name in ("python", "packages", "database", "ports", "/proc", "clock")
    )
    assert {
        "gpus",
        "ray access",
        "SWEEP_HOME",
        "open files",
        "clean-up",
        "compiler",
    } <= checks.keys()
    assert f"schema {SCHEMA_VERSION}" in checks["database"]["found"]


def test_doctor_warns_of_shared_memory_that_is_too_small_for_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "SHARED_MEMORY", tmp_path)
    usage = shutil.disk_usage(tmp_path)
    for free, status in ((64 << 20, "warn"), (8 << 30, "ok")):
        found = usage._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, found=found: found)
        check = machine_checks.shared_memory()
        assert (check.status, check.found) == (status, f"{free >> 20:,} MiB free in {tmp_path}")
    monkeypatch.undo()
    monkeypatch.setattr(machine_checks, "SHARED_MEMORY", tmp_path / "none")
    assert machine_checks.shared_memory().status == "warn"


@pytest.mark.parametrize(("gpus", "status"), [(["0"], "warn"), ([], "ok")])
def test_doctor_names_what_compiling_lacks_where_there_are_gpus(
    gpus: list[str], status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "_driver_gpus", lambda: gpus)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("CC", "my-cc")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == "my-cc" else None)
    assert machine_checks.compiler().found == f"/bin/my-cc, {tmp_path}/Python.h"
    monkeypatch.delenv("CC")
    check = machine_checks.compiler()
    assert (check.status, check.found) == (status, "missing: a C compiler (cc, gcc, or CC)")
    (tmp_path / "Python.h").unlink()
    assert "Python's headers" in machine_checks.compiler().found


def test_doctor_says_what_ranks_see_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setattr(
        exposure, "secrets_of_raylets", lambda: {7: ["AWS_SECRET_ACCESS_KEY", "SWEEP_DB"]}
    )
    own, others = machine_checks.environment("auto")
    assert (
        own.status is Status.OK
        and "HF_TOKEN" in own.found
        and "`ray start` was called" in own.found
    )
    assert (
        others.status is Status.WARN
        and "the Ray of process 7 was started with AWS_SECRET_ACCESS_KEY, SWEEP_DB" in others.found
    )
    assert "env -u AWS_SECRET_ACCESS_KEY -u SWEEP_DB ray start" in others.advice
    assert "canary" not in f"{own} {others}"


def test_doctor_says_whether_a_cgroup_can_end_what_a_trial_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroups, "own_cgroup", lambda: Path("/sys/fs/cgroup/mine"))
    monkeypatch.setattr(cgroups, "why_no_cgroup", lambda: None)
    check = machine_checks.clean_up()
    assert (check.status, check.advice) == (Status.OK, "")
    assert check.found == "wardens, and a cgroup for each rank server below /sys/fs/cgroup/mine"
    monkeypatch.setattr(cgroups, "why_no_cgroup", lambda: "/mine is not ours to make groups in")
    check = machine_checks.clean_up()
    assert check.status is Status.OK
    assert check.found == "wardens, without a cgroup: /mine is not ours to make groups in"
    assert "systemd-run --user --scope -p Delegate=yes sweep run" in check.advice


def test_doctor_advises_where_the_database_or_the_home_cannot_be_used(
    quick_imports: None, sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SWEEP_DB", "postgresql://me:c4nary@127.0.0.1:1/none")
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("db.connection.engine.PATIENCE_SECONDS", 0.2)
    out, err = sweep("doctor", code=1)
    assert "c4nary" not in out + err
    assert "fail  database" in out
    assert "fail  SWEEP_HOME" in out
    assert "choose another place" in out


def test_doctor_fails_where_others_can_read_the_cluster_s_token(
    quick_imports: None, sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("c4nary" * 8)
    token.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "c4nary" * 8)
    found = json.loads(sweep("doctor", "--json", code=1)[0])["checks"]
    # Whatever else runs on this machine is told too.
    checks = [
        check
        for check in found
        if check["name"] == "ray access"
        and ("RAY_AUTH_TOKEN" in check["found"] or str(token) in check["found"])
    ]
    assert [check["status"] for check in checks] == ["fail", "warn"]
    assert f"chmod 600 {token}" in checks[0]["advice"]
    assert "every program started here inherits it" in checks[1]["found"]
    assert "c4nary" not in json.dumps(checks)


def test_doctor_makes_no_database(quick_imports: None, sweep: Sweep, tmp_path: Path) -> None:
    out, _ = sweep("doctor", "--db", f"sqlite:///{tmp_path}/new/sweep.sqlite", code=1)
    assert "created by the first `sweep run`" in out
    assert not (tmp_path / "new").exists()


def test_doctor_says_where_neither_database_nor_home_can_be_made(
    quick_imports: None, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write there by the permissions of the folder, and nobody in fact."""
    monkeypatch.setenv("SWEEP_HOME", "/proc/none/home")
    out, _ = sweep("doctor", "--db", "sqlite:////proc/none/sweep.sqlite", code=1)
    assert "sqlite:////proc/none/sweep.sqlite cannot be created: /proc is not writable" in " ".join(
        out.split()
    )
    assert "fail  SWEEP_HOME" in out


def test_doctor_finds_an_older_schema(
    quick_imports: None, store: Store, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("db.schema.SCHEMA_VERSION", "9999")
    out, _ = sweep("doctor", code=1)
    assert "this program needs 9999" in out
    assert "sweep db upgrade" in out


def test_doctor_tells_of_a_url_that_cannot_be_read_and_goes_on(
    quick_imports: None, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", "nonsense")
    out, _ = sweep("doctor", code=1)
    assert "the database URL cannot be read" in out
    assert "open files" in out
    monkeypatch.setenv("SWEEP_DB", "postgresql://me@127.0.0.1:1/none")
    monkeypatch.setenv("SWEEP_DB_READER", "nonsense")
    out, _ = sweep("doctor", code=1)
    assert "SWEEP_DB_READER: the database URL cannot be read" in out
    assert "open files" in out
