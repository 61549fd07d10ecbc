"""A node's launcher with real processes: ranks run, fail in every way, and are ended."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.fingerprint import Software, Stack
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import Device, Phase
from orchestrator.core.trial.rank_environment import RANK_SERVERS_OWN
from orchestrator.node.gang_environment import gang_environment
from orchestrator.node.gpu_monitor import GpuMonitor
from orchestrator.node.launcher import (
    DEVICES_CLEAN_SECONDS,
    NodeLauncher,
    _with_driver,
)
from orchestrator.node.rank_server_client import _environment
from tests.node.launching import LIMITS, faulty, order, survivors, tree_of, with_start_times
from tests.node.test_gpu_monitor import GIB, nvml

K = FailureKind
HUNG_SECONDS = 2.0  # longer than a step, when busy


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[NodeLauncher]:
    launcher = NodeLauncher(tmp_path, node="node-a")
    yield launcher
    seen = with_start_times(tree_of(tmp_path))
    launcher.close()
    assert survivors(seen.items(), root=tmp_path) == []


@pytest.fixture(scope="module")
def long_lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NodeLauncher, Path]]:
    root = tmp_path_factory.mktemp("shared")
    launcher = NodeLauncher(root, node="node-a")
    yield launcher, root
    seen = with_start_times(tree_of(root))
    launcher.close()
    assert survivors(seen.items(), root=root) == []


@pytest.fixture
def shared_launcher(long_lived: tuple[NodeLauncher, Path]) -> Iterator[NodeLauncher]:
    """One for tests that only look at how attempts end: a server of ranks takes a while to start.

    Nothing of an attempt is left for the next test, neither processes nor folders. But it has seen
    the names of attempts before, so what cancels one needs a launcher of its own.
    """
    launcher, root = long_lived
    yield launcher
    assert len(tree_of(root)) <= 3, "two wardens and the server"
    for folder in root.glob("trial-*"):
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def torch_launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeLauncher]:
    """One for all tests whose ranks need torch: its server imports it once."""
    pytest.importorskip("torch")
    launcher = NodeLauncher(tmp_path_factory.mktemp("torch"), node="node-t")
    yield launcher
    launcher.close()


_trial_ids = itertools.count(1)


def gloo(**known: Any) -> LaunchOrder:
    return order("tests.node.rank_programs", trial_id=next(_trial_ids), **known)


def outcome_of(report: NodeReport, rank: int) -> object:
    return next(outcome for outcome in report.ranks if outcome.rank == rank)


def ended_why(report: NodeReport, *, rank: int) -> str | None:
    """What the log of a rank says of its end by the launcher."""
    text = Path(report.ranks[rank].log_path).read_text()
    found = re.findall(r"^ended by sweep: (.*)$", text, re.MULTILINE)
    return found[-1] if found else None


def test_a_gang_measures_and_its_results_come_back(launcher: NodeLauncher, tmp_path: Path) -> None:
    report = launcher.run(order())
    assert report.failure is None
    assert [outcome.rank for outcome in report.ranks] == [0, 1]
    assert all(
        outcome.result is not None and outcome.exit_code == 0 and outcome.phase is Phase.TEARDOWN
        for outcome in report.ranks
    )
    assert report.processes_killed == 0
    names = {path.name for path in (tmp_path / "trial-1" / "attempt-1" / "node-0").iterdir()}
    assert {"request.json", "result-0.json", "result-1.json", "log-0.txt", "log-1.txt"} <= names


def test_the_server_warms_up_once_before_it_forks(launcher: NodeLauncher, tmp_path: Path) -> None:
    reports = [launcher.run(order("tests.node.rank_warmed", trial_id=number)) for number in (1, 2)]
    facts = [rank.result.extra for report in reports for rank in report.ranks if rank.result]
    assert len(facts) == 4
    assert all(one["warmed_in"] == [one["forked_by"]] for one in facts)
    (log,) = tmp_path.glob("rank-server-*.txt")
    assert log.read_text().startswith("tests.node.rank_warmed.warm_up failed:")


def test_two_gloo_ranks_meet_on_the_port_that_was_held_for_them(
    torch_launcher: NodeLauncher,
) -> None:
    report = torch_launcher.run(gloo(cpus=sorted(os.sched_getaffinity(0))[:1]))
    assert report.failure is None, report.failure
    assert [outcome.result.loss_first for outcome in report.ranks if outcome.result] == [3.0, 3.0]
    assert [outcome.result.tokens_per_step for outcome in report.ranks if outcome.result] == [
        1,
        1,
    ]  # threads: one core for two ranks


def test_two_launchers_share_a_gang_across_nodes(torch_launcher: NodeLauncher) -> None:
    other = NodeLauncher(torch_launcher.root, node="node-b")  # a shared file system
    port = torch_launcher.rendezvous()
    share = gloo(local_world_size=1, master_port=port)
    shares = [replace(share, first_rank=rank, node_rank=rank) for rank in (0, 1)]
    reports: dict[int, NodeReport] = {}
    thread = threading.Thread(target=lambda: reports.update({1: other.run(shares[1])}))
    thread.start()
    reports[0] = torch_launcher.run(shares[0])
    thread.join()
    other.close()
    assert [reports[rank].failure for rank in (0, 1)] == [None, None]
    assert [reports[rank].ranks[0].rank for rank in (0, 1)] == [0, 1]


DEATHS = {
    "segfault": (K.SEGFAULT, signal.SIGSEGV),
    "abort": (K.SEGFAULT, signal.SIGABRT),
    "lost_rank": (K.KILLED, signal.SIGKILL),
    "preempted": (K.PREEMPTED, signal.SIGTERM),
    "xid": (K.XID, None),
    "nan_loss": (K.NOT_FINITE, None),
    "exit": (K.USER_ERROR, None),
    "crash": (K.USER_ERROR, None),
    "config_rejected": (K.CONFIG_REJECTED, None),
    "oom": (K.OOM_GPU, None),
    "host_oom": (K.OOM_HOST, None),
    "nccl_error": (K.NCCL, None),
    "port_clash": (K.PORT_CLASH, None),
    "rubbish_result": (K.BAD_RESULT, None),
    "no_result": (K.BAD_RESULT, None),
}


def test_the_first_bad_rank_is_named_and_the_gang_is_gone_at_once(
    shared_launcher: NodeLauncher,
) -> None:
    chance = random.Random(3)
    slowest = 0.0
    for number, (fault, (kind, died_of)) in enumerate(DEATHS.items()):
        bad, others = chance.sample(range(3), 2)
        faults = (
            faulty(fault, at="step_2", rank=bad)["faults"]
            + faulty("hang_ignoring_signals", at="step_3")["faults"]
        )
        report = shared_launcher.run(
            order(trial_id=number, world_size=3, options={"faults": faults})
        )
        gone_at = time.time()
        failure = report.failure
        assert failure is not None
        assert (failure.kind, failure.rank, failure.signal, failure.node) == (
            kind,
            bad,
            died_of,
            "node-a",
        ), (fault, failure)
        assert failure.log_path.endswith(f"log-{bad}.txt")
        assert report.failed_at_unix_seconds is not None
        slowest = max(slowest, gone_at - report.failed_at_unix_seconds)
        assert outcome_of(report, others).exit_code is None  # type: ignore[attr-defined]
    print(f"gang gone {slowest:.3f} s after the first death, at the slowest")
    assert slowest < 2.0  # promised: 0.2 s, if idle


@pytest.mark.parametrize("fault", ["hang", "hang_in_c", "hang_ignoring_signals", "stop"])
def test_a_hang_is_ended_and_the_least_advanced_rank_named(
    shared_launcher: NodeLauncher, fault: str
) -> None:
    options = {
        "faults": [
            *faulty(fault, at="step_3", rank=1)["faults"],
            *faulty("hang", at="step_4")["faults"],
        ]
    }
    report = shared_launcher.run(order(options=options, limits={"steady": HUNG_SECONDS}))
    assert report.failure is not None
    assert (report.failure.kind, report.failure.rank, report.failure.step) == (K.HUNG, 1, 3)
    assert f"steady limit of {HUNG_SECONDS:.0f} s passed" in report.failure.message
    assert ended_why(report, rank=1) == "one of its limits has passed (measurement.limits)"
    assert "faults.py" in report.failure.log_tail or fault in ("stop",), (
        report.failure.log_tail
    )  # where it hangs


@pytest.mark.parametrize(("at", "phase"), [("init", "rendezvous"), ("forward", "first_step")])
def test_each_phase_has_a_limit_of_its_own(
    shared_launcher: NodeLauncher, at: str, phase: str
) -> None:
    report = shared_launcher.run(order(options=faulty("hang", at=at, rank=0), limits={phase: 0.3}))
    assert report.failure is not None
    assert report.failure.kind is (K.START_TIMEOUT if phase == "rendezvous" else K.HUNG)
    assert report.failure.phase == phase


@pytest.mark.parametrize(
    ("hangs_at", "is_timed"), [("step_3", False), ("step_4", True)]
)  # the warm-up has three steps
def test_gpu_usage_counts_while_every_rank_times_its_steps(
    shared_launcher: NodeLauncher, monkeypatch: pytest.MonkeyPatch, hangs_at: str, is_timed: bool
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(
        "orchestrator.node.launcher.GpuMonitor.count", lambda _, timed: told.append(timed)
    )
    hanging = order(options=faulty("hang", at=hangs_at), limits={"steady": HUNG_SECONDS})
    plan = hanging.request.measurement.model_copy(update={"warmup_steps": 3})
    shared_launcher.run(
        replace(hanging, request=hanging.request.model_copy(update={"measurement": plan}))
    )
    assert told[-1] is is_timed
    assert is_timed or not any(told)


def test_a_driver_says_how_much_memory_its_devices_have(
    shared_launcher: NodeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = GpuMonitor.open(["0"], nvml=nvml(used_gib=[10, 20]))
    monkeypatch.setattr(GpuMonitor, "open", lambda devices: monitor)
    assert shared_launcher.run(order(world_size=1)).device_memory_bytes == 80 * GIB


def test_the_total_limit_ends_what_still_makes_progress(shared_launcher: NodeLauncher) -> None:
    report = shared_launcher.run(
        order(options={"sleep": True, "time_scale": 1000.0}, limits={"total": 0.5})
    )
    assert report.failure is not None and report.failure.kind is K.HUNG
    assert "total limit" in report.failure.message


def test_a_hang_in_teardown_costs_nothing_once_all_is_measured(
    shared_launcher: NodeLauncher,
) -> None:
    report = shared_launcher.run(
        order(options=faulty("hang", at="teardown", rank=1), limits={"teardown": 0.3})
    )
    assert report.failure is None
    assert all(outcome.result is not None for outcome in report.ranks)
    assert ended_why(report, rank=1) == "the attempt is measured, and it did not end by itself"
    assert ended_why(report, rank=0) is None


def test_a_crash_in_teardown_costs_nothing_either(shared_launcher: NodeLauncher) -> None:
    report = shared_launcher.run(order(options=faulty("segfault", at="teardown", rank=1)))
    assert report.failure is None


def test_an_out_of_memory_beats_the_hang_that_it_causes(shared_launcher: NodeLauncher) -> None:
    options = {
        "faults": [
            *faulty("oom", at="step_2", rank=1)["faults"],
            *faulty("nccl_error", at="step_2", rank=0)["faults"],
        ]
    }
    report = shared_launcher.run(order(options=options))
    assert report.failure is not None
    assert (report.failure.kind, report.failure.rank) == (K.OOM_GPU, 1)


@pytest.mark.parametrize("death", ["raises", signal.SIGKILL, signal.SIGSEGV])
def test_a_real_gloo_peer_that_loses_its_connection_is_not_blamed(
    torch_launcher: NodeLauncher, death: str | signal.Signals
) -> None:
    options = {"raises_on": 1} if death == "raises" else {"dies_on": 1, "signal": int(death)}
    report = torch_launcher.run(gloo(options=options))
    assert report.failure is not None
    assert report.failure.rank == 1
    assert (
        report.failure.kind
        is {"raises": K.USER_ERROR, signal.SIGKILL: K.KILLED, signal.SIGSEGV: K.SEGFAULT}[death]
    )  # type: ignore[index]


def test_noise_in_the_log_is_no_failure(shared_launcher: NodeLauncher) -> None:
    report = shared_launcher.run(order(options=faulty("nccl_noise")))
    assert report.failure is None
    assert "NCCL WARN" in report.ranks[0].log_tail


def test_a_log_keeps_its_head_and_its_tail(shared_launcher: NodeLauncher) -> None:
    report = shared_launcher.run(order(world_size=1, options=faulty("log_flood")))
    assert report.failure is None
    log = Path(report.ranks[0].log_path).read_bytes()
    assert 9 << 20 < len(log) < 11 << 20
    assert b"bytes cut here" in log
    assert log.endswith(b"the last line\n")
    assert report.ranks[0].log_tail.endswith("the last line\n")


def test_an_attempt_never_writes_into_the_directory_of_another(launcher: NodeLauncher) -> None:
    assert launcher.run(order()).failure is None
    again = launcher.run(order())
    assert again.failure is not None and again.failure.kind is K.LAUNCH_FAILED
    assert "never written twice" in again.failure.message
    assert launcher.run(order(attempt=2)).failure is None


def test_nothing_is_started_on_a_gpu_that_another_process_holds(
    launcher: NodeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], float]] = []

    def held(devices: Sequence[str], *, patience_seconds: float) -> str:
        asked.append((list(devices), patience_seconds))
        return "GPU 3 is held by process 4711"

    monkeypatch.setattr("orchestrator.node.launcher.wait_until_clean", held)
    report = launcher.run(order(world_size=1, devices=["3"]))
    assert asked == [(["3"], DEVICES_CLEAN_SECONDS)]
    assert report.failure is not None and report.failure.kind is K.LAUNCH_FAILED
    assert report.failure.evidence == "GPU 3 is held by process 4711"
    assert report.ranks == ()


def test_whatever_a_rank_started_is_gone_when_the_report_comes(
    launcher: NodeLauncher, tmp_path: Path
) -> None:
    seen: dict[int, int | None] = {}
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.update(with_start_times(tree_of(tmp_path)))

    # A rank that ends leaves these: a child, a shell and its child, a session, a daemon, and the
    # unmarked one. Its data loader ends by itself. Ranks do not wait for one another: the second
    # may not have left anything when the first one crashes.
    certain = {"leak_children": 2 * (6 + 5), "crash": 6}
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for trial_id, (fault, num_left) in enumerate(certain.items()):
            leaks = (
                faulty("leak_children", at="init")["faults"]
                + faulty("leak_unmarked_child", at="init")["faults"]
            )
            faults = leaks + faulty(fault, at="step_4")["faults"]
            report = launcher.run(order(trial_id=trial_id, options={"faults": faults}))
            assert report.processes_killed >= num_left
    finally:
        stop.set()
        watcher.join()
    kept = set(tree_of(tmp_path))
    assert len(kept) == 3  # two wardens and the server
    assert (
        survivors(
            [item for item in seen.items() if item[0] not in kept],
            root="/nowhere",
            patience_seconds=0,
        )
        == []
    )
    assert len(seen) > 20


def test_an_attempt_is_cancelled_from_another_thread(launcher: NodeLauncher) -> None:
    hanging = order(options=faulty("hang_in_c"))

    def cancel_once_it_runs() -> None:
        while not list(launcher.root.rglob("log-*.txt")):
            time.sleep(0.05)
        time.sleep(0.5)
        launcher.kill(hanging.request.tag)

    threading.Thread(target=cancel_once_it_runs, daemon=True).start()
    report = launcher.run(hanging)
    assert report.failure is not None and report.failure.kind is K.CANCELLED
    assert report.seconds < LIMITS["steady"], "its limit did not end it"
    assert ended_why(report, rank=0) == "the attempt was cancelled"
    assert launcher.run(order(trial_id=2)).failure is None  # and the next one runs


def test_an_attempt_cancelled_before_it_came_does_not_start(launcher: NodeLauncher) -> None:
    hanging = order(options=faulty("hang"))
    launcher.kill(hanging.request.tag)
    report = launcher.run(hanging)
    assert report.failure is not None and report.failure.kind is K.CANCELLED


def test_an_attempt_cancelled_after_its_end_leaves_nothing_behind(launcher: NodeLauncher) -> None:
    tags = []
    for trial_id in range(3):
        ended = order(trial_id=trial_id, world_size=1)
        assert launcher.run(ended).failure is None
        launcher.kill(ended.request.tag)
        tags.append(ended.request.tag)
    assert launcher._cancelled.isdisjoint(tags)  # it lives for thousands of attempts


def test_a_closed_launcher_holds_no_descriptor(tmp_path: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    launcher = NodeLauncher(tmp_path, node="node-a")
    launcher.rendezvous()
    assert launcher.run(order(world_size=1)).failure is None
    launcher.close()
    launcher.kill("test/1/1")  # a cancellation that comes late
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_progress_is_told_while_ranks_run(launcher: NodeLauncher) -> None:
    assert launcher.progress() is None
    hanging = order(options=faulty("hang", at="step_3"))
    thread = threading.Thread(target=launcher.run, args=[hanging])
    thread.start()
    deadline = time.monotonic() + 60
    while (
        (heartbeat := launcher.progress()) is None or heartbeat.phase is not Phase.STEADY
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    launcher.kill(hanging.request.tag)
    thread.join()
    assert heartbeat is not None and (heartbeat.phase, heartbeat.step) == (Phase.STEADY, 3)


def test_a_launcher_runs_one_attempt_at_a_time_and_none_once_closed(
    launcher: NodeLauncher, tmp_path: Path
) -> None:
    thread = threading.Thread(target=launcher.run, args=[order(options=faulty("hang"))])
    thread.start()
    while launcher.progress() is None:
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="busy"):
        launcher.run(order(trial_id=2))
    launcher.close()  # cancels what runs
    thread.join()
    with pytest.raises(RuntimeError, match="closed"):
        launcher.run(order(trial_id=3))


@pytest.mark.parametrize("victim", ["outer warden", "inner warden", "server"])
def test_the_next_attempt_gets_a_new_server_when_one_was_killed(
    launcher: NodeLauncher, tmp_path: Path, victim: str
) -> None:
    def strike() -> None:
        while launcher.progress() is None or len(tree_of(tmp_path)) < 5:
            time.sleep(0.01)
        os.kill(
            tree_of(tmp_path)[("outer warden", "inner warden", "server").index(victim)],
            signal.SIGKILL,
        )

    thread = threading.Thread(target=strike)
    thread.start()
    options = {"faults": [*faulty("leak_children", at="init")["faults"], *faulty("hang")["faults"]]}
    report = launcher.run(order(options=options))
    thread.join()
    assert report.failure is not None and report.failure.kind is K.LAUNCH_FAILED, report.failure
    assert "rank server" in report.failure.message
    assert launcher.run(order(trial_id=2)).failure is None


@pytest.mark.parametrize("victim", ["outer warden", "inner warden", "server"])
def test_a_rank_server_that_is_asked_from_outside_to_end_was_preempted(
    launcher: NodeLauncher, tmp_path: Path, victim: str
) -> None:
    def strike() -> None:
        while launcher.progress() is None or len(tree_of(tmp_path)) < 5:
            time.sleep(0.01)
        victims = dict(
            zip(("outer warden", "inner warden", "server"), tree_of(tmp_path), strict=False)
        )
        os.kill(victims[victim], signal.SIGTERM)

    thread = threading.Thread(target=strike)
    thread.start()
    report = launcher.run(order(options=faulty("hang")))
    thread.join()
    assert report.failure is not None
    assert (report.failure.kind, report.failure.signal) == (K.PREEMPTED, signal.SIGTERM), (
        report.failure
    )
    assert launcher.run(order(trial_id=2)).failure is None


def test_an_error_in_the_kernel_s_log_tells_what_a_rank_on_a_gpu_died_of(
    shared_launcher: NodeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    records = [
        f"4,1,{now - 10**9},-;NVRM: Xid (PCI:0000:3b:00): 48, pid=1, name=python",  # before
        # An error of another device.
        f"4,2,{now + 10**9},-;NVRM: Xid (PCI:0000:99:00): 95, pid=1, name=python",
        f"4,3,{now + 10**9},-;NVRM: Xid (PCI:0000:3B:00): 79, pid=1, GPU has fallen off the bus.",
    ]
    monkeypatch.setattr("orchestrator.node.launcher.kernel_records", lambda: iter(records))
    monkeypatch.setattr("orchestrator.node.launcher.GpuMonitor.addresses", {"0000:3b:00"})
    report = shared_launcher.run(
        order(world_size=1, devices=["0"], options=faulty("lost_rank", at="step_2"))
    )
    assert report.failure is not None
    assert (report.failure.kind, report.failure.node) == (K.XID, "node-a")
    assert (
        report.failure.message
        == "rank 0 lost its GPU in steady: Xid 79 (GPU has fallen off the bus): died of SIGKILL"
    )


def test_a_server_is_replaced_before_it_grows_old(
    launcher: NodeLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.node.launcher.MAX_GANGS_PER_SERVER", 2)
    servers = []
    for trial_id in range(4):
        assert launcher.run(order(trial_id=trial_id)).failure is None
        servers.append(tree_of(tmp_path))
    assert servers[0] == servers[1] != servers[2] == servers[3]


def test_a_program_that_cannot_be_imported_says_so_in_its_log(launcher: NodeLauncher) -> None:
    report = launcher.run(order("workloads.of_another_project"))
    assert report.failure is not None and report.failure.kind is K.USER_ERROR
    assert (
        "No module named 'workloads.of_another_project'"
        in report.failure.message + report.failure.log_tail
    )


def test_a_rank_is_a_session_of_its_own_that_dies_with_its_server_and_inherits_nothing(
    launcher: NodeLauncher, tmp_path: Path
) -> None:
    core = max(os.sched_getaffinity(0))
    report = launcher.run(order("tests.node.rank_facts", world_size=1, cpus=[core]))
    facts = json.loads(report.ranks[0].log_tail)
    assert facts == {
        "open": [0, 1, 2],
        "leads_its_session": True,
        "death_signal": signal.SIGKILL,
        "core_limit": 0,
        "cpus": [core],
        "cwd": str(tmp_path / "trial-1" / "attempt-1" / "node-0"),
        "cuda": "",  # for CPUs: without a GPU
        "omp": "1",
    }
    assert (
        report.failure is not None and report.failure.kind is K.BAD_RESULT
    )  # it ended well, and wrote none


@pytest.mark.parametrize(
    ("num_cores", "known", "threads"),
    [
        (64, {"node_slots": 8}, 8),  # for seven other gangs
        (64, {}, 64),
        (64, {"node_slots": 8, "cpus": [0, 1, 2, 3]}, 4),  # pinned: these are its own
        (4, {"node_slots": 8}, 1),
    ],
)
def test_ranks_of_all_gangs_share_the_cores_of_their_node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_cores: int,
    known: dict[str, Any],
    threads: int,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)))
    assert gang_environment(order(world_size=1, **known), 29500, tmp_path, root=tmp_path)[
        "OMP_NUM_THREADS"
    ] == str(threads)


@pytest.mark.parametrize(
    ("known", "interfaces"),
    [
        ({}, {"GLOO_SOCKET_IFNAME": "lo"}),
        (
            {"local_world_size": 1, "master_port": 29500, "address": "127.0.0.1"},
            {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"},
        ),
        (
            {"local_world_size": 1, "master_port": 29500, "address": "192.0.2.77"},
            {},
        ),  # RFC 5737: held by no interface
    ],
)
def test_ranks_of_several_nodes_are_told_the_interface_that_holds_the_nodes_address(
    tmp_path: Path, known: dict[str, Any], interfaces: dict[str, str]
) -> None:
    told = gang_environment(order(**known), 29500, tmp_path, root=tmp_path)
    assert {name: value for name, value in told.items() if name.endswith("_IFNAME")} == interfaces


def test_the_driver_of_a_gang_on_gpus_is_told_by_its_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("orchestrator.node.launcher.driver_version", lambda: "580.1")
    assert _with_driver(Software(), order(devices=["0", "1"])).stack.driver == "580.1"
    assert _with_driver(Software(), order()).stack.driver is None
    told = Software(stack=Stack(driver="570.0"))
    assert _with_driver(told, order(devices=["0", "1"])) == told


def test_a_server_imports_without_a_gpu_or_compiler_processes_and_its_ranks_have_the_usual(
    launcher: NodeLauncher,
) -> None:
    """torch asks NVML about GPUs in the server, since a context does not survive a fork."""
    report = launcher.run(order("workloads.command", options={"argv": ["env"]}, world_size=1))
    told = dict(line.split("=", 1) for line in report.ranks[0].log_tail.splitlines() if "=" in line)
    assert "LOCAL_WORLD_SIZE" in told
    assert not told.keys() & set(RANK_SERVERS_OWN)
    server = _environment("identity")
    assert (server["PYTORCH_NVML_BASED_CUDA_CHECK"], server["TORCH_WARM_POOL"]) == ("1", "0")
    assert server["CUDA_VISIBLE_DEVICES"] == ""


def test_what_ranks_were_told_of_communication_is_reported_and_no_secret(
    shared_launcher: NodeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    report = shared_launcher.run(order(environment={"NCCL_SECRET": "s3cr3t", "HF_TOKEN": "s3cr3t"}))
    assert report.environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_ALGO": "Ring"}
    assert report.set_by_launcher == ("GLOO_SOCKET_IFNAME",)


def test_an_order_for_gpus_names_one_per_rank(shared_launcher: NodeLauncher) -> None:
    on_cpu = order()
    with pytest.raises(ValueError, match="one device per rank"):
        shared_launcher.run(
            replace(
                on_cpu,
                request=on_cpu.request.model_copy(update={"device": Device.CUDA}),
                devices=["0"],
            )
        )


def test_programs_see_neither_the_way_into_the_database_nor_our_python_path(
    launcher: NodeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SWEEP_DB", "SWEEP_DB_READER", "PGPASSWORD", "PGPASSFILE"):
        monkeypatch.setenv(name, "secret")
    report = launcher.run(order("workloads.command", options={"argv": ["env"]}, world_size=1))
    assert "MASTER_PORT=" in report.ranks[0].log_tail
    # Another Python must see its user's folders, and none of ours.
    expected = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    lines = report.ranks[0].log_tail.splitlines()
    assert [line for line in lines if line.startswith("PYTHONPATH=")] == expected
    assert "secret" not in report.ranks[0].log_tail


def test_a_gang_of_several_nodes_needs_a_port_that_all_know(shared_launcher: NodeLauncher) -> None:
    with pytest.raises(ValueError, match="rendezvous"):
        shared_launcher.run(order(world_size=2, local_world_size=1))


def test_one_process_may_stand_for_the_ranks_of_a_node_where_nothing_is_trained(
    shared_launcher: NodeLauncher,
) -> None:
    whole = shared_launcher.run(order(world_size=8))
    stood_for = shared_launcher.run(
        order(
            trial_id=2,
            world_size=8,
            one_rank_per_node=True,
            devices=[str(n) for n in range(8)],
        )
    )
    assert stood_for.failure is None
    assert [outcome.rank for outcome in stood_for.ranks] == [0]
    one, of_many = stood_for.ranks[0].result, whole.ranks[0].result
    assert one is not None
    assert of_many is not None
    assert one.model_copy(update={"phase_seconds": of_many.phase_seconds}) == of_many
