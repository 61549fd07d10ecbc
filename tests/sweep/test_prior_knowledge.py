"""What relatives in the store teach: which trials count as such, in which order they are believed,
and what comes of it for a new cell.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from math import exp
from typing import Any

import numpy as np
import pytest

from db.read import observations
from db.read.observations import ObservationRow
from db.store import Store
from orchestrator.core.physics.collective_group import ring_seconds
from orchestrator.core.physics.link_sample import Collective, LinkSample, Span
from orchestrator.core.physics.memory import predict_memory
from orchestrator.core.physics.step_time import predict_step_time
from orchestrator.core.physics.step_time_constants import StepTimeConstants
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES, UNLIMITED_BYTES, Hardware
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.search.planner import plan_cell, trainer_of
from orchestrator.core.search.trial_cost import TrialCost
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.protocol import Device, Phase
from orchestrator.sweep.prior_knowledge import PriorKnowledge, read_prior_knowledge, sweeps_of
from orchestrator.sweep.trial_devices import measured_hardware
from tests.db.builders import (
    begin_trial,
    failure,
    fingerprint,
    measurement,
    record_failure,
    record_measurement,
)

H100 = DEVICES["h100-sxm"]
DRIVER_NAME = "NVIDIA H100 80GB HBM3"


def spec(**changes: Any) -> SweepSpec:
    return SweepSpec.model_validate(
        {
            "name": "mine",
            "model": "llama-3.2-3b",
            "sequence_length": 4096,
            "global_batch_size": 256,
            "gpus": [8, 16],
            "gpus_per_node": 8,
            "device": "h100-sxm",
            "axes": {
                "micro_batch_size": [1, 2, 4],
                "recompute": ["none", "full"],
                "zero_stage": [0, 1],
            },
        }
        | changes
    )


class Past:
    """Writes trials into a store as a sweep leaves them: a formula of what is predicted, in place
    of a cluster.
    """

    def __init__(
        self,
        store: Store,
        chosen: SweepSpec,
        *,
        device_name: str = DRIVER_NAME,
        torch: str = "2.13.0",
    ) -> None:
        self.store, self.spec, self.device_name, self.torch = store, chosen, device_name, torch
        # For the steps that it tells of.
        self.waits = True
        self.sweep_id = store.ensure_sweep(
            chosen.name, chosen.model_dump_json(), chosen.conditions()
        )
        self.epoch = store.acquire(
            self.sweep_id, host=socket.gethostname(), pid=os.getpid(), ttl_seconds=600
        )

    def measure(
        self,
        cell: Cell,
        layouts: list[Layout],
        seconds: Callable[[LayoutTable], Any],
        *,
        peak_flops: float = 989e12,
        peak_source: str = "table: h100-sxm bf16 dense",
        reserved: float | None = 1.1,
        reserve_bytes: float = 0.0,
        nodes: int | None = None,
    ) -> None:
        """Trials that took so many seconds and, allocated, what is predicted."""
        cell_id = self.store.ensure_cell(self.sweep_id, cell, self.epoch)
        memory = (
            predict_memory(
                LayoutTable.of(layouts), cell, trainer_of(spec(), device=Device.CPU)
            ).total
            + reserve_bytes
        )
        for layout, taken, peak in zip(
            layouts, seconds(LayoutTable.of(layouts)), memory, strict=True
        ):
            value = measurement(
                step_time=replace(measurement().step_time, median=float(taken), num_steps=12),
                peak_memory_allocated_bytes=int(peak),
                peak_memory_reserved_bytes=int(peak * reserved) if reserved is not None else None,
                device_memory_bytes=H100.memory_bytes if reserved is not None else None,
                peak_flops=peak_flops,
                peak_flops_source=peak_source,
            )
            number = begin_trial(
                self.store,
                cell_id,
                layout,
                epoch=self.epoch,
                nodes=["n"] * (nodes or max(cell.num_gpus // 8, 1)),
            )
            stack = fingerprint(self.torch).stack.model_copy(
                update={"device_name": self.device_name}
            )
            record_measurement(
                self.store,
                *number,
                epoch=self.epoch,
                measurement=value,
                fingerprint=fingerprint().model_copy(update={"stack": stack}),
                phases={Phase.STEADY: 15 * float(taken) if self.waits else 0.0},
                gpu_seconds=cell.num_gpus * (15 * float(taken) + 40.0),
            )

    def run_out(self, cell: Cell, layout: Layout) -> None:
        cell_id = self.store.ensure_cell(self.sweep_id, cell, self.epoch)
        number = begin_trial(self.store, cell_id, layout, epoch=self.epoch, nodes=["n"])
        record_failure(
            self.store,
            *number,
            epoch=self.epoch,
            failure=failure(FailureKind.OOM_GPU),
            event=TrialEvent.OUT_OF_MEMORY,
            device_memory_bytes=H100.memory_bytes,
        )


def layouts_of(cell: Cell) -> list[Layout]:
    data = cell.num_gpus
    return [
        Layout(
            data_parallel_size=data,
            micro_batch_size=size,
            grad_accum_steps=cell.global_batch_size // data // size,
            zero_stage=zero,
            recompute=Recompute.parse("full"),
        )
        for size in (1, 2, 4)
        for zero in (0, 1)
    ]


def times(
    cell: Cell, factor: float, hardware: Hardware = H100, gpus_per_node: int = 8
) -> Callable[[LayoutTable], Any]:
    return lambda table: factor * seconds_of(table, cell, hardware, gpus_per_node=gpus_per_node)


def seconds_of(table: LayoutTable, cell: Cell, hardware: Hardware, *, gpus_per_node: int) -> Any:
    """What the formulas say of workload llama."""
    return predict_step_time(
        table,
        cell,
        hardware,
        gpus_per_node=gpus_per_node,
        trainer=trainer_of(spec(), device=Device.CPU),
    ).total


def ratio(found: PriorKnowledge, cell: Cell, **choice: Any) -> float:
    """Predicted step time over the uncalibrated one, the median of the cell's layouts."""
    hardware = found.hardware
    assert hardware is not None
    table = LayoutTable.of(layouts_of(cell))
    predicted = (
        found.calibration(cell, **choice)
        .predict(table, cell, hardware, gpus_per_node=8)
        .step_seconds
    )
    return float(np.median(predicted / seconds_of(table, cell, hardware, gpus_per_node=8)))


