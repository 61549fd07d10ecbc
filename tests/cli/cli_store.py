"""A store with a trial in every state, and with texts that attack terminals and spreadsheets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from db.store import Store
from db.write.writes import Pruned
from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.core.trial.node_report import GpuUsage
from orchestrator.core.trial.protocol import Phase
from tests.db.builders import (
    Bench,
    add_trial,
    begin_trial,
    cell,
    failure,
    fingerprint,
    measurement,
    record_failure,
    record_measurement,
)

HOSTILE = (
    "[/bold] [link=x]y \x1b[31mred\x1b]0;title\x07 \x9b2J\u202eevil | <script>alert(1)</script>\n"
    '=cmd("calc")'
)
FORMULA = "=HYPERLINK(1)"
BUSY = MachineLoad(
    cpu_cores=2.0,
    own_cpu_cores=0.2,
    sweep_cpu_cores=0.0,
    others_cpu_cores=1.8,
    gpu_clock_ratio=0.6,
    gpu_throttled_fraction=0.5,
    gpu_throttle_reasons=("hw_thermal_slowdown", "sw_power_cap"),
    gpu_temperature_celsius=91.0,
)


@dataclass(frozen=True)
class Filled:
    """Trial ids by the trial's state."""

    measured: int
    slower: int
    out_of_memory: int
    pruned: int
    failed: int
    running: int
    launching: int
    queued: int
    old_conditions: int
    log: Path
    run_folder: str


def layout(micro_batch_size: int, recompute: str = "none") -> Layout:
    return Layout(
        data_parallel_size=2,
        micro_batch_size=micro_batch_size,
        grad_accum_steps=32 // micro_batch_size,
        recompute=Recompute.parse(recompute),
    )


def fill(store: Store, folder: Path, name: str = "tiny") -> Filled:
    """A sweep of this process: one cell with a trial in every state, one where nothing fits."""
    bench = Bench.on(store, name)
    log = folder / "log-1.txt"
    log.write_text(f"first line\n{HOSTILE}\nlast line\n")

    def started(shape: Layout, cell_id: int = bench.cell_id) -> tuple[int, int]:
        return begin_trial(
            store,
            cell_id,
            shape,
            epoch=bench.epoch,
            why="best prediction not yet tried",
            predicted_tokens_per_second_per_gpu=1100.0,
            predicted_memory_bytes=68 << 30,
            nodes=["node-a"],
        )

    def measured(
        shape: Layout, speed: float, torch: str = "2.13.0", load: MachineLoad = NO_LOAD
    ) -> int:
        trial_id, attempt = started(shape)
        store.note_first_steps([(trial_id, attempt)], epoch=bench.epoch)
        record_measurement(
            store,
            trial_id,
            attempt,
            epoch=bench.epoch,
            measurement=measurement(speed),
            fingerprint=fingerprint(torch),
            gpu=GpuUsage(busy=0.97, power_watts=612.0, num_samples=50),
            memory_by_part={"parameters": 16 << 30, "gradients": 8 << 30, "activations": 40 << 30},
            phases={
                Phase.START: 0.02,
                Phase.RENDEZVOUS: 1.2,
                Phase.FIRST_STEP: 14.0,
                Phase.STEADY: 31.0,
            },
            gpu_seconds=94.0,
            load=load,
        )
        return trial_id

    def failed(
        shape: Layout,
        kind: FailureKind,
        event: TrialEvent,
        message: str,
        cell_id: int = bench.cell_id,
    ) -> int:
        trial_id, attempt = started(shape, cell_id)
        record_failure(
            store,
            trial_id,
            attempt,
            epoch=bench.epoch,
            failure=failure(
                kind,
                message=message,
                log_path=str(log),
                log_tail=f"first line\n{HOSTILE}\nlast line\n",
            ),
            event=event,
            peak_memory_bytes=81 << 30,
            device_memory_bytes=80 << 30,
            gpu_seconds=20.0,
        )
        return trial_id

    old = measured(layout(16), 2000.0, torch="2.9.0")
    fast, slow = measured(layout(4), 1234.5), measured(layout(2), 900.0, load=BUSY)
    oom = failed(
        layout(8),
        FailureKind.OOM_GPU,
        TrialEvent.OUT_OF_MEMORY,
        "rank 1 ran out of device memory in first_step",
    )
    condemned = Pruned(
        cell_id=bench.cell_id,
        layout=layout(32),
        why=f"needs more than trial {oom}",
        condemned_by=oom,
    )
    store.add_pruned([condemned], epoch=bench.epoch)
    bad = failed(layout(1), FailureKind.USER_ERROR, TrialEvent.FAILED, HOSTILE)
    running, attempt = started(layout(1, "full"))
    store.note_first_steps([(running, attempt)], epoch=bench.epoch)
    launching, _ = started(layout(2, "full"))
    queued = add_trial(store, bench.cell_id, layout(4, "full"), epoch=bench.epoch, why=FORMULA).id
    large = store.ensure_cell(
        bench.sweep_id,
        cell(model=replace(PRESETS["llama-tiny"], num_layers=99, name=FORMULA)),
        bench.epoch,
    )
    failed(
        layout(1),
        FailureKind.OOM_GPU,
        TrialEvent.OUT_OF_MEMORY,
        "rank 0 ran out of device memory in rendezvous",
        large,
    )
    pruned = next(trial.id for trial in store.trials(bench.sweep_id) if trial.condemned_by == oom)
    # Tests read it long after: a busy machine takes minutes for all of them.
    store.renew(bench.sweep_id, bench.epoch, ttl_seconds=3600)
    return Filled(
        measured=fast,
        slower=slow,
        out_of_memory=oom,
        pruned=pruned,
        failed=bad,
        running=running,
        launching=launching,
        queued=queued,
        old_conditions=old,
        log=log,
        run_folder=store.sweep_named(name).run_folder,
    )
