"""Looks at the machine and the program while a gang runs: its GPUs, its CPU cores, its Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.node.cpu_watch import CpuWatch
from orchestrator.node.gpu_monitor import GpuMonitor
from orchestrator.node.program_software import AttemptSoftware


@dataclass(frozen=True, kw_only=True)
class MachineWatch:
    """The observers of one attempt. Each keeps what it saw for the attempt's report."""

    gpus: GpuMonitor
    cpus: CpuWatch
    program: AttemptSoftware

    def tick(self, ranks: Sequence[int | None], *, timed_steps_run: bool) -> None:
        """Look once. `ranks`: the process ids of the ranks that are known."""
        self.gpus.count(timed_steps_run)
        self.cpus.tick(timed_steps_run)
        self.program.find_python(ranks, timed_steps_run=timed_steps_run)