def ask(
    store: Store | None,
    chosen: SweepSpec,
    hardware: Hardware | None = H100,
    device_name: str | None = None,
) -> PriorKnowledge:
    return read_prior_knowledge(
        store,
        chosen,
        hardware,
        device=Device.CPU if chosen.device == "cpu" else Device.CUDA,
        device_name=device_name,
        gpus_per_node=8,
    )


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


def test_without_a_store_or_a_relative_the_data_sheet_and_the_priors_stand(store: Store) -> None:
    for found in (ask(None, spec()), ask(store, spec())):
        assert found.hardware is H100
        assert (found.rows, found.launch_seconds, found.timed_steps) == ((), None, None)
        assert ratio(found, spec().cells()[0]) == pytest.approx(1.0)
        assert found.calibration().num_times == 0


def test_a_new_cell_starts_from_what_another_sweep_measured_on_other_gpus(store: Store) -> None:
    small, large = spec().cells()
    Past(store, spec(name="relative")).measure(small, layouts_of(small), times(small, 1.3))
    found = ask(store, spec())
    assert sweeps_of(found.rows) == {"relative": 6}
    assert 1.1 < ratio(found, large) < 1.35
    assert found.launch_seconds == pytest.approx(40.0)
    assert found.timed_steps == 12


def test_what_a_launch_costs_is_not_learned_of_trials_that_did_not_wait_for_their_steps(
    store: Store,
) -> None:
    small, large = spec().cells()
    past = Past(store, spec(name="relative"))
    past.waits = False
    past.measure(small, layouts_of(small), times(small, 1.3))
    assert ask(store, spec()).launch_seconds is None
    past.waits = True
    past.measure(large, layouts_of(large), times(large, 1.3))
    assert ask(store, spec()).launch_seconds == pytest.approx(40.0)


