"""What ranks run in tests of the launcher: a gloo all-reduce, unless `options` say otherwise."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from orchestrator.core.trial.protocol import Phase, RankResult
from workloads import rank as ranks
from workloads.rank import Rank


def main() -> int:
    return ranks.run(_all_reduce)


def _all_reduce(rank: Rank) -> RankResult:
    options = rank.request.options
    rank.heartbeat(Phase.RENDEZVOUS)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank.heartbeat(Phase.FIRST_STEP)
    total = torch.tensor([float(rank.rank + 1)])
    dist.all_reduce(total)
    assert total.item() == sum(range(1, rank.world_size + 1))
    rank.heartbeat(Phase.STEADY, 1)
    if options.get("raises_on") == rank.rank:
        raise ValueError("this rank, and no other")
    if options.get("dies_on") == rank.rank:
        os.kill(os.getpid(), int(options["signal"]))
    if options:
        # Without one rank, the others hang here or lose their connection.
        dist.all_reduce(total)
    result = RankResult(
        step_seconds=[0.1] * 6, tokens_per_step=torch.get_num_threads(), loss_first=total.item()
    )
    rank.finish(result)
    dist.destroy_process_group()
    return result
