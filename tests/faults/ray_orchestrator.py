"""An orchestrator on Ray: python -m tests.faults.ray_orchestrator ADDRESS URL FOLDER TIME_SCALE"""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

from orchestrator.cluster.ray.scheduler import RayScheduler
from orchestrator.core.errors import SweepError
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import Device
from tests.faults import small_sweep
from tests.faults.history import Log
from tests.faults.witness import WitnessedStore

NAME = "on-ray"


def spec(time_scale: float) -> SweepSpec:
    """Forty layouts of two ranks on one node, 7 milliseconds and more each, times the scale."""
    return SweepSpec.model_validate(
        {
            "name": NAME,
            "model": "llama-tiny",
            "gpus": 2,
            "device": "cpu",
            "sequence_length": 64,
            "global_batch_size": 1024,
            "axes": {
                "data_parallel_size": [2],
                "micro_batch_size": [512, 256, 128, 64, 32],
                "recompute": ["none", "full"],
                "zero_stage": [0, 1, 2, 3],
            },
            "measurement": {"warmup_steps": 2, "min_steps": 5, "max_steps": 5, "precision": 0.5},
            "workload": {
                "name": "synthetic",
                "options": {
                    "device_memory_bytes": 1 << 50,
                    "sleep": True,
                    "time_scale": time_scale,
                },
            },
            "search": {
                "strategy": "exhaustive",
                "max_parallel_trials": 2,
                "confirm": {"repeats": 0},
            },
        }
    )


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    address, url, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    scheduler = partial(RayScheduler, address=address, device=Device.CPU, root=folder / "runs")
    try:
        with WitnessedStore.seen_by(Log(folder / "seen.jsonl"), url) as store:
            small_sweep.run(
                store,
                of=spec(float(sys.argv[4])),
                open_scheduler=scheduler,
                run_root=folder.joinpath,
            )
    except SweepError as exc:
        logging.error("%s", exc)
        return exc.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