def test_what_a_sweep_has_taken_over_counts_as_its_own(store: Store) -> None:
    """A search is told it, so its prior must not rest on it as well."""
    cell, other = spec().cells()
    past = Past(store, spec(name="past"))
    slow = lambda table: 2 * seconds_of(table, cell, H100, gpus_per_node=8)  # noqa: E731
    past.measure(cell, layouts_of(cell), slow)
    now = Past(store, spec())
    cell_id = store.ensure_cell(now.sweep_id, cell, now.epoch)
    theirs = [trial.id for trial in store.trials(past.sweep_id)]
    before = ask(store, spec())
    assert ratio(before, cell, with_own=False) > 1.5
    assert store.reuse(cell_id, theirs, epoch=now.epoch) == len(theirs)
    found = ask(store, spec())
    assert len(found.rows) == len(theirs)
    assert ratio(found, cell, with_own=False) == pytest.approx(1.0)
    assert ratio(found, cell) > 1.5
    assert ratio(found, other) == pytest.approx(ratio(before, other), rel=0.01)


def test_a_plan_rests_on_a_cells_own_trials_and_a_search_that_is_told_them_does_not(
    store: Store,
) -> None:
    small, _ = spec().cells()
    Past(store, spec()).measure(small, layouts_of(small), times(small, 1.3))
    found = ask(store, spec())
    assert ratio(found, small, with_own=True) > 1.15
    assert ratio(found, small, with_own=False) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([("small", 6, 1.3, "2.13.0")], [("large", 6, 1.3, "2.13.0")]),
        ([("small", 6, 1.3, "2.13.0")], [("large", 6, 3.0, "2.13.0")]),
        ([("small", 6, 3.0, "2.13.0")], [("large", 6, 1 / 3, "2.13.0")]),
        ([("large", 6, 1.0, "2.13.0"), ("small", 2, 3.0, "2.13.0")], [("small", 6, 3.0, "2.13.0")]),
        ([("small", 6, 3.0, "2.9.0")], [("large", 6, 1.0, "2.13.0"), ("small", 6, 1.0, "2.13.0")]),
    ],
    ids=[
        "alike",
        "slow",
        "slow, then fast",
        "too few to be known as slow",
        "slow with older software",
    ],
)
def test_what_is_learned_is_the_same_wherever_the_fits_began(
    store: Store, first: list[tuple[str, int, float, str]], then: list[tuple[str, int, float, str]]
) -> None:
    cells = dict(zip(("small", "large"), spec().cells(), strict=True))

    def measure(which: str, num_layouts: int, factor: float, torch: str) -> None:
        cell = cells[which]
        Past(store, spec(name=f"{which}-{num_layouts}-{torch}"), torch=torch).measure(
            cell, layouts_of(cell)[:num_layouts], times(cell, factor)
        )

    for one in first:
        measure(*one)
    before = ask(store, spec())
    before.calibration()
    for one in then:
        measure(*one)
    anew, on = (
        ask(store, spec()),
        read_prior_knowledge(
            store,
            spec(),
            H100,
            device=Device.CUDA,
            device_name=None,
            gpus_per_node=8,
            begin=before.fits,
        ),
    )
    assert set(on.begin.times) == {("current", None)}
    assert set(on.begin.memory) == {("current", None, None)}
    for cell in cells.values():
        assert ratio(on, cell) == pytest.approx(ratio(anew, cell), rel=0.02)


def test_a_cells_own_trials_do_not_leak_into_a_fit_that_begins_where_one_with_them_ended(
    store: Store,
) -> None:
    small, large = spec().cells()
    past = Past(store, spec())
    past.measure(small, layouts_of(small), times(small, 3.0))
    Past(store, spec(name="another")).measure(small, layouts_of(small)[:3], times(small, 1.2))
    Past(store, spec(name="third")).measure(large, layouts_of(large), times(large, 1.2))
    found = ask(store, spec())
    assert ratio(found, small, with_own=True) > 2
    assert 1.0 < ratio(found, small, with_own=False) < 1.5


