"""Ranks that train combination after combination in one process group, forked after the imports."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.workloads.llama.equivalence.combination import Combination, Distance
from tests.workloads.llama.equivalence.training import Training, distance_of, train_alone
from workloads.llama.mesh import Groups

PATIENCE_SECONDS = 240
PRELOAD = "tests.workloads.llama.equivalence.preload"


@dataclass(frozen=True, kw_only=True)
class Results:
    distances: list[Distance]
    # Of all ranks, from fork to end: unlike their duration, hardly changed by other programs.
    cpu_seconds: float


References = dict[Combination, Training]


def references_of(combinations: Sequence[Combination]) -> References:
    """Train each reference once, in this process."""
    wanted = dict.fromkeys(combination.reference for combination in combinations)
    return {reference: train_alone(reference) for reference in wanted}


def run_gang(num_ranks: int, combinations: Sequence[Combination], folder: Path) -> Results:
    """Train the combinations on so many ranks. Raises RuntimeError with a rank's traceback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    torch.save((combinations, references_of(combinations)), folder / "work.pt")
    # A fork would inherit dead threads of torch.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([PRELOAD])
    ranks = [
        server.Process(target=_run_rank, args=(rank, num_ranks, port, folder))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + PATIENCE_SECONDS
    for process in ranks:
        process.join(timeout=max(end - time.monotonic(), 0.1))
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    notes = [path.read_text() for path in sorted(folder.glob("failure-*.txt"))]
    if notes or any(process.exitcode for process in ranks):
        raise RuntimeError("\n\n".join(notes) or f"exit codes {[p.exitcode for p in ranks]}")
    results: Results = torch.load(folder / "results.pt", weights_only=False)
    return results


def _run_rank(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS - 10)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    combinations, references = torch.load(folder / "work.pt", weights_only=False)
    groups, distances = Groups(), []
    for combination in combinations:
        try:
            place = groups.place(combination.layout, replicas=combination.llama_options.replicas)
            found = distance_of(combination, place, references[combination.reference])
        except Exception:  # noqa: BLE001
            note = f"rank {rank}, {combination.name}\n{traceback.format_exc()}"
            (folder / f"failure-{rank}.txt").write_text(note)
            # Without the other ranks, nothing can be ended in order.
            os._exit(1)
        distances.append(found)
    cpu_seconds = torch.tensor(time.process_time())
    dist.all_reduce(cpu_seconds)
    if rank == 0:
        results = Results(distances=distances, cpu_seconds=cpu_seconds.item())
        torch.save(results, folder / "results.pt")
    dist.destroy_process_group()
