"""A cell of a known truth, and a search over it that asks and tells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.search.outcome import Measured, Outcome, OutOfMemory
from orchestrator.core.search.planner import Candidates, rank_candidates
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.sweepfile.search_section import Search, Strategy
from orchestrator.search.searcher import Searcher

LIMIT_BYTES = 79.0 * 2**30
TOKENS, SECONDS = Objective.TOKENS_PER_SECOND_PER_GPU, Objective.STEP_SECONDS


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A cell whose truth is known: its predictions, distorted per value of each axis.

    So predictions mislead as real ones do.
    """

    cell: Cell
    candidates: Candidates
    value: dict[Layout, float]  # tokens/s/GPU
    # Over the limit, relative; below 0 it fits.
    excess: dict[Layout, float]

    @property
    def best(self) -> float:
        return max(value for layout, value in self.value.items() if self.excess[layout] <= 0)

    def outcome(self, layout: Layout) -> Outcome:
        if self.excess[layout] > 0:
            return OutOfMemory(excess=self.excess[layout])
        return measured(self.cell, self.value[layout])


def measured(cell: Cell, tokens_per_second_per_gpu: float) -> Measured:
    return Measured.of_step(cell.tokens_per_step / cell.num_gpus / tokens_per_second_per_gpu)


def planted(
    *, gpus: int = 16, batch: int = 256, seed: int = 0, zero_stages: tuple[int, ...] = (0, 1, 2, 3)
) -> Planted:
    recomputes = [
        Recompute.parse(text) for text in ("none", "selective_ops", "full", "full:8", "full:24")
    ]
    layouts = [
        Layout(
            data_parallel_size=gpus // (tp * pp),
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            micro_batch_size=mbs,
            grad_accum_steps=batch * tp * pp // (gpus * mbs),
            recompute=recompute,
            zero_stage=zero,
        )
        for tp in (1, 2, 4, 8)
        for pp in (1, 2)
        for mbs in (1, 2, 4, 8, 16)
        for recompute in recomputes
        for zero in zero_stages
        if gpus % (tp * pp) == 0 and batch * tp * pp % (gpus * mbs) == 0
    ]
    table = LayoutTable.of(layouts)
    cell = Cell(
        model=PRESETS["llama-3.1-8b"], num_gpus=gpus, sequence_length=4096, global_batch_size=batch
    )
    candidates = rank_candidates(
        table,
        cell,
        hardware=DEVICES["h100-sxm"],
        memory_limit_bytes=LIMIT_BYTES,
        gpus_per_node=8,
        trainer=Trainer(),
    )
    value, rng = candidates.tokens_per_second_per_gpu.copy(), np.random.default_rng(seed)
    for name in ("tensor_parallel_size", "micro_batch_size", "zero_stage", "recompute"):
        column = getattr(table, name)
        value *= rng.uniform(0.7, 1.3, 64)[np.searchsorted(np.unique(column), column)]
    value *= rng.normal(1, 0.01, len(table))
    excess = (1.4 * candidates.memory_bytes + 3 * 2**30) / LIMIT_BYTES - 1  # a third does not fit
    return Planted(
        cell=cell,
        candidates=candidates,
        value=dict(zip(layouts, value, strict=True)),
        excess=dict(zip(layouts, excess, strict=True)),
    )


def searcher(
    cell: Planted,
    strategy: Strategy,
    *,
    seed: int = 0,
    objective: Objective = TOKENS,
    max_trials: int | None = None,
) -> Searcher:
    search = Search(strategy=strategy, seed=seed, max_trials=max_trials)
    return Searcher(cell.candidates, cell=cell.cell, search=search, objective=objective)


def drive(search: Searcher, cell: Planted, num_trials: int) -> tuple[list[Layout], set[Layout]]:
    """Ask and tell one at a time. Returns what was asked, in order, and what was condemned."""
    asked: list[Layout] = []
    condemned: set[Layout] = set()
    while len(asked) < num_trials and (proposal := search.ask()) is not None:
        assert proposal.layout not in condemned
        asked.append(proposal.layout)
        condemned |= set(search.tell(proposal.layout, cell.outcome(proposal.layout)))
    return asked, condemned


def trials_until(share: float, cell: Planted, asked: list[Layout]) -> int | None:
    fitting = (
        i
        for i, layout in enumerate(asked, 1)
        if cell.excess[layout] <= 0 and cell.value[layout] >= share * cell.best
    )
    return next(fitting, None)