def test_a_cell_three_times_as_slow_as_believed_is_believed_once_most_of_its_trials_show_it(
    store: Store,
) -> None:
    small, _ = spec().cells()
    Past(store, spec()).measure(small, layouts_of(small), times(small, 3.0))
    assert ratio(ask(store, spec()), small) == pytest.approx(3.0, rel=0.15)


def test_a_peak_that_reads_zero_teaches_nothing_of_memory_and_spoils_nothing(store: Store) -> None:
    small, large = spec().cells()
    past = Past(store, spec(name="relative"))
    past.measure(small, layouts_of(small)[:3], times(small, 1.3), reserved=0.0)
    found = ask(store, spec())
    assert [trial.row.is_peak_reserved for trial in found.rows] == [False] * 3
    table = LayoutTable.of(layouts_of(large))
    assert np.all(
        np.isfinite(
            found.calibration(large).predict(table, large, H100, gpus_per_node=8).memory_relative_sd
        )
    )


def test_newer_trials_of_other_devices_or_options_crowd_out_no_relative(store: Store) -> None:
    class Crowded(Store):
        def observations(self, **choice: Any) -> list[ObservationRow]:
            return self._database.read(
                lambda connection: observations.observations(connection, most=6, **choice)
            )

    small, _ = spec().cells()
    Past(store, spec(name="mine-too")).measure(small, layouts_of(small), times(small, 1.3))
    for name, device, source, options in (
        ("named", "NVIDIA A100-SXM4-80GB", "table: a100-80gb bf16 dense", {}),
        ("labelled", "A100-80GB", "table: a100-80gb bf16 dense", {}),
        (
            "other-options",
            DRIVER_NAME,
            "table: h100-sxm bf16 dense",
            {"workload": {"name": "llama", "options": {"attention": "eager"}}},
        ),
    ):
        Past(store, spec(name=name, **options), device_name=device).measure(
            small, layouts_of(small), times(small, 2.0), peak_source=source
        )
    crowded = Crowded(store._database)
    assert sweeps_of(ask(crowded, spec()).rows) == {"mine-too": 6}
    assert sweeps_of(ask(crowded, spec(), None, "NVIDIA A100-SXM4-80GB").rows) == {"named": 6}


def test_a_process_that_stood_for_a_gang_says_nothing_of_its_nodes(store: Store) -> None:
    _, large = spec().cells()
    replay = {
        "name": "replay",
        "options": {"table": "runs.csv", "table_id": "t", "through_ray": True},
    }
    for gpus_per_node, expected in (("auto", 8), (4, 4)):
        chosen = spec(name=f"replay-{gpus_per_node}", workload=replay, gpus_per_node=gpus_per_node)
        Past(store, chosen).measure(large, layouts_of(large)[:1], times(large, 1.0), nodes=1)
        assert ask(store, chosen).rows[-1].observation.gpus_per_node == expected


def test_what_a_trial_costs_is_what_relatives_took_else_what_is_usual(store: Store) -> None:
    small, _ = spec().cells()
    assert ask(None, spec()).trial_cost == TrialCost.of(
        spec().measurement, launch_seconds=None, timed_steps=None, device=Device.CUDA
    )
    Past(store, spec(name="relative")).measure(small, layouts_of(small), times(small, 1.3))
    cost = ask(store, spec()).trial_cost
    assert cost.launch_seconds == pytest.approx(40.0)
    assert cost.num_steps == 12 + spec().measurement.warmup_steps


def test_the_same_cell_of_another_sweep_is_a_relative(store: Store) -> None:
    small, _ = spec().cells()
    Past(store, spec(name="before")).measure(small, layouts_of(small), times(small, 1.3))
    assert ratio(ask(store, spec()), small, with_own=False) > 1.1


