"""A replayed table: what a launch returns, what it costs, and what a table must contain."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.physics.trainer import TRAINERS
from orchestrator.core.pretend.replay import (
    ReplayTable,
    failure_text,
    read_table,
    replayed_failure,
    replayed_layout,
    replayed_result,
    reserved_gpu_seconds,
)
from orchestrator.core.pretend.run_table import RunStatus, parse_runs
from orchestrator.core.problem.hardware import DEVICES, GIB
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.search.planner import trainer_of
from orchestrator.core.search.space import NOT_IN_TABLE, CellSpace, enumerate_cell
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.spec_yaml import load
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.failures import proves_out_of_memory
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.protocol import Device, MeasurementPlan
from tests import measured_table

ID = "formula-8gpu"
PLAN = MeasurementPlan(warmup_steps=3, min_steps=5, max_steps=50, relative_confidence=0.02)
BEST = Layout(
    data_parallel_size=8,
    micro_batch_size=2,
    grad_accum_steps=2,
    zero_stage=1,
    options=(("attention_kernel", "flash"),),
)
NOT_RUN = Layout(
    data_parallel_size=4,
    tensor_parallel_size=2,
    micro_batch_size=1,
    grad_accum_steps=8,
    recompute=Recompute.parse("full"),
    zero_stage=1,
    options=(("attention_kernel", "eager"),),
)


def table(*more: dict[str, str], without: str | None = None) -> ReplayTable:
    return read_table(measured_table.text(*more, without=without), ID)


def sweep_of(found: ReplayTable, **overrides: object) -> SweepSpec:
    return load(json.dumps(found.sweep(name=None, path="t.csv") | overrides), source="t")


def space_of(found: ReplayTable, spec: SweepSpec) -> CellSpace:
    (cell,) = spec.cells()
    return enumerate_cell(spec, cell, gpus_per_node=8, among=found.layouts(cell))


def row(**changes: str) -> dict[str, str]:
    """The best layout's row, changed."""
    rows = measured_table.rows()
    best = next(
        r
        for r in rows
        if (r["tp"], r["mbs"], r["recompute"], r["attention_kernel"]) == ("1", "2", "none", "flash")
    )
    return best | changes


def test_the_sweep_of_a_table_means_its_rows_and_no_others() -> None:
    found = table()
    space = space_of(found, sweep_of(found))
    rows = measured_table.rows()
    assert len(space.legal) == len(rows) == 19
    # Dp 2 x tp 2 x mbs 3 x ga 4 x recompute 2 x kernel 2.
    assert space.num_combinations == 192
    assert space.rejected == {NOT_IN_TABLE: 192 - 19}
    assert space.reason(BEST) is None
    assert space.reason(NOT_RUN) == NOT_IN_TABLE


def test_axes_and_constraints_of_a_file_of_ones_own_narrow_a_table() -> None:
    found = table()
    spec = sweep_of(found, constraints=["attention_kernel == 'flash'"])
    space = space_of(found, spec)
    num_flash = sum(r["attention_kernel"] == "flash" for r in measured_table.rows())
    assert len(space.legal) == num_flash
    assert space.rejected["constraint: attention_kernel == 'flash'"] == 19 - num_flash
    assert sum(space.rejected.values()) + len(space.legal) == space.num_combinations


def test_the_rules_of_this_project_reject_no_layout_that_somebody_ran() -> None:
    fed_too_little = row(
        dp="1", tp="1", pp="8", mbs="16", grad_acc="2", status="error", step_time_s=""
    )  # 2 micro-batches for 8 stages
    found = table(fed_too_little)
    assert len(space_of(found, sweep_of(found)).legal) == 20


def test_device_and_memory_are_the_tables() -> None:
    found = table()
    spec = sweep_of(found)
    assert (spec.device, spec.device_memory_gib, spec.gpus_per_node) == ("h100-sxm", None, 8)
    assert (
        sweep_of(
            read_table(measured_table.text().replace("H100-80GB,80,", "V100-32GB,32,"), ID)
        ).device
        == "v100-32gb"
    )
    cut = read_table(measured_table.text().replace("H100-80GB,80,", "H100-80GB,40,"), ID)
    assert sweep_of(cut).device_memory_gib == pytest.approx(cut.device.memory_bytes / GIB)
    assert 38 < cut.device.memory_bytes / GIB < 40


