"""Measures the control plane on a virtual clock and a simulated cluster; prints JSON.

python -m benchmarks.simulated_scale [--trials 100000] [--nodes 2048] [--strategy random]
    [--tick 5] [--url sqlite:///FILE] [--out FILE.json]

It runs the loop, the search, the packing, the outcomes and the store of `sweep run FILE
--simulate` until this many trials were launched. Cells are those of four models on 8 to 16,384
GPUs (fewer if the cluster is smaller), each with at most 1.25 times its share of the trials: some
have fewer layouts that may fit, and others replace them. Pruned layouts do not count as trials.
`wall_seconds`: the duration of `run_sweep`. `cost_ratio`: the mean cost of the last tenth of the
trials over that of the second tenth, by wall time; 1 means that the cost does not grow with the
store. `peak_memory_bytes`: the peak of the resident set. `simulated_seconds`: how long the
cluster would have taken.
"""

from __future__ import annotations

import gc
import json
import resource
import tempfile
import time
from math import ceil

from benchmarks.machine import describe_machine, parser_of, write_result
from db.store import Store
from orchestrator.cluster.simulated import NODE_SLOTS, SimulatedScheduler, simulated
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.sweep.progress import Snapshot, Stop
from orchestrator.sweep.run import run_sweep

MODELS = ["llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b"]
TENTHS = 10
# Trials of a cell over its share of all. A third of the cells has fewer layouts than its share.
SPARE = 1.25


def sweep(num_trials: int, num_gpus: int, strategy: str) -> SweepSpec:
    gpus = [8 << power for power in range(12) if 8 << power <= num_gpus]
    return simulated(
        SweepSpec.model_validate(
            {
                "name": "scale",
                "model": MODELS,
                "gpus": gpus,
                "gpus_per_node": NODE_SLOTS,
                "device": "h100-sxm",
                "sequence_length": 4096,
                "global_batch_tokens": "16M",
                "workload": "synthetic",
                "axes": {
                    "tensor_parallel_size": [1, 2, 4, 8],
                    "pipeline_parallel_size": [1, 2, 4, 8, 16],
                    "zero_stage": [0, 1, 2, 3],
                    "recompute": [
                        "none",
                        "selective_ops",
                        "selective_attention",
                        "full",
                        *(f"full:{k}" for k in (1, 2, 4, 6, 8, 10, 12, 14)),
                    ],
                },
                "measurement": {"min_steps": 5, "max_steps": 8},
                "search": {
                    "strategy": strategy,
                    "max_trials": ceil(SPARE * num_trials / (len(MODELS) * len(gpus))),
                    "confirm": {"repeats": 0},
                },
            }
        )
    )


class Pace:
    """Records when each tenth of the trials was done."""

    def __init__(self, num_trials: int) -> None:
        self._every, self.at, self.done = max(num_trials // TENTHS, 1), [time.perf_counter()], 0

    def __call__(self, snapshot: Snapshot) -> None:
        self.done += len(snapshot.ended)
        while self.done >= len(self.at) * self._every:
            self.at.append(time.perf_counter())

    @property
    def tenths(self) -> list[float]:
        """The seconds of each tenth."""
        return [after - before for before, after in zip(self.at, self.at[1:], strict=False)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--trials",
        type=int,
        default=100_000,
        help="the sweep is stopped when this many have ended",
    )
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--strategy", default="random")
    parser.add_argument(
        "--tick",
        type=float,
        default=5.0,
        help="simulated seconds between two polls of the loop",
    )
    parser.add_argument("--url", help="of the store; default: a SQLite file in a temporary folder")
    arguments = parser.parse_args()
    machine = describe_machine()
    with (
        tempfile.TemporaryDirectory() as folder,
        Store.open(arguments.url or f"sqlite:///{folder}/sweep.sqlite") as store,
    ):
        spec = sweep(arguments.trials, arguments.nodes * NODE_SLOTS, arguments.strategy)
        scheduler, pace = (
            SimulatedScheduler(spec, num_nodes=arguments.nodes, tick_seconds=arguments.tick),
            Pace(arguments.trials),
        )
        gc.freeze()  # as `sweep run` does
        began, cpu = time.perf_counter(), time.process_time()
        result = run_sweep(
            spec,
            store=store,
            open_scheduler=lambda: scheduler,
            code=Fingerprint(orchestrator_version="benchmark"),
            hardware=lambda _: DEVICES["h100-sxm"],
            clock=scheduler.clock,
            stop=lambda: Stop.GO_ON if pace.done < arguments.trials else Stop.DRAIN,
            observe=pace,
        )
        seconds = time.perf_counter() - began
        reserved = store.reserved(result.sweep_id).total.reserved
        tenths = pace.tenths
        found = {
            "num_gpus": arguments.nodes * NODE_SLOTS,
            "num_cells": len(result.stopped),
            "strategy": arguments.strategy,
            "tick_seconds": arguments.tick,
            "store": store.url.partition(":")[0],
            "num_attempts": pace.done,
            "num_measured": result.counts.get(TrialState.MEASURED, 0),
            "num_out_of_memory": result.counts.get(TrialState.OUT_OF_MEMORY, 0),
            "num_pruned": result.counts.get(TrialState.PRUNED, 0),
            "wall_seconds": round(seconds, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
            "milliseconds_per_attempt": round(1000 * seconds / max(pace.done, 1), 3),
            "cost_ratio": round(tenths[-1] / tenths[1], 2) if len(tenths) > 2 else None,
            "seconds_of_each_tenth": [round(tenth, 2) for tenth in tenths],
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "simulated_seconds": round(scheduler.clock()),
            "used_share": round(reserved / (arguments.nodes * NODE_SLOTS * scheduler.clock()), 4),
        }
    print(json.dumps(found, indent=1))
    write_result(arguments.out, benchmark="simulated_scale", machine=machine, result=found)


if __name__ == "__main__":
    main()
