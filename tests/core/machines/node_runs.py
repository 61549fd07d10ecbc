"""Runs of synthetic trials on nodes, some of which are slow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.machines.node_run import NodeRun

NUM_NODES = 8


def trials(
    num: int,
    *,
    seed: int = 0,
    slow: Sequence[int] = (3,),
    by: float = 0.10,
    noise: float = 0.02,
    prediction_error: float = 0.08,
    repeats: float = 0.3,
    gangs: Sequence[int] = (1,),
    disturbed: float = 0.0,
) -> list[NodeRun]:
    """Return runs of two cells, one predicted 20 % too fast.

    The nodes `slow` are slower `by` this, relative. `repeats`: the share of runs whose layout ran
    before. `gangs`: numbers of nodes of a run. `disturbed`: the share of runs that are 30 % slower
    on average.
    """
    rng = np.random.default_rng(seed)
    layouts: list[tuple[int, float, float]] = []  # cell, log seconds, log predicted
    runs = []
    for _ in range(num):
        if layouts and rng.random() < repeats:
            place = int(rng.integers(len(layouts)))
        else:
            cell, true = int(rng.integers(2)), float(rng.normal(0, 0.5))
            layouts.append((cell, true, true - 0.2 * cell + float(rng.normal(0, prediction_error))))
            place = len(layouts) - 1
        cell, true, predicted = layouts[place]
        nodes: NDArray[np.intp] = rng.choice(NUM_NODES, int(rng.choice(gangs)), replace=False)
        seconds = (
            true
            + float(rng.normal(0, noise))
            + (np.log1p(by) if set(slow) & set(nodes.tolist()) else 0.0)
        )
        seconds += float(rng.exponential(0.3)) if rng.random() < disturbed else 0.0
        runs.append(
            NodeRun(
                nodes=tuple(f"n{i}" for i in nodes),
                cell=cell,
                trial=place,
                log_seconds=seconds,
                log_predicted=predicted,
            )
        )
    return runs