def test_a_run_that_ended_well_returns_its_numbers() -> None:
    found = table()
    (cell,) = sweep_of(found).cells()
    run = found.run(cell, BEST)
    result = replayed_result(run, found.device)
    assert result.step_seconds == [
        pytest.approx(measured_table.step_seconds(1, 2, "none", "flash"))
    ]
    assert result.peak_memory_reserved_bytes == pytest.approx(40 * GIB, rel=1e-3)  # 20 + 10 x 2
    assert result.peak_memory_allocated_bytes is None
    assert result.peak_flops == DEVICES["h100-sxm"].peak_flops[Precision.BF16]
    assert result.peak_flops_source == "table: h100-sxm"
    assert reserved_gpu_seconds(run, PLAN) == pytest.approx((60 + 8 * 4.4) * 8)


@pytest.mark.parametrize("length", [200, 201])
def test_a_long_name_of_hardware_is_cut(length: int) -> None:
    found = table()
    (cell,) = sweep_of(found).cells()
    run = replace(found.run(cell, BEST), hardware="h" * length)
    assert replayed_result(run, found.device).stack == Stack(device_name="h" * 200)


def test_a_time_that_no_device_could_reach_has_no_mfu() -> None:
    found = read_table(measured_table.text(row(mbs="4", grad_acc="1", step_time_s="0.001")), ID)
    (cell,) = sweep_of(found).cells()
    run = found.run(cell, replace(BEST, micro_batch_size=4, grad_accum_steps=1))
    assert replayed_result(run, found.device).peak_flops is None


def test_out_of_memory_and_error_are_what_they_were() -> None:
    runs = [run for run in parse_runs(measured_table.text()) if run.status is not RunStatus.OK]
    failures = {run.status: replayed_failure(run, node="n") for run in runs}
    assert failures[RunStatus.OOM].kind is FailureKind.OOM_GPU
    assert proves_out_of_memory(failures[RunStatus.OOM])
    assert failures[RunStatus.ERROR].kind is FailureKind.USER_ERROR
    assert all(reserved_gpu_seconds(run, PLAN) == 60 * 8 for run in runs)
    # A time that a failed run has is of no step that was waited for.
    assert reserved_gpu_seconds(replace(runs[0], step_seconds=4.0), PLAN) == 60 * 8
    assert all((one.rank, one.exit_code) == (0, 1) for one in failures.values())
    for run in runs:
        what = "out of memory" if run.status is RunStatus.OOM else "it ended in an error"
        said = f"line {run.line} of table {ID}: {what} when it was measured"
        assert failure_text(run) == said


@pytest.mark.parametrize(
    ("more", "status", "seconds"),
    [
        (["5.0"], RunStatus.OK, 5.0),  # of 4.4 and 5
        (["5.0", "6.0", "7.0"], RunStatus.OK, 6.0),  # of 4.4, 5, 6 and 7
        (["oom"], RunStatus.OOM, None),
        (["oom", "error", "error"], RunStatus.ERROR, None),
        (["oom", "5.0"], RunStatus.OK, 5.0),
    ],
)
def test_of_an_even_number_of_runs_the_slower_in_the_middle_stands_and_a_failure_where_half_failed(
    more: list[str], status: RunStatus, seconds: float | None
) -> None:
    found = table(
        *(
            row(status=word, step_time_s="") if word.isalpha() else row(step_time_s=word)
            for word in more
        )
    )
    (cell,) = sweep_of(found).cells()
    assert (found.run(cell, BEST).status, found.run(cell, BEST).step_seconds) == (status, seconds)


def test_the_sweep_names_the_trainer_that_the_words_of_the_table_mean_whatever_version_ran() -> (
    None
):
    assert sweep_of(table()).trainer is None
    header, *lines = measured_table.text().splitlines()
    told = [f"{header},code_version", *(f"{line},pre_pp_fix" for line in lines)]
    text = "\n".join(told).replace(",bf16,", ",bf16(fp32 grad accum),")
    assert trainer_of(sweep_of(read_table(text, ID)), device=Device.CPU) == TRAINERS["nanotron"]


def test_of_several_rows_of_a_layout_the_median_of_those_that_ran_stands() -> None:
    more = [row(step_time_s="5.0"), row(step_time_s="9.0"), row(status="error", step_time_s="")]
    found = table(*more)
    (cell,) = sweep_of(found).cells()
    assert found.run(cell, BEST).step_seconds == 5.0  # of 4.4, 5 and 9
    assert len(found.layouts(cell)) == 19


