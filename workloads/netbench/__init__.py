"""Measures collectives among the ranks of a gang by message size: gloo on CPUs, NCCL on GPUs.

It trains nothing. Options: `collectives`, `sizes` (bytes, ascending), `seconds` for each collective
and size.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.core.trial.protocol import CollectiveTime, Device, Phase, RankResult
from workloads import rank as ranks
from workloads.llama.stack import describe_stack
from workloads.llama.timing import synchronize
from workloads.rank import Rank
from workloads.rendezvous import join_gang

# Batches of calls without a pause; the median of their times counts.
BATCHES = 5
MOST_CALLS = 200  # in a batch


def main() -> int:
    return ranks.run(measure)


def measure(rank: Rank) -> RankResult:
    """Time every collective at every size. All ranks report the slowest rank's numbers."""
    options = rank.request.options
    began = time.perf_counter()
    rank.heartbeat(Phase.RENDEZVOUS)
    device = _device(rank)
    join_gang(rank, device)
    met = time.perf_counter()
    rank.heartbeat(Phase.FIRST_STEP)
    _slowest(0.0, device)
    found: list[CollectiveTime] = []
    step = 1
    for collective in options["collectives"]:
        for size in options["sizes"]:
            step += 1
            rank.heartbeat(Phase.STEADY, step)
            call, message_bytes = _PREPARE[collective](size, rank.rank, rank.world_size, device)
            seconds, num_calls = _time(call, device, seconds=float(options["seconds"]))
            found.append(
                CollectiveTime(
                    collective=collective,
                    message_bytes=message_bytes,
                    seconds=seconds,
                    num_calls=num_calls,
                )
            )
    result = RankResult(
        step_seconds=[one.seconds for one in found] or [time.perf_counter() - met],
        phase_seconds={Phase.RENDEZVOUS: met - began, Phase.STEADY: time.perf_counter() - met},
        collectives=found if rank.rank == 0 else [],
        stack=describe_stack(device),
    )
    rank.finish(result)
    dist.destroy_process_group()
    return result


def _device(rank: Rank) -> torch.device:
    if rank.request.device is Device.CPU:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return torch.device("cpu")
    device = torch.device("cuda", rank.local_rank)
    torch.cuda.set_device(device)
    return device


def _time(call: Callable[[], object], device: torch.device, *, seconds: float) -> tuple[float, int]:
    """The median time of a call over batches, on the slowest rank, and the number of calls."""
    for _ in range(2):  # the first makes connections
        call()
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    once = _slowest(time.perf_counter() - began, device)
    calls = max(1, min(MOST_CALLS, int(seconds / BATCHES / max(once, 1e-7))))
    batches = []
    for _ in range(BATCHES):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        batches.append(_slowest((time.perf_counter() - began) / calls, device))
    return median(batches), calls * BATCHES


def _slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


# Each returns a function that does one call, and the bytes of its message, from tensors of about
# the requested size.
_Prepared = tuple[Callable[[], object], int]


def _all_reduce(size: int, rank: int, world_size: int, device: torch.device) -> _Prepared:
    tensor = torch.zeros(size // 4, device=device)
    return partial(dist.all_reduce, tensor), tensor.nbytes


def _all_gather(size: int, rank: int, world_size: int, device: torch.device) -> _Prepared:
    part = torch.zeros(max(1, size // 4 // world_size), device=device)
    whole = torch.zeros(part.numel() * world_size, device=device)
    return partial(dist.all_gather_into_tensor, whole, part), whole.nbytes


def _reduce_scatter(size: int, rank: int, world_size: int, device: torch.device) -> _Prepared:
    part = torch.zeros(max(1, size // 4 // world_size), device=device)
    whole = torch.zeros(part.numel() * world_size, device=device)
    return partial(dist.reduce_scatter_tensor, part, whole), whole.nbytes


def _send_recv(size: int, rank: int, world_size: int, device: torch.device) -> _Prepared:
    """A ring: every rank sends to the next and receives from the one before, both at once."""
    sent, received = torch.zeros(size // 4, device=device), torch.zeros(size // 4, device=device)

    def call() -> None:
        operations: list[Any] = [
            dist.P2POp(dist.isend, sent, (rank + 1) % world_size),
            dist.P2POp(dist.irecv, received, (rank - 1) % world_size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return call, sent.nbytes


_PREPARE: dict[str, Callable[[int, int, int, torch.device], _Prepared]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "send_recv": _send_recv,
}