def test_the_newest_software_is_believed_before_the_older(store: Store) -> None:
    small, large = spec().cells()
    Past(store, spec(name="old"), torch="2.9.0").measure(
        small, layouts_of(small), times(small, 1.5)
    )
    only_old = ratio(ask(store, spec()), large)
    Past(store, spec(name="new"), torch="2.13.0").measure(
        small, layouts_of(small), times(small, 1.0)
    )
    found = ask(store, spec())
    assert [trial.is_current for trial in found.rows] == [False] * 6 + [True] * 6
    assert ratio(found, large) < only_old
    assert abs(ratio(found, large) - 1.0) < abs(ratio(found, large) - 1.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": {"name": "llama", "options": {"attention": "eager"}}},
        {"workload": {"name": "command", "options": {"argv": ["train"]}}},
    ],
    ids=["attention", "workload"],
)
def test_what_trains_otherwise_is_no_relative(store: Store, changes: dict[str, Any]) -> None:
    other = spec(name="other", **changes)
    cell = other.cells()[0]
    Past(store, other).measure(cell, layouts_of(cell), times(cell, 1.5))
    assert not ask(store, spec()).rows


def test_options_that_no_number_depends_on_make_no_difference(store: Store) -> None:
    other = spec(name="other", workload={"name": "llama", "options": {"learning_rate": 1e-5}})
    cell = other.cells()[0]
    Past(store, other).measure(cell, layouts_of(cell), times(cell, 1.5))
    assert len(ask(store, spec()).rows) == 6


def test_another_device_is_no_relative(store: Store) -> None:
    cell = spec().cells()[0]
    Past(store, spec(name="other")).measure(cell, layouts_of(cell), times(cell, 1.5))
    assert not ask(store, spec(device="h200"), DEVICES["h200"]).rows
    assert not ask(store, spec(device="auto"), None, "NVIDIA Mystery").rows
    # Cores are no GPU, whatever was measured on one.
    assert not ask(store, spec(device="cpu"), None).rows


def test_an_option_that_is_an_axis_matches_sweeps_that_fixed_it_but_for_their_memory(
    store: Store,
) -> None:
    eager = spec(name="eager", workload={"name": "llama", "options": {"attention": "eager"}})
    cell = eager.cells()[0]
    Past(store, eager).measure(cell, layouts_of(cell), times(cell, 1.3))
    varied = spec(axes={"options": {"attention": ["flash", "eager"]}, "micro_batch_size": [1, 2]})
    found = ask(store, varied)
    calibration = found.calibration()
    assert (calibration.num_times, calibration.num_peaks) == (6, 0)


def test_memory_that_every_trial_held_besides_is_learned_and_an_out_of_memory_bounds_it(
    store: Store,
) -> None:
    small, large = spec().cells()
    past = Past(store, spec(name="relative"))
    fitting = [layout for layout in layouts_of(small) if layout.zero_stage == 1]
    past.measure(small, fitting, times(small, 1.0), reserved=1.0, reserve_bytes=2 << 30)
    past.run_out(small, Layout(data_parallel_size=8, micro_batch_size=8, grad_accum_steps=4))
    found = ask(store, spec())
    assert found.calibration().num_out_of_memory == 1
    table = LayoutTable.of(layouts_of(large))
    before, after = (
        predict_memory(table, large, trainer).total
        for trainer in (trainer_of(spec(), device=Device.CPU), found.calibration(large).trainer)
    )
    # An eighth of what is predicted for these trials (17 GiB). A quarter of it at least is learned:
    # few rows stand against the belief that a known trainer holds none.
    assert np.all(after > before + (1 << 29))


