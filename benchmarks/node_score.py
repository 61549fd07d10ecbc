"""Measures after how many trials a slow node is found, and how often a healthy one is called slow.

python -m benchmarks.node_score [--seeds 30] [--healthy 120] [--out FILE.json]

Synthetic trials of two cells on eight nodes; one cell is predicted 20 % too fast throughout. As
in a sweep, nodes are scored after every fourth trial. Each case reports: trials until the slow
node (10 % slower) is called slow (median, nine in ten and most, of at most 400); sweeps that
called another node slow as well; and sweeps without a slow node that called one slow within 240
trials.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine, parser_of, write_result
from orchestrator.core.machines.node_run import NodeRun
from orchestrator.core.machines.node_score import score_nodes
from tests.core.machines.node_runs import NUM_NODES, trials

SLOW, SLOWER = 3, 0.10
EVERY, MOST, MOST_HEALTHY = 4, 400, 240

# Arguments of `trials` for each case. A disturbed run is 30 % slower on average.
CASES: Mapping[str, Mapping[str, Any]] = {
    "30 % repeats": {},
    "50 % repeats": {"repeats": 0.5},
    "no repeats, predictions miss by 4 %": {"repeats": 0.0, "prediction_error": 0.04},
    "no repeats, predictions miss by 8 %": {"repeats": 0.0},
    "gangs of 1, 2 and 4 nodes": {"gangs": (1, 2, 4)},
    "gangs of 4 nodes": {"gangs": (4,)},
    "2 % of runs disturbed": {"disturbed": 0.02},
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--healthy", type=int, default=120, help="sweeps without a slow node")
    arguments = parser.parse_args()
    machine = describe_machine()
    found = {}
    for name, how in CASES.items():
        found[name] = outcome(how, seeds=arguments.seeds, healthy=arguments.healthy)
        print(name, json.dumps(found[name]), flush=True)
    result = {
        "nodes": NUM_NODES,
        "slower": SLOWER,
        "seeds": arguments.seeds,
        "healthy_sweeps": arguments.healthy,
        "cases": found,
    }
    write_result(arguments.out, benchmark="node_score", machine=machine, result=result)


def outcome(how: Mapping[str, Any], *, seeds: int, healthy: int) -> dict[str, Any]:
    firsts = [
        first_called_slow(trials(MOST, seed=seed, slow=(SLOW,), by=SLOWER, **how))
        for seed in range(seeds)
    ]
    counts = [count for count, _ in firsts]
    wrong = sum(
        bool(first_called_slow(trials(MOST_HEALTHY, seed=10_000 + seed, slow=(), **how))[1])
        for seed in range(healthy)
    )
    return {
        "trials_median": float(np.median(counts)),
        "trials_nine_in_ten": float(np.quantile(counts, 0.9)),
        "trials_most": max(counts),
        "not_found": sum(not names for _, names in firsts),
        "others_called_slow": sum(bool(names - {f"n{SLOW}"}) for _, names in firsts),
        "healthy_called_slow": wrong,
    }


def first_called_slow(runs: Sequence[NodeRun]) -> tuple[int, set[str]]:
    """After how many trials any node is called slow, and which."""
    for count in range(EVERY, len(runs) + 1, EVERY):
        names = {name for name, score in score_nodes(runs[:count]).items() if score.is_slow}
        if names:
            return count, names
    return len(runs), set()


if __name__ == "__main__":
    main()
