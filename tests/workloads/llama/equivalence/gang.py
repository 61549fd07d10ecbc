"""Ranks that train combination after combination in one process group, forked after the imports."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tests.workloads.llama.equivalence.combination import Combination, Distance
from tests.workloads.llama.equivalence.forked_ranks import (
    ending_at_errors,
    join_group,
    run_ranks,
)
from tests.workloads.llama.equivalence.training import Training, distance_of, train_alone
from workloads.llama.mesh import Groups

PATIENCE_SECONDS = 240
PRELOAD = "tests.workloads.llama.equivalence.preload"


@dataclass(frozen=True, kw_only=True)
class Results:
    distances: list[Distance]
    # The sum of all ranks, from fork to end: other programs hardly change it, unlike the duration.
    cpu_seconds: float


References = dict[Combination, Training]


def references_of(combinations: Sequence[Combination]) -> References:
    """Train each reference once, in this process."""
    wanted = dict.fromkeys(combination.reference for combination in combinations)
    return {reference: train_alone(reference) for reference in wanted}


def run_gang(num_ranks: int, combinations: Sequence[Combination], folder: Path) -> Results:
    """Train the combinations on so many ranks. Raises RuntimeError with a rank's traceback."""
    folder.mkdir()
    torch.save((combinations, references_of(combinations)), folder / "work.pt")
    run_ranks(_run_rank, num_ranks, folder, patience_seconds=PATIENCE_SECONDS, preload=PRELOAD)
    results: Results = torch.load(folder / "results.pt", weights_only=False)
    return results


def _run_rank(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS - 10)
    join_group(rank, num_ranks, port)
    combinations, references = torch.load(folder / "work.pt", weights_only=False)
    groups, distances = Groups(), []
    for combination in combinations:
        with ending_at_errors(rank, combination.name, folder):
            place = groups.place(combination.layout, replicas=combination.llama_options.replicas)
            found = distance_of(combination, place, references[combination.reference])
        distances.append(found)
    cpu_seconds = torch.tensor(time.process_time())
    dist.all_reduce(cpu_seconds)
    if rank == 0:
        results = Results(distances=distances, cpu_seconds=cpu_seconds.item())
        torch.save(results, folder / "results.pt")
    dist.destroy_process_group()