def test_processor_cores_are_predicted_once_their_peak_is_measured(store: Store) -> None:
    chosen = spec(
        device="cpu",
        model="llama-tiny",
        sequence_length=64,
        global_batch_size=8,
        gpus=[1, 2],
        precision="fp32",
    )
    small, large = chosen.cells()
    assert ask(store, chosen, None).hardware is None
    cores = measured_hardware("Some Processor", {Precision.FP32: 5e10}, memory_bytes=None)
    past = Past(store, chosen, device_name="Some Processor")
    rows = [
        Layout(micro_batch_size=size, grad_accum_steps=8 // size, precision=Precision.FP32)
        for size in (1, 2, 4, 8)
    ]
    source = "measured: matmul 768^3 float32, 1 threads, in trial 1"
    past.measure(
        small, rows, times(small, 2.0, cores), peak_flops=5e10, peak_source=source, reserved=None
    )
    found = ask(store, chosen, None)
    assert found.hardware == cores
    assert cores.memory_bytes == UNLIMITED_BYTES
    planned = plan_cell(
        chosen,
        large,
        hardware=found.hardware,
        gpus_per_node=2,
        calibration=found.calibration(large),
        device=Device.CPU,
    )
    assert planned.candidates.memory_limit_bytes is None
    assert np.isfinite(planned.candidates.tokens_per_second_per_gpu).all()


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("name", ["Tesla T4", "T4"])
def test_a_gpu_without_a_data_sheet_compiles_layers_and_is_timed_as_one(
    store: Store, name: str, is_measured: bool
) -> None:
    chosen = spec(device="auto", workload="llama")
    if is_measured:
        cell = chosen.cells()[0]
        source = "measured: matmul 8192^3 bfloat16, in trial 1"
        Past(store, chosen, device_name="Tesla T4").measure(
            cell, layouts_of(cell), times(cell, 1.0), peak_flops=2e14, peak_source=source
        )
    found = ask(store, chosen, None, name)
    assert bool(found.rows) is is_measured
    assert found.calibration().trainer.compiled
    assert found.trial_cost.least_seconds == ask(None, spec()).trial_cost.least_seconds > 0


def test_a_precision_that_was_not_measured_yet_is_predicted_within_reason() -> None:
    cores = measured_hardware(
        "Some Processor", {Precision.FP32: 5e10, Precision.BF16: 1e10}, memory_bytes=None
    )
    (cell,) = spec(
        device="cpu",
        model="llama-tiny",
        sequence_length=64,
        global_batch_size=8,
        gpus=1,
        precision="fp32",
    ).cells()
    asked = [
        Layout(micro_batch_size=8, precision=precision)
        for precision in (Precision.FP32, Precision.FP16, Precision.BF16)
    ]
    fp32, fp16, bf16 = predict_step_time(LayoutTable.of(asked), cell, cores, gpus_per_node=1).total
    assert fp16 < 1.5 * fp32, (
        "as fast as the fastest that was measured, though its numbers are shorter"
    )
    assert bf16 > fp32, "what was measured stands"


def test_of_processors_the_newest_trials_one_is_meant(store: Store) -> None:
    chosen = spec(
        device="cpu",
        model="llama-tiny",
        sequence_length=64,
        global_batch_size=8,
        gpus=1,
        precision="fp32",
    )
    (cell,) = chosen.cells()
    source = "measured: matmul 768^3 float32, 1 threads"
    for name, flops in (("old core", 1e10), ("new core", 5e10)):
        row = Layout(micro_batch_size=8, precision=Precision.FP32)
        Past(
            store, spec(**chosen.model_dump() | {"name": name.replace(" ", "-")}), device_name=name
        ).measure(
            cell, [row], lambda table: [1.0], peak_flops=flops, peak_source=source, reserved=None
        )
    found = ask(store, chosen, None)
    assert found.hardware is not None
    assert (found.hardware.name, found.hardware.peak_flops[Precision.FP32], len(found.rows)) == (
        "new core",
        5e10,
        1,
    )


def test_a_simulated_device_is_the_one_of_its_data_sheet(store: Store) -> None:
    chosen = spec(
        device="cpu", workload={"name": "synthetic", "options": {"device_name": "h100-sxm"}}
    )
    cell = chosen.cells()[0]
    past = Past(store, chosen, device_name="synthetic h100-sxm")
    past.measure(cell, layouts_of(cell), times(cell, 1.2), peak_source="table: h100-sxm")
    found = ask(store, chosen, None)
    assert found.hardware is H100
    assert len(found.rows) == 6


def test_the_uncertainty_of_a_new_cell_shrinks_with_relatives_and_never_below_what_formulas_miss(
    store: Store,
) -> None:
    small, large = spec().cells()
    table = LayoutTable.of(layouts_of(large))
    before = ask(store, spec()).calibration(large).predict(table, large, H100, gpus_per_node=8)
    Past(store, spec(name="relative")).measure(small, layouts_of(small), times(small, 1.2))
    after = ask(store, spec()).calibration(large).predict(table, large, H100, gpus_per_node=8)
    assert np.all(after.log_step_sd < before.log_step_sd)
    assert np.all(after.log_step_sd > 0)
    assert exp(after.step_residual_sd) > 1.01


# -- links -----------------------------------------------------------------------------------------


def measure_links(
    store: Store,
    share: float,
    *,
    run_token: str = "first",
    node: str = "n0",
    device_name: str = DRIVER_NAME,
) -> None:
    """As `sweep netbench` leaves them: collectives over two nodes of H100s whose network gives that
    share of its data sheet.
    """
    constants = StepTimeConstants(inter_node_share=share)
    span = Span(num_ranks=16, num_nodes=2)
    sizes = [4.0**power for power in range(5, 15)]
    one = ring_seconds(
        num_ranks=np.full(len(sizes), 16.0),
        num_nodes=np.full(len(sizes), 2.0),
        num_bytes=np.array(sizes),
        hardware=H100,
        constants=constants,
    )
    samples = [
        (
            LinkSample(
                collective=Collective.ALL_GATHER,
                span=span,
                message_bytes=int(size),
                seconds=float(seconds),
            ),
            100,
        )
        for size, seconds in zip(sizes, one, strict=True)
    ]
    store.record_links(
        run_token, samples, backend="nccl", stack=Stack(device_name=device_name), nodes=[node, "n1"]
    )


def share_of(known: PriorKnowledge) -> float:
    return known.calibration().constants.inter_node_share


def test_measured_links_stand_in_for_what_is_usual(store: Store) -> None:
    measure_links(store, 0.01)
    known = read_prior_knowledge(
        store, spec(), H100, device=Device.CUDA, device_name=None, gpus_per_node=8
    )
    assert share_of(known) == pytest.approx(0.01, rel=0.25)
    assert known.network is not None and known.network.num_samples == 10


def test_the_newest_measurement_of_links_counts(store: Store) -> None:
    measure_links(store, 0.01)
    measure_links(store, 0.3, run_token="second")
    assert share_of(
        read_prior_knowledge(
            store, spec(), H100, device=Device.CUDA, device_name=None, gpus_per_node=8
        )
    ) == pytest.approx(0.3, rel=0.25)


@pytest.mark.parametrize(
    ("why", "changes", "where"),
    [
        ("of other devices", {"device_name": "NVIDIA H200"}, None),
        ("on another cluster", {"node": "n7"}, ["n0", "n2"]),
    ],
)
def test_links_of_others_tell_nothing(
    store: Store, why: str, changes: dict[str, str], where: list[str] | None
) -> None:
    measure_links(store, 0.01, **changes)
    known = read_prior_knowledge(
        store, spec(), H100, device=Device.CUDA, device_name=None, gpus_per_node=8, nodes=where
    )
    assert known.network is None, why
    assert share_of(known) == pytest.approx(StepTimeConstants().inter_node_share)


def test_trials_that_are_only_pretended_send_nothing_over_links(store: Store) -> None:
    measure_links(store, 0.01)
    pretended = spec(workload={"name": "synthetic"})
    assert (
        read_prior_knowledge(
            store, pretended, H100, device=Device.CUDA, device_name=None, gpus_per_node=8
        ).network
        is None
    )


def test_a_slow_network_changes_the_plan(store: Store) -> None:
    """A 3B model on 16 GPUs: over a slow network, gradients that all 16 replicas share cost more
    than two stages of a pipeline.
    """
    asked = spec(
        gpus=16,
        global_batch_size=32,
        axes={"micro_batch_size": 1, "recompute": "full", "pipeline_parallel_size": [1, 2]},
        workload={"name": "command", "options": {"argv": ["true"]}},
    )
    (cell,) = asked.cells()
    best = []
    for token, share in (("fast", 0.4), ("slow", 0.01)):
        measure_links(store, share, run_token=token)
        known = read_prior_knowledge(
            store, asked, H100, device=Device.CUDA, device_name=None, gpus_per_node=8
        )
        found = plan_cell(
            asked,
            cell,
            hardware=H100,
            gpus_per_node=8,
            calibration=known.calibration(cell),
            device=Device.CPU,
        ).candidates
        best.append(found.table.layout(int(found.order[0])).pipeline_parallel_size)
    assert best == [1, 2]
