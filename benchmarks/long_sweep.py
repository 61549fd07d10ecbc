"""Measures whether time and memory per trial stay constant over thousands of trials.

python -m benchmarks.long_sweep --trials 10000 --scripted --out FILE.json
    the control plane alone: nothing is launched
python -m benchmarks.long_sweep --trials 5000 --out FILE.json
    through Ray and the launcher, two ranks per trial
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import PROJECT, describe_machine, parser_of, resident_bytes, write_result
from db.store import Store
from orchestrator.cluster.contract import Finished, Placed, Scheduler, SchedulerEvent, Slots
from orchestrator.cluster.ray.scheduler import RayScheduler
from orchestrator.core.machines.packing import FreeOnNode, Shape
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.node_report import NodeReport, RankOutcome
from orchestrator.core.trial.protocol import Device, Phase, RankResult, TrialRequest
from orchestrator.core.trial.reserved_time import Leased
from orchestrator.sweep.progress import Snapshot
from orchestrator.sweep.provenance import code_fingerprint
from orchestrator.sweep.run import run_sweep

# A figure "at N" is the mean over the trials just before N.
WINDOW_TRIALS = 100
AT = (100, 1_000, 5_000, 10_000)
# Memory that the first trials load stays, and is not growth.
GROWTH_FROM, GROWTH_OVER = 100, 5_000
TARGET_MS_PER_TRIAL = 100.0
TARGET_GROWTH_BYTES = 50e6

# 10 micro-batch sizes x 385 recomputations x 4 ZeRO stages = 15,400 layouts.
SWEEP: Mapping[str, Any] = {
    "name": "long",
    "model": {"preset": "llama-tiny", "num_layers": 384, "name": "tiny-384"},
    "gpus": 2,
    "device": "cpu",
    "sequence_length": 64,
    "global_batch_size": 1024,
    "axes": {
        "data_parallel_size": [2],
        "recompute": ["none", *(f"full:{k}" for k in range(1, 385))],
        "zero_stage": [0, 1, 2, 3],
    },
    "measurement": {"warmup_steps": 2, "min_steps": 6, "max_steps": 6},
    "workload": {"name": "synthetic", "options": {"device_memory_bytes": 1 << 50}},
}


class ScriptedScheduler:
    """Runs nothing: each attempt ends at the next poll, with the same numbers for each layout."""

    def __init__(self) -> None:
        self._running: TrialRequest | None = None
        self._reserved_gpu_seconds = 0.0

    @property
    def slots(self) -> Slots:
        return Slots(device=Device.CPU, device_name=None, nodes={"here": 2}, usual_at_once=1)

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        return {}

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        self._running = request

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        request, self._running = self._running, None
        if request is None:
            return []
        layout = request.layout
        seconds = (
            0.1
            + 0.01 * layout.grad_accum_steps
            + 1e-4 * layout.recompute.layers_of(384)
            + 1e-3 * layout.zero_stage
        )
        ranks = [
            RankOutcome(
                rank=rank,
                exit_code=0,
                result=RankResult(
                    step_seconds=[seconds * (1 + 0.001 * i) for i in range(6)],
                    warmup_seconds=[seconds] * 2,
                    phase_seconds=dict.fromkeys(Phase, seconds),
                    peak_memory_allocated_bytes=1 << 30,
                    stack=Stack(python="3.11"),
                ),
            )
            for rank in range(layout.world_size)
        ]
        self._reserved_gpu_seconds += seconds
        return [
            Placed(trial_id=request.trial_id, nodes=["here"]),
            Finished(
                trial_id=request.trial_id,
                reports=[NodeReport(node="here", ranks=ranks)],
                failure=None,
                gpu_seconds=seconds,
            ),
        ]

    def cancel(self, trial_id: int) -> None:
        """Nothing runs between polls."""

    def leased(self) -> Leased:
        return Leased(reserved=self._reserved_gpu_seconds, idle=0.0, capacity=None)

    def close(self) -> None:
        """There is nothing to release."""


class TimedScheduler:
    """Forwards every call, and adds up the time that the loop spends in the scheduler."""

    def __init__(self, inner: Scheduler) -> None:
        self._inner = inner
        self.seconds = 0.0
        self.cpu_seconds = 0.0  # the loop's thread

    @property
    def slots(self) -> Slots:
        return self._inner.slots

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        return self._inner.free_on_nodes()

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        self._inner.start(request, shape, nodes)
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += time.thread_time() - cpu

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        began, cpu = time.perf_counter(), time.thread_time()
        events = self._inner.poll(timeout_seconds)
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += time.thread_time() - cpu
        return events

    def cancel(self, trial_id: int) -> None:
        self._inner.cancel(trial_id)

    def leased(self) -> Leased:
        return self._inner.leased()

    def close(self) -> None:
        self._inner.close()


class Recorder:
    """Records the time after each finished trial, and the memory after every hundred."""

    def __init__(self) -> None:
        self.scheduler: TimedScheduler | None = None
        # Seconds, seconds outside the scheduler, CPU seconds outside the scheduler.
        self.trials: list[tuple[float, float, float]] = []
        self.resident: list[tuple[int, int]] = []  # (trials, bytes)

    def note(self, snapshot: Snapshot) -> None:
        assert self.scheduler is not None
        now = time.perf_counter()
        taken = (now, now - self.scheduler.seconds, time.thread_time() - self.scheduler.cpu_seconds)
        for _ in snapshot.ended:  # one poll may end several
            self.trials.append(taken)
            if len(self.trials) % WINDOW_TRIALS == 0:
                self.resident.append((len(self.trials), resident_bytes()))

    def ms_per_trial(self, at: int) -> tuple[float, float, float]:
        """Means before trial `at`: whole trial; ask, tell and store; CPU time of these."""
        first, last = max(0, at - WINDOW_TRIALS), at - 1
        whole, control, cpu = (
            1e3 * (b - a) / (last - first)
            for a, b in zip(self.trials[first], self.trials[last], strict=True)
        )
        return whole, control, cpu

    def growth_bytes(self) -> int | None:
        found = dict(self.resident)
        last = GROWTH_FROM + GROWTH_OVER if GROWTH_FROM + GROWTH_OVER in found else GROWTH_OVER
        return found[last] - found[GROWTH_FROM] if last in found else None


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument(
        "--strategy", default="tpe", choices=["tpe", "random", "exhaustive", "auto"]
    )
    parser.add_argument(
        "--scripted", action="store_true", help="without Ray, launcher and processes"
    )
    arguments = parser.parse_args()
    machine = describe_machine()
    result = measure_sweep(arguments.trials, arguments.strategy, scripted=arguments.scripted)
    print(
        json.dumps(
            {key: value for key, value in result.items() if key != "resident_bytes_by_trials"},
            indent=1,
        )
    )
    write_result(arguments.out, benchmark="long_sweep", machine=machine, result=result)


def measure_sweep(num_trials: int, strategy: str, *, scripted: bool) -> dict[str, Any]:
    """Run the sweep, then open it again, as the same command does after a stop."""
    spec = SweepSpec.model_validate(
        {
            **SWEEP,
            "search": {"strategy": strategy, "max_trials": num_trials, "confirm": {"repeats": 0}},
        }
    )
    recorder = Recorder()

    with tempfile.TemporaryDirectory() as folder:

        def open_scheduler() -> TimedScheduler:
            inner = (
                ScriptedScheduler()
                if scripted
                else RayScheduler(address=None, device=Device.CPU, root=Path(folder) / "runs")
            )
            recorder.scheduler = TimedScheduler(inner)
            return recorder.scheduler

        database = Path(folder) / "sweep.sqlite"
        code = code_fingerprint(PROJECT)
        with Store.open(f"sqlite:///{database}") as store:

            def run() -> float:
                began = time.perf_counter()
                ended = run_sweep(
                    spec,
                    store=store,
                    open_scheduler=open_scheduler,
                    code=code,
                    hardware=lambda _: None,
                    clock=time.monotonic,
                    observe=recorder.note,
                )
                if ended.counts.get(TrialState.MEASURED, 0) != num_trials:
                    raise SystemExit(
                        f"not all of {num_trials} trials were measured: {dict(ended.counts)}"
                    )
                return time.perf_counter() - began

            seconds = run()
            usage = resource.getrusage(resource.RUSAGE_SELF)
            result = _figures(recorder, num_trials, seconds)
            result["driver_cpu_ms_per_trial"] = 1e3 * (usage.ru_utime + usage.ru_stime) / num_trials
            result["database_bytes"] = sum(
                file.stat().st_size for file in Path(folder).glob("sweep.sqlite*")
            )
            result["run_folder_entries"] = sum(
                len(folders) + len(files) for _, folders, files in os.walk(Path(folder) / "runs")
            )
            if scripted:
                recorder.trials.clear()
                # Replays all trials. The budget is spent, so nothing is launched.
                result["reopen_seconds"] = run()
    return {"strategy": strategy, "scripted": scripted, **result}


def _figures(recorder: Recorder, num_trials: int, seconds: float) -> dict[str, Any]:
    at = [n for n in AT if n <= num_trials]
    trial, control, cpu = ({n: recorder.ms_per_trial(n)[i] for n in at} for i in range(3))
    growth = recorder.growth_bytes()
    return {
        "num_trials": num_trials,
        "seconds": seconds,
        "trials_per_second": num_trials / seconds,
        "ask_tell_store_ms_per_trial_at": control,
        # Steadier on a machine that others use.
        "ask_tell_store_cpu_ms_per_trial_at": cpu,
        "trial_ms_at": trial,
        "cpu_last_over_first": cpu[at[-1]] / cpu[at[0]] if len(at) > 1 else None,
        "under_100_ms": all(ms < TARGET_MS_PER_TRIAL for ms in control.values()),
        "resident_growth_bytes_over_5000_trials": growth,
        "growth_under_50_mb": None if growth is None else growth < TARGET_GROWTH_BYTES,
        "resident_bytes_by_trials": recorder.resident,
    }


if __name__ == "__main__":
    main()
