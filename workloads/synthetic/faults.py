"""Every fault that a rank can have, on purpose."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from orchestrator.core.pretend.synthetic import out_of_memory_text
from orchestrator.core.sweepfile.synthetic_options import FaultKind, SyntheticFault
from orchestrator.core.trial.protocol import Phase, result_file
from workloads.rank import ConfigRejected, NotFinite, OutOfMemoryError, Rank


def inject(fault: SyntheticFault, rank: Rank) -> None:
    _ACTIONS[fault.fault](rank)


def out_of_memory(rank: Rank, **num_bytes: int) -> OutOfMemoryError:
    return OutOfMemoryError(out_of_memory_text(rank.local_rank, **num_bytes))


def _oom(rank: Rank) -> None:
    raise out_of_memory(rank, wanted_bytes=2 << 30, used_bytes=79 << 30, capacity_bytes=80 << 30)


def _host_oom(rank: Rank) -> None:
    raise MemoryError


def _config_rejected(rank: Rank) -> None:
    size = rank.request.layout.micro_batch_size
    raise ConfigRejected(f"micro_batch_size {size} is refused on purpose; no other is refused")


def _nan_loss(rank: Rank) -> None:
    raise NotFinite.of("loss", float("nan"), step=max(1, rank.step))


def _xid(rank: Rank) -> None:
    process = f"pid={os.getpid()}, name=python"
    sys.stderr.write(f"NVRM: Xid (PCI:0000:1b:00): 79, {process}, GPU has fallen off the bus.\n")
    raise RuntimeError("CUDA error: unspecified launch failure")


def _crash(rank: Rank) -> None:
    raise ValueError("a mistake made on purpose")


def _exit(rank: Rank) -> None:
    sys.exit(1)


def _die_of(number: signal.Signals) -> Callable[[Rank], None]:
    def die(rank: Rank) -> None:
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    return die


def _segfault(rank: Rank) -> None:
    ctypes.string_at(0)


def _hang(rank: Rank) -> None:
    while True:
        time.sleep(3600)


def _hang_in_c(rank: Rank) -> None:
    ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the interpreter's lock


def _hang_ignoring_signals(rank: Rank) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    _hang(rank)


def _nccl_noise(rank: Rank) -> None:
    for line in (
        "NCCL INFO NET/Plugin: No plugin found (libnccl-net.so), using internal implementation",
        "NCCL WARN NET/IB : Unable to open device mlx5_3, Connection reset by peer (ignored)",
        "[W] Warning: gloo/transport/tcp retried a connection",
    ):
        sys.stderr.write(f"node:{os.getpid()}:{rank.rank} [{rank.local_rank}] {line}\n")


def _nccl_error(rank: Rank) -> None:
    raise RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network "
        "error, ncclRemoteError: A call failed"
    )


def _port_clash(rank: Rank) -> None:
    raise RuntimeError(
        "The server socket has failed to listen on any local network address. "
        "port: 29500, error: EADDRINUSE"
    )


def _rubbish_result(rank: Rank) -> None:
    (rank.run_dir / result_file(rank.rank)).write_text(
        '{"step_seconds": [NaN, -1, 1e400], "peak_flops": "lots"}'
    )
    rank.heartbeat(Phase.TEARDOWN, rank.step)
    os._exit(0)


def _no_result(rank: Rank) -> None:
    os._exit(0)


def _leak_children(rank: Rank) -> None:
    """A child, a grandchild, a child in its own session, a daemon, and two data loader workers."""
    idle = ["sleep", "600"]
    subprocess.Popen(idle)
    shell = subprocess.Popen(
        ["sh", "-c", "sleep 600 >&- & echo; sleep 600"], stdout=subprocess.PIPE
    )
    assert shell.stdout is not None
    shell.stdout.readline()  # the grandchild is there
    subprocess.Popen(idle, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", idle)
        os._exit(0)
    # As a DataLoader's workers: forked, and waiting for work that never comes.
    for _ in range(2):
        multiprocessing.get_context("fork").Process(
            target=time.sleep, args=(600,), daemon=True
        ).start()


def _leak_unmarked_child(rank: Rank) -> None:
    subprocess.Popen(["sleep", "600"], start_new_session=True, env={})


def _log_flood(rank: Rank) -> None:
    line = "x" * 1023 + "\n"
    for _ in range(30_000):  # 30 MB
        sys.stdout.write(line)
    sys.stdout.write("the last line\n")


_ACTIONS: Mapping[FaultKind, Callable[[Rank], None]] = {
    FaultKind.OOM: _oom,
    FaultKind.HOST_OOM: _host_oom,
    FaultKind.CONFIG_REJECTED: _config_rejected,
    FaultKind.CRASH: _crash,
    FaultKind.EXIT: _exit,
    FaultKind.SEGFAULT: _segfault,
    FaultKind.ABORT: _die_of(signal.SIGABRT),
    FaultKind.NAN_LOSS: _nan_loss,
    FaultKind.PREEMPTED: _die_of(signal.SIGTERM),
    FaultKind.XID: _xid,
    FaultKind.LOST_RANK: _die_of(signal.SIGKILL),
    FaultKind.STOP: _die_of(signal.SIGSTOP),
    FaultKind.HANG: _hang,
    FaultKind.HANG_IN_C: _hang_in_c,
    FaultKind.HANG_IGNORING_SIGNALS: _hang_ignoring_signals,
    FaultKind.NCCL_NOISE: _nccl_noise,
    FaultKind.NCCL_ERROR: _nccl_error,
    FaultKind.PORT_CLASH: _port_clash,
    FaultKind.RUBBISH_RESULT: _rubbish_result,
    FaultKind.NO_RESULT: _no_result,
    FaultKind.LEAK_CHILDREN: _leak_children,
    FaultKind.LEAK_UNMARKED_CHILD: _leak_unmarked_child,
    FaultKind.LOG_FLOOD: _log_flood,
}
