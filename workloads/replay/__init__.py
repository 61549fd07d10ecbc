"""A workload that measures nothing: it returns a layout's result, or dies of its failure, from a
table.

`through_ray: true` starts it, one process for the whole gang: so a search is tested with the real
launcher and its files, without a GPU.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.pretend.replay import (
    LAYOUT_OPTION,
    failure_text,
    read_table,
    replayed_result,
)
from orchestrator.core.pretend.run_table import RunStatus
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import parse_key
from orchestrator.core.sweepfile.workload_options import ReplayOptions
from orchestrator.core.trial.protocol import Phase, RankResult
from workloads import rank as ranks
from workloads.options import parse_options
from workloads.rank import ConfigRejected, OutOfMemoryError, Rank


class RunError(RuntimeError):
    """The run failed when it was measured."""


def main() -> int:
    return ranks.run(replay)


def replay(rank: Rank) -> RankResult:
    """Find the layout's row. Raises ConfigRejected if there is none, else the row's failure."""
    request = rank.request
    asked = dict(request.options)
    layout = parse_key(str(asked.pop(LAYOUT_OPTION)))
    options = parse_options(ReplayOptions, asked)
    cell = Cell(
        model=request.model,
        num_gpus=layout.world_size,
        sequence_length=request.sequence_length,
        global_batch_size=layout.global_batch_size,
    )
    rank.heartbeat(Phase.FIRST_STEP)
    try:
        table = read_table(Path(options.table).read_text(encoding="utf-8"), options.table_id)
        run = table.run(cell, layout)
    except (OSError, UsageInvalid) as exc:
        raise ConfigRejected(f"{options.table}: {exc}") from exc
    match run.status:
        case RunStatus.OK:
            return replayed_result(run, table.device)
        case RunStatus.OOM:
            raise OutOfMemoryError(failure_text(run))
        case _:
            raise RunError(failure_text(run))
