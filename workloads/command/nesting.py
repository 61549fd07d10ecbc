"""Looks a few times, until steps are timed, for ranks started twice and steps written twice."""

from __future__ import annotations

import time
from collections.abc import Sequence

from orchestrator.core.sweepfile.command_options import Processes
from orchestrator.core.trial.nested_launch import FIX, nested_launch, wrong_world_size
from workloads.command.connected_ranks import train_together
from workloads.command.process_tree import Writers, tree_of
from workloads.command.program import Program
from workloads.command.repeated_steps import RepeatedSteps
from workloads.rank import ConfigRejected, Rank

# A look takes a millisecond or two. Torchrun shows itself at once, other launchers once they start
# ranks.
_FIRST_SECONDS = 0.2
# The time between two looks, as part of the time that has passed.
_SHARE = 0.1


class NestingWatch:
    """Rank 0's checks of the processes below it."""

    def __init__(self, program: Program, rank: Rank, *, processes: Processes) -> None:
        self._program, self._rank, self._processes = program, rank, processes
        self._writers, self._repeated = Writers(program.place.metrics_file), RepeatedSteps()
        self._began = self._next_at = time.monotonic()
        self._has_steps = self._has_seen_all = False

    def check(self, num_steps: int, step_seconds: Sequence[float]) -> None:
        """Look, if it is time to: at processes, and at the number of lines with what they tell.

        Raises ConfigRejected with what was found, and the fix.
        """
        now, is_first_step = time.monotonic(), num_steps > 0 and not self._has_steps
        self._check_repeated(num_steps, step_seconds, now)
        self._has_steps |= num_steps > 0
        if now < self._next_at and not is_first_step:
            return
        self._next_at = now + max(_FIRST_SECONDS, _SHARE * (now - self._began))
        if not self._has_seen_all:
            self._check_processes()
            # Later looks would take time from steps that are timed.
            self._has_seen_all = num_steps > self._rank.request.measurement.warmup_steps
        if (num := self._writers.count) > 1:
            raise ConfigRejected(f"{num} processes write steps to one file: {self._one_writer}")

    def check_number(self, num_steps: int, num_asked: int) -> None:
        """Raise ConfigRejected if each rank of this node seems to have written all the steps."""
        num_ranks = self._rank.local_world_size
        if num_ranks > 1 and num_steps == num_ranks * num_asked:
            raise ConfigRejected(
                f"the program wrote {num_steps} steps, {num_ranks} times the {num_asked} that were"
                f" asked for, so each of {num_ranks} processes seems to write them:"
                f" {self._one_writer}"
            )

    def _check_repeated(self, num_steps: int, step_seconds: Sequence[float], now: float) -> None:
        num_ranks = self._rank.local_world_size
        self._repeated.note(num_steps, step_seconds=step_seconds, at=now)
        if self._repeated.are_written_by(num_ranks, step_seconds=step_seconds):
            raise ConfigRejected(f"each step is written {num_ranks} times: {self._one_writer}")

    def _check_processes(self) -> None:
        tree = tree_of(self._program.process.pid)
        if self._processes is Processes.PER_RANK:
            if (seen := nested_launch(tree, self._program.environment)) is not None:
                raise ConfigRejected(f"the program starts its own launcher ({seen}): {FIX}")
            if train_together([process.pid for process in tree]):
                raise ConfigRejected(
                    "the program starts ranks of its own, as torch.multiprocessing.spawn does (two"
                    f" of its processes have torch, and a connection to each other): {FIX}"
                )
        elif seen := wrong_world_size(tree, self._rank.world_size):
            raise ConfigRejected(
                f"the program's launcher starts another number of ranks than the layout has"
                f" ({seen}): give it {{num_nodes}} and {{gpus_per_node}}"
            )
        if self._has_steps:
            self._writers.find_among([process.pid for process in tree])

    @property
    def _one_writer(self) -> str:
        if self._processes is Processes.PER_NODE:
            return "let the process with RANK 0 write them, and no other"
        return f"let one process write them; if the program starts its own launcher, {FIX}"
