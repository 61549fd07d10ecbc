"""The rank's half of the protocol: read the request, report progress, leave a result or a failure
note. Needs no torch.

A workload is a module with `main() -> int`. It is called in a fresh process with torchrun's
environment and SWEEP_RUN_DIR set, in its run directory, with stdout and stderr going to the rank's
log. It returns the rank's exit code:

    def main() -> int:
        return rank.run(train)                     # train(rank: Rank) -> RankResult

It may have `warm_up()`. The rank server calls it once, before it forks the first rank.
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

# Every heartbeat is padded to this length, so that one write replaces the last.
_HEARTBEAT_BYTES = 96


class ConfigRejected(Exception):
    """The workload cannot run this layout. The message names the field and the possible values."""


class OutOfMemoryError(RuntimeError):
    """torch's error, by name, for a workload without a device."""


class NotFinite(Exception):
    """The training has diverged: it computes NaN or infinity, so its speed is not measured."""

    @classmethod
    def of(cls, what: str, value: object, *, step: float | None = None) -> NotFinite:
        """`what` is the loss or the gradient norm.

        `step`: its number, as a user's program counts, else from 1 with the warm-up.
        """
        where = f" of step {step:.15g}" if step is not None else ""
        return cls(
            f"the {what}{where} is {value}; a training that diverges is not measured: "
            "lower the learning rate, or widen the precision"
        )


@dataclass(kw_only=True)
class Rank:
    """This process's place in its gang, and its reports to its launcher."""

    request: TrialRequest
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    run_dir: Path
    phase: Phase = field(default=Phase.START, init=False)
    step: int = field(default=0, init=False)  # begun, warm-up included
    finished: bool = field(default=False, init=False)
    _heartbeat_fd: int | None = field(default=None, init=False, repr=False)
    # By phase, monotonic.
    _began: dict[Phase, float] = field(default_factory=dict, init=False, repr=False)

    def heartbeat(
        self, phase: Phase, step: int = 0, *, timed: bool = False, enough: bool = False
    ) -> None:
        """Report progress. Costs microseconds: call it at the start of each phase and of each step.

        The use of the node's GPUs counts only while every rank's last heartbeat is `timed`.
        `enough`: the gang's numbers are in, so the launcher may end it.
        """
        now = time.monotonic()
        self.phase, self.step = phase, step
        self._began.setdefault(phase, now)
        flag = "true" if timed else "false"
        more = ',"enough":true' if enough else ""
        text = f'{{"phase":"{phase}","step":{step},"timed":{flag},"at":{now:.6f}{more}}}'
        beat = text.ljust(_HEARTBEAT_BYTES).encode()
        if self._heartbeat_fd is None:
            path = self.run_dir / heartbeat_file(self.rank)
            self._heartbeat_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # One write of a fixed size: a reader sees a whole heartbeat, or an empty file before it.
        os.pwrite(self._heartbeat_fd, beat, 0)

    def phase_seconds(self) -> dict[Phase, float]:
        """Seconds in each phase so far; the first since the process started, by its own clock.

        A phase without a heartbeat is part of the one before it, and missing here.
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
        """Add teardown: the time since these phases, which follow each other from the start on."""
        lived = seconds_since_process_start()
        if lived is None or Phase.START not in phases:
            return dict(phases)
        return {**phases, Phase.TEARDOWN: max(lived - sum(phases.values()), 0.0)}

    def finish(self, result: RankResult, *, enough: bool = False) -> None:
        """Write the result and enter teardown: the end of this process no longer matters to it.

        `enough`: nor does the end of any other rank.
        """
        _write_renamed(self.run_dir / result_file(self.rank), encode(result))
        self.finished = True
        self.heartbeat(Phase.TEARDOWN, self.step, enough=enough)

    def withdraw(self, exc: Exception) -> None:
        """Replace a result by a note of why it does not count."""
        self.refuse(exc)
        _write_renamed(self.run_dir / result_file(self.rank), b'"withdrawn"')
        self.heartbeat(Phase.TEARDOWN, self.step)

    def close(self) -> None:
        """Close the file of heartbeats, which otherwise stays open as long as the process."""
        if self._heartbeat_fd is not None:
            os.close(self._heartbeat_fd)
            self._heartbeat_fd = None

    def refuse(self, exc: Exception) -> None:
        """Leave a note of why there is no result."""
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
    """Run a rank to its exit code: write its result, or turn its exception into a failure note and
    1.

    `main` may call `Rank.finish` before it destroys its process group, so that a hang there costs
    nothing; otherwise its return value is written here.
    """
    faulthandler.enable()
    write_stacks_if_asked()
    rank = context()
    try:
        result = main(rank)
        if not rank.finished:
            rank.finish(result)
    except Exception as exc:  # noqa: BLE001
        traceback.print_exc()
        rank.refuse(exc)
        return 1
    return 0


def write_stacks_if_asked() -> None:
    """Write this process's stacks to stderr at SIGUSR1, instead of ending by it.

    The launcher asks so before it kills a hung rank whose stacks it cannot read from outside.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


def seconds_since_process_start() -> float | None:
    """The age of this process by the kernel's clock; None without /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        # Field 22 of proc(5), in clock ticks after boot.
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def failure_note(exc: BaseException, rank: Rank) -> RankFailure:
    """Describe an exception for the launcher."""
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
    prefix = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return prefix + cls.__qualname__


def _cuda_memory() -> tuple[int | None, int | None]:
    """Peak bytes allocated on this rank's GPU, and its capacity, if it uses CUDA."""
    # Not imported here: a workload without torch must not pay for it.
    torch: Any = sys.modules.get("torch")
    # In this order: the question whether a GPU is available never returns if its driver hangs.
    if torch is None or not torch.cuda.is_initialized() or not torch.cuda.is_available():
        return None, None
    try:
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        return int(torch.cuda.max_memory_allocated()), int(device.total_memory)
    except RuntimeError:  # the CUDA context itself is broken
        return None, None


def _write_renamed(path: Path, text: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(text)
    temporary.replace(path)
