"""The rank's half of the protocol: read the request, say how far it is, leave a result or a failure
note. Needs no torch.

A workload is a module with `main() -> int`. It is called in a fresh process with torchrun's
environment and SWEEP_RUN_DIR set, the run directory as working directory, and stdout and stderr
going to the rank's log. What it returns is the rank's exit code:

    def main() -> int:
        return rank.run(train)                     # train(rank: Rank) -> RankResult
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.core.trial.failures import is_out_of_memory
from orchestrator.core.trial.protocol import (
    REQUEST_FILE,
    RUN_DIR_VARIABLE,
    Phase,
    RankFailure,
    RankResult,
    TrialRequest,
    decode_request,
    encode,
    failure_file,
    heartbeat_file,
    result_file,
)

# Every heartbeat is padded to this, so that one write replaces the one before
_HEARTBEAT_BYTES = 96


class ConfigRejected(Exception):
    """The workload cannot run this layout, and never will.

    Say which field, and what would be possible.
    """


class OutOfMemoryError(RuntimeError):
    """What torch raises, by name, where no device is there to run out of memory."""


class NotFinite(Exception):
    """The training has diverged: what it computes is NaN or infinite, so its speed is not measured.
    Say what, and in which step.
    """

    @classmethod
    def of(cls, what: str, value: object, *, step: int | None = None) -> NotFinite:
        """`what` is the loss or the gradient norm; a step counts from 1, warm-up included."""
        where = f" of step {step}" if step is not None else ""
        return cls(
            f"the {what}{where} is {value}; a training that diverges is not measured: lower the learning rate, or widen the precision"
        )


@dataclass(kw_only=True)
class Rank:
    """This process's place in its gang, and how it speaks to its launcher."""

    request: TrialRequest
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    run_dir: Path
    phase: Phase = field(default=Phase.START, init=False)
    # Optimizer steps begun in this process, warm-up included
    step: int = field(default=0, init=False)
    finished: bool = field(default=False, init=False)
    _heartbeat_fd: int | None = field(default=None, init=False, repr=False)
    _began: dict[Phase, float] = field(
        default_factory=dict, init=False, repr=False
    )  # monotonic, by phase

    def heartbeat(self, phase: Phase, step: int = 0, *, timed: bool = False) -> None:
        """Say how far this rank is.

        Costs microseconds: call it at the start of each phase and of each step.

        What the node's GPUs do counts as usage only while every rank's last heartbeat said `timed`.
        """
        now = time.monotonic()
        self.phase, self.step = phase, step
        self._began.setdefault(phase, now)
        text = f'{{"phase":"{phase}","step":{step},"timed":{"true" if timed else "false"},"at":{now:.6f}}}'
        beat = text.ljust(_HEARTBEAT_BYTES).encode()
        if self._heartbeat_fd is None:
            path = self.run_dir / heartbeat_file(self.rank)
            _write_renamed(path, beat)
            self._heartbeat_fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        else:
            os.pwrite(self._heartbeat_fd, beat, 0)

    def phase_seconds(self) -> dict[Phase, float]:
        """Seconds in each phase so far, by this process's clock: the first since the process was
        started.

        A phase of which no heartbeat told is part of the one before it, and missing here.
        """
        now = time.monotonic()
        lived = seconds_since_process_start()
        began = ({Phase.START: now - lived} if lived is not None else {}) | self._began
        ends = [*list(began.values())[1:], now]
        return {
            phase: max(end - start, 0.0)
            for (phase, start), end in zip(began.items(), ends, strict=True)
        }

    def with_teardown(self, phases: Mapping[Phase, float]) -> dict[Phase, float]:
        """Phases that follow each other from the start of the process on, and as teardown what has
        passed since the last of them.
        """
        lived = seconds_since_process_start()
        if lived is None or Phase.START not in phases:
            return dict(phases)
        return {**phases, Phase.TEARDOWN: max(lived - sum(phases.values()), 0.0)}

    def finish(self, result: RankResult) -> None:
        """Hand the result over, then enter teardown: from here on, how this process ends no longer
        matters to the measurement.
        """
        _write_renamed(self.run_dir / result_file(self.rank), encode(result))
        self.finished = True
        self.heartbeat(Phase.TEARDOWN, self.step)

    def refuse(self, exc: Exception) -> None:
        """Leave a note of why there is no result, where the process itself ended well."""
        _write_renamed(self.run_dir / failure_file(self.rank), encode(failure_note(exc, self)))


def context() -> Rank:
    """Read this rank's place from the environment and its request from the run directory."""
    run_dir = Path(os.environ[RUN_DIR_VARIABLE])
    return Rank(
        request=decode_request((run_dir / REQUEST_FILE).read_bytes()),
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        run_dir=run_dir,
    )


def run(main: Callable[[Rank], RankResult]) -> int:
    """Run a rank to its exit code: its result is written, or its exception becomes a failure note
    and exit code 1.

    `main` may call `Rank.finish` itself before it takes its process group down, so that a hang
    there costs nothing; otherwise the result that it returns is written here.
    """
    faulthandler.enable()
    # The launcher asks for stacks so before it kills a hung rank
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    rank = context()
    try:
        result = main(rank)
        if not rank.finished:
            rank.finish(result)
    except Exception as exc:  # noqa: BLE001
        # The last frame of a rank: whatever it was has to reach the launcher
        traceback.print_exc()
        _write_renamed(rank.run_dir / failure_file(rank.rank), encode(failure_note(exc, rank)))
        return 1
    return 0


def seconds_since_process_start() -> float | None:
    """How long this process has lived, by the kernel's account; None where there is no /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        # Field 22 of proc(5): clock ticks after boot
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def failure_note(exc: BaseException, rank: Rank) -> RankFailure:
    """What the launcher is told of an exception."""
    allocated, capacity = _cuda_memory()
    name = _qualified_name(type(exc))
    message = str(exc)
    return RankFailure(
        exception=name[:4000],
        message=message[:4000],
        traceback="".join(traceback.format_exception(exc))[-100_000:],
        phase=rank.phase,
        step=rank.step,
        at_unix_seconds=time.time(),
        phase_seconds=rank.phase_seconds(),
        out_of_memory=any(
            is_out_of_memory(_qualified_name(cls), message) for cls in type(exc).__mro__[:-1]
        ),
        peak_memory_allocated_bytes=allocated,
        device_memory_bytes=capacity,
    )


def _qualified_name(cls: type) -> str:
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def _cuda_memory() -> tuple[int | None, int | None]:
    """Peak bytes allocated on this rank's GPU and its capacity, if the workload has imported torch
    and touched CUDA.
    """
    # Never imported here: a workload without torch must not pay for it
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None, None
    try:
        return int(torch.cuda.max_memory_allocated()), int(
            torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        )
    except RuntimeError:  # the CUDA context itself is broken
        return None, None


def _write_renamed(path: Path, text: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(text)
    temporary.replace(path)
