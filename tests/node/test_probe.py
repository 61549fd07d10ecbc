"""What a machine says of itself: this one, for real, and one with GPUs by an NVML of our own."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from orchestrator.core.machines.check import Status
from orchestrator.core.machines.node_health import judge_nodes, unfit
from orchestrator.node import kernel_log
from orchestrator.node.probe import NodeProbe, ProbePlan, versions_here, with_clock
from orchestrator.node.processes import descendants, start_time
from tests.node.test_gpu_monitor import GIB, nvml

_T = TypeVar("_T")


def plan(home: Path, **changes: Any) -> ProbePlan:
    return ProbePlan(node="here", home=str(home), **changes)


def test_this_machine_says_what_it_is(tmp_path: Path) -> None:
    facts = NodeProbe().gather(plan(tmp_path / "not" / "made" / "yet"))
    assert (facts.node, facts.host) == ("here", socket.gethostname())
    assert facts.packages["ray"] and facts.packages["layout-sweep"] and facts.packages["code"]
    assert facts.num_cores == len(os.sched_getaffinity(0))
    assert facts.free_disk_bytes is not None and facts.free_disk_bytes > 0
    assert facts.home is not None and Path(facts.home).is_absolute()
    assert facts.cpu_matmul_flops is None, "nobody asked for matrix products"
    assert not (tmp_path / "not").exists(), "it leaves nothing behind"


def test_matrix_products_run_on_the_cores_where_there_is_no_gpu(tmp_path: Path) -> None:
    facts = NodeProbe().gather(plan(tmp_path, matmul_seconds=0.1))
    assert facts.unread == ()
    assert facts.cpu_matmul_flops is not None
    # A slow core in an emulator, and more than any machine of today.
    assert 1e8 < facts.cpu_matmul_flops < 1e14


def test_matrix_products_end_with_the_process_that_wanted_them(tmp_path: Path) -> None:
    program = f"""
from orchestrator.node.probe import NodeProbe, ProbePlan
NodeProbe().gather(ProbePlan(node="here", home={str(tmp_path)!r}, matmul_seconds=600.0))
"""
    prober = subprocess.Popen([sys.executable, "-c", program])
    try:
        (child,) = until(lambda: descendants(prober.pid))
        until(lambda: b"die_with_parent" in Path(f"/proc/{child}/cmdline").read_bytes())
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        assert any(
            entry.startswith(b"SWEEP_LAUNCHER=") and entry.endswith(f":{tmp_path}".encode())
            for entry in environment
        )
        time.sleep(0.5)  # multiplying or not yet
    finally:
        prober.kill()
        prober.wait()
    until(lambda: start_time(child) is None)


def until(come: Callable[[], _T]) -> _T:
    """What it gives, once that is something."""
    deadline = time.monotonic() + 60
    while not (found := come()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_gpus_that_somebody_holds_are_not_computed_on(tmp_path: Path) -> None:
    facts = NodeProbe().gather(plan(tmp_path, matmul_seconds=0.1), nvml=nvml(used_gib=[40, 40]))
    assert facts.unread[0] == "matmul: every GPU is held"
    assert [gpu.matmul_flops for gpu in facts.gpus] == [None, None]
    assert facts.driver == "580.1"
    assert "40.0 GiB in use by no process" in (unfit(judge_nodes([facts])["here"]) or "")


def test_what_cannot_be_tried_says_why(tmp_path: Path) -> None:
    # Torch finds none of these GPUs.
    facts = NodeProbe().gather(plan(tmp_path, matmul_seconds=0.1), nvml=nvml())
    assert any(
        said.startswith("matmul: torch") and said.endswith("sees no GPU") for said in facts.unread
    ), facts.unread
    assert [gpu.matmul_flops for gpu in facts.gpus] == [None, None]


def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    facts = NodeProbe().gather(plan(tmp_path))
    assert facts.disk_error == f"{tmp_path} is not writable"
    assert unfit(judge_nodes([facts])["here"]) == f"disk: {tmp_path} is not writable"


def test_a_kernel_log_that_cannot_be_read_leaves_its_errors_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_log, "KERNEL_LOG", tmp_path / "kmsg")
    facts = NodeProbe().gather(plan(tmp_path), nvml=nvml())
    assert facts.xids is None
    assert facts.unread == ("kernel log: No such file or directory",)


def test_errors_of_gpus_are_read_from_the_kernels_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe stands for /dev/kmsg: it gives what is there and then nothing."""
    reading, writing = os.pipe2(os.O_NONBLOCK)
    now = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    os.write(
        writing,
        f"4,1,{now},-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n".encode(),
    )
    assert stat.S_ISFIFO(os.fstat(reading).st_mode)
    monkeypatch.setattr(kernel_log, "KERNEL_LOG", Path(f"/proc/self/fd/{reading}"))
    facts = NodeProbe().gather(plan(tmp_path), nvml=nvml(used_gib=[0, 0]))
    os.close(reading)
    os.close(writing)
    assert facts.xids == {79: 1}
    (xid,) = (check for check in judge_nodes([facts])["here"] if check.name == "xid")
    assert xid.status is Status.FAIL


def test_the_quickest_answer_decides_about_a_clock(tmp_path: Path) -> None:
    """A node that is 100 s ahead, over a network with round trips of 8, 2, 4, 4 and 4 s."""
    here = iter([0, 8, 10, 12, 20, 24, 30, 34, 40, 44])
    there = iter([100 + 1, 100 + 11, 100 + 23, 100 + 31, 100 + 43])
    facts = with_clock(
        NodeProbe().gather(plan(tmp_path)),
        lambda: float(next(there)),
        clock=lambda: float(next(here)),
    )
    assert (facts.clock_offset_seconds, facts.clock_uncertainty_seconds) == (100.0, 1.0)


def test_versions_are_known_without_importing_torch() -> None:
    versions = versions_here()
    assert versions["python"] and versions["pydantic"]
    assert versions["code"] == versions_here()["code"]


def test_memory_of_an_idle_driver_is_no_reason_to_leave_a_gpu_out(tmp_path: Path) -> None:
    facts = NodeProbe().gather(plan(tmp_path), nvml=nvml(used_gib=[1, 0]))
    assert [gpu.memory_used_bytes for gpu in facts.gpus] == [GIB, 0]
    assert {check.name: check.status for check in judge_nodes([facts])["here"]}["gpus"] is Status.OK