def test_rows_that_are_not_to_be_replayed_or_tell_nothing_are_left_out() -> None:
    more = [
        row(mbs="4", grad_acc="1", replay="False"),
        row(mbs="4", grad_acc="1", status="pruned"),
        row(mbs="4", grad_acc="1", step_time_s=""),
    ]
    found = table(*more)
    (cell,) = sweep_of(found).cells()
    assert len(found.layouts(cell)) == 19


def test_words_that_no_layout_can_say_become_options() -> None:
    text = measured_table.text(
        row(recompute="selective_core"),
        row(recompute="selective_attn"),
        row(recompute="attention_only"),
    )
    words = {dict(replayed_layout(run).options).get("recompute_word") for run in parse_runs(text)}
    assert {"selective_core", "selective_attn", "attention_only"} <= words
    found = read_table(text, ID)
    assert "recompute_word" in sweep_of(found).axes.options


@pytest.mark.parametrize(
    ("table_id", "text", "told"),
    [
        (
            "formula-8gp",
            measured_table.text(),
            "no table 'formula-8gp'; did you mean formula-8gpu?",
        ),
        ("x", measured_table.text(), "it has formula-8gpu"),
        (ID, measured_table.text(without="layers"), "has no model shape: line 2 lacks layers"),
        (ID, measured_table.text(without="replay"), "has no row that can be replayed"),
        (ID, measured_table.text(row(hardware="A100-80GB")), "mixes hardware A100-80GB, H100-80GB"),
    ],
)
def test_a_table_that_cannot_be_searched_is_refused_with_what_is_missing(
    table_id: str, text: str, told: str
) -> None:
    with pytest.raises(UsageInvalid) as caught:
        read_table(text, table_id)
    assert told in str(caught.value)


def test_a_sweep_that_the_table_cannot_answer_is_refused_with_what_it_has() -> None:
    found = table()
    with pytest.raises(
        UsageInvalid, match="it has formula-8b: gpus=8 sequence_length=4096 global_batch_size=32"
    ):
        found.check(sweep_of(found, gpus=4))
    axes = found.sweep(name=None, path="t")["axes"] | {"options": {}}
    with pytest.raises(
        UsageInvalid, match=r"write axes.options: \{attention_kernel: \[eager, flash\]\}"
    ):
        found.check(sweep_of(found, axes=axes))
    found.check(sweep_of(found))


def test_of_problems_that_are_no_grid_the_largest_is_meant() -> None:
    other = row(gbs="64", grad_acc="4")
    on_16 = row(gbs="128", n_gpus="16", dp="16", grad_acc="4")
    found = table(other, on_16)
    assert not found.is_complete
    assert len(found.cell_texts) == 3
    spec = sweep_of(found)
    assert (spec.gpus, spec.global_batch_size) == ((8,), (32,))
    assert 16 in spec.axes.data_parallel_size  # so that overrides choose the others
    assert sweep_of(table(other)).global_batch_size == (32, 64)


def test_a_changed_table_has_another_digest() -> None:
    assert table().digest == table().digest
    assert table().digest != table(row(mbs="4", grad_acc="1")).digest
    # As stores have it.
    assert len(table().digest) == 16


def test_a_sweep_of_a_table_has_a_name_of_63_characters_and_repeats_nothing() -> None:
    found = replace(table(), table_id="t" * 99).sweep(name=None, path="t.csv")
    assert found["name"] == f"replay-{'t' * 56}"
    assert sweep_of(table()).search.confirm.repeats == 0


def test_the_first_row_without_a_shape_is_told_with_what_it_lacks() -> None:
    lacking = row(hidden="", heads="")
    with pytest.raises(UsageInvalid, match=r"no model shape: line 21 lacks hidden, heads\."):
        table(lacking)


def test_models_of_one_name_get_names_of_their_own() -> None:
    """A name of a preset of other sizes is taken, too."""
    found = table(row(layers="16"), row(model="llama-3.2-1b", layers="12"))
    first, second, third = found.models.items()
    assert [model.name for _, model in (first, second, third)] == [
        "formula-8b",
        f"formula-8b-{second[0][:8]}",
        f"llama-3.2-1b-{third[0][:8]}",
    ]
