"""Sweeps over a table: the real loop, searcher and store, with launches that return its rows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from orchestrator.cluster.contract import Finished
from orchestrator.cluster.replayed import (
    RayReplayScheduler,
    ReplayScheduler,
    for_one_process,
    table_of,
)
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.machines.packing import Shape
from orchestrator.core.pretend.replay import ReplayTable
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.search.space import CellSpaces
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import (
    Device,
    MeasurementPlan,
    PhaseLimits,
    TrialRequest,
    decode_request,
    encode,
)
from orchestrator.core.trial.reserved_time import Leased
from orchestrator.sweep.progress import SweepResult
from orchestrator.sweep.run import run_sweep
from tests import measured_table
from tests.node.launching import LIMITS
from tests.sweep.fake_scheduler import FakeScheduler

SHAPE = Shape(num_nodes=1, slots_per_node=8)
BEST = "dp8_tp1_pp1_cp1_mbs2_ga2_none_z1_bf16-attention_kernel=flash"


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    file = tmp_path / "table.csv"
    file.write_text(measured_table.text())
    return file


def spec_of(csv_file: Path, **search: Any) -> SweepSpec:
    from orchestrator.core.pretend.replay import read_table

    content = read_table(csv_file.read_text(), "formula-8gpu").sweep(name="t", path=str(csv_file))
    return SweepSpec.model_validate(content | {"search": content["search"] | search})


def opened(spec: SweepSpec) -> tuple[ReplayTable, ReplayScheduler]:
    table = table_of(spec)
    assert table is not None
    return table, ReplayScheduler(spec, table)


def run(store: Store, spec: SweepSpec) -> SweepResult:
    table, scheduler = opened(spec)
    return run_sweep(
        spec,
        store=store,
        open_scheduler=lambda: scheduler,
        code=Fingerprint(orchestrator_version="test", dirty_diff_digest=table.digest),
        hardware=lambda _: DEVICES[spec.device],
        clock=time.monotonic,
        spaces=CellSpaces(spec, table.layouts),
    )


def request_of(spec: SweepSpec, table: ReplayTable, trial_id: int, key_part: str) -> TrialRequest:
    (cell,) = spec.cells()
    layout = next(layout for layout in table.layouts(cell) if key_part in layout.key)
    return TrialRequest(
        sweep="t",
        trial_id=trial_id,
        attempt=1,
        workload="replay",
        options=spec.workload.options.as_written(),
        model=cell.model,
        sequence_length=cell.sequence_length,
        layout=layout,
        device=Device.CUDA,
        measurement=MeasurementPlan(
            warmup_steps=3, min_steps=5, max_steps=50, relative_confidence=0.02
        ),
        limits=PhaseLimits(**LIMITS),
        seed=0,
    )


@pytest.mark.parametrize("strategy", ["auto", "exhaustive", "random", "tpe"])
def test_every_strategy_finds_the_best_row_and_is_charged_what_launches_would_hold(
    store: Store, csv_file: Path, strategy: str
) -> None:
    result = run(store, spec_of(csv_file, strategy=strategy))
    assert result.counts[TrialState.FAILED] == 1
    assert result.counts[TrialState.OUT_OF_MEMORY] == 1
    assert result.counts[TrialState.MEASURED] == 17
    trials = store.trials(result.sweep_id)
    best = max(trials, key=lambda trial: trial.tokens_per_second_per_gpu or 0.0)
    assert best.layout.key == BEST
    assert best.tokens_per_second_per_gpu == pytest.approx(32 * 4096 / 4.4 / 8)
    assert best.gpu_seconds == pytest.approx((60 + 8 * 4.4) * 8)
    assert best.peak_memory_reserved_bytes == pytest.approx(40 * 2**30, rel=1e-3)


def test_a_sweep_over_a_table_goes_on_where_it_stopped(store: Store, csv_file: Path) -> None:
    run(store, spec_of(csv_file, max_trials=5))
    result = run(store, spec_of(csv_file, max_trials=9))
    trials = store.trials(result.sweep_id)
    assert sum(trial.num_attempts for trial in trials) == 9


def test_of_several_at_once_the_shortest_ends_first(csv_file: Path) -> None:
    spec = spec_of(csv_file, max_parallel_trials=2)
    table, scheduler = opened(spec)
    assert scheduler.slots.total == 16
    scheduler.start(
        request_of(spec, table, 1, "mbs1_ga4_full_z1_bf16-attention_kernel=eager"),
        SHAPE,
        ["replay-0"],
    )
    scheduler.start(
        request_of(spec, table, 2, "mbs2_ga2_none_z1_bf16-attention_kernel=flash"),
        SHAPE,
        ["replay-1"],
    )
    (first,) = scheduler.poll(1.0)
    assert isinstance(first, Finished)
    # By then the other one has run for as long.
    assert scheduler.leased().reserved == pytest.approx(2 * first.gpu_seconds)
    (second,) = scheduler.poll(1.0)
    assert isinstance(second, Finished)
    assert (first.trial_id, second.trial_id) == (2, 1)
    both, seconds = first.gpu_seconds + second.gpu_seconds, second.gpu_seconds / SHAPE.num_slots
    assert scheduler.leased() == Leased(
        reserved=pytest.approx(both), idle=0.0, capacity=pytest.approx(16 * seconds)
    )
    assert scheduler.poll(1.0) == []


def test_a_cancelled_launch_costs_nothing(csv_file: Path) -> None:
    spec = spec_of(csv_file)
    table, scheduler = opened(spec)
    scheduler.start(request_of(spec, table, 1, "mbs2_ga2"), SHAPE, ["replay-0"])
    scheduler.cancel(1)
    (event,) = scheduler.poll(1.0)
    assert isinstance(event, Finished)
    assert (event.failure.kind if event.failure else None, event.gpu_seconds) == ("cancelled", 0.0)


def test_one_process_stands_for_the_gang_and_the_charge_is_the_tables(csv_file: Path) -> None:
    spec = spec_of(csv_file)
    table, _ = opened(spec)
    asked: list[TrialRequest] = []

    def script(request: TrialRequest) -> float:
        asked.append(request)
        return 4.4

    scheduler = RayReplayScheduler(spec, table, FakeScheduler(script, slots=1))
    assert scheduler.slots.total == 8
    scheduler.start(request_of(spec, table, 1, BEST), SHAPE, ["replay-0"])
    finished = [event for event in scheduler.poll(1.0) if isinstance(event, Finished)]
    assert [event.gpu_seconds for event in finished] == [pytest.approx((60 + 8 * 4.4) * 8)]
    assert scheduler.leased() == Leased(
        reserved=pytest.approx((60 + 8 * 4.4) * 8), idle=0.0, capacity=None
    )
    assert asked[0].layout.world_size == 1
    assert asked[0].options["layout"] == BEST


def test_what_a_process_is_asked_is_text_and_back(csv_file: Path) -> None:
    spec = spec_of(csv_file)
    table, _ = opened(spec)
    request = for_one_process(request_of(spec, table, 1, BEST))
    assert decode_request(encode(request)) == request
    assert Path(str(request.options["table"])).is_absolute()


def test_a_table_that_is_not_there_is_refused(csv_file: Path) -> None:
    spec = spec_of(csv_file)
    csv_file.unlink()
    with pytest.raises(UsageInvalid, match="cannot read the table"):
        table_of(spec)


def test_a_file_that_is_no_table_is_refused_by_its_name(csv_file: Path) -> None:
    spec = spec_of(csv_file)
    csv_file.write_text("a,b\n1,2\n")
    with pytest.raises(UsageInvalid, match=rf"{csv_file}: line 1: no column table_id"):
        table_of(spec)
