"""The calculator of a cell says what the plan says, also beyond the values of the sweep file."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout, Options, Recompute
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from orchestrator.core.search.calculator import AxisChoice, Calculator, texts_of
from orchestrator.core.search.planner import adapted, plan_cell, trainer_of
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.spec_yaml import load
from orchestrator.core.trial.protocol import Device

H100 = DEVICES["h100-sxm"]
FOLDER = Path(__file__).parents[3] / "sweeps"
FILES = ("8b.yaml", "playbook.yaml", "recipes/megatron.yaml", "recipes/torchtitan.yaml")


@cache
def spec_of(file: str, *overrides: str) -> SweepSpec:
    path = FOLDER / file
    return load(path.read_text(), source=str(path), overrides=overrides)


def calculator(spec: SweepSpec, cell: int = 0) -> Calculator:
    """The calculator without prior knowledge: `cli.sweep_file` takes it from the store."""
    chosen = spec.cells()[cell]
    prior = Calibration.prior(
        trainer_of(spec, device=Device.CPU), is_known=spec.knows_memory is not None
    )

    def calibration(options: Options) -> Calibration:
        return adapted(
            prior, trainer_of(spec, device=Device.CPU), trainer_of(spec, options, device=Device.CPU)
        )

    return Calculator(
        spec=spec,
        planned=plan_cell(
            spec, chosen, hardware=H100, gpus_per_node=8, calibration=prior, device=Device.CPU
        ),
        calibration=calibration,
        hardware=H100,
        gpus_per_node=8,
    )


@cache
def calculator_of(file: str, cell: int) -> Calculator:
    return calculator(spec_of(file), cell)


def fields(layout: Layout, **changes: str) -> list[tuple[str, str]]:
    """The fields of a layout but those that follow, with some changed."""
    following = ("data_parallel_size", "grad_accum_steps")
    texts = {name: text for name, text in texts_of(layout).items() if name not in following}
    return list((texts | changes).items())


def choice(found: Calculator, name: str) -> AxisChoice:
    return next(one for one in found.choices if one.name == name)


@pytest.mark.parametrize("file", FILES)
def test_every_layout_of_the_plan_has_the_numbers_of_the_plan(file: str) -> None:
    found = calculator_of(file, 0)
    candidates = found.planned.candidates
    assert len(candidates)
    for row in candidates.order[:: max(len(candidates) // 20, 1)]:
        layout = candidates.table.layout(int(row))
        assert found.layout(fields(layout)) == layout
        explained = found.explain(layout)
        assert explained.illegal is None
        assert explained.memory_bytes == pytest.approx(candidates.memory_bytes[row], rel=1e-12)
        assert explained.step_seconds == pytest.approx(candidates.step_seconds[row], rel=1e-12)
        assert explained.fits == candidates.fits[row]


@pytest.mark.parametrize("file", ["8b.yaml", "recipes/megatron.yaml", "recipes/torchtitan.yaml"])
def test_a_value_that_the_file_lacks_is_predicted_as_if_the_file_had_it(file: str) -> None:
    found = calculator_of(file, 0)
    replicas = found.start.data_parallel_size
    share = found.cell.global_batch_size // replicas
    own = choice(found, "micro_batch_size").in_file
    new = [size for size in range(1, share + 1) if share % size == 0 and str(size) not in own]
    layout = found.layout(fields(found.start, micro_batch_size=str(new[0])))
    overrides = (f"axes.micro_batch_size=[{new[0]}]",)
    widened = calculator(spec_of(file, *overrides)).planned.candidates
    explained = found.explain(layout)
    row = widened.table.row_of[layout]
    assert explained.illegal is None
    assert explained.memory_bytes == pytest.approx(widened.memory_bytes[row], rel=1e-12)
    assert explained.step_seconds == pytest.approx(widened.step_seconds[row], rel=1e-12)


def test_the_reason_of_a_layout_of_the_axes_is_the_reason_of_the_plan() -> None:
    """Each combination of the file's values, legal or not, of a small cell."""
    spec = spec_of("playbook.yaml")
    found = calculator_of("playbook.yaml", 0)
    space, axes = found.planned.space, spec.axes
    start = found.start
    for tensor in axes.tensor_parallel_size:
        for pipeline in axes.pipeline_parallel_size:
            for stage in axes.zero_stage:
                layout = found.layout(
                    fields(
                        start,
                        tensor_parallel_size=str(tensor),
                        pipeline_parallel_size=str(pipeline),
                        zero_stage=str(stage),
                    )
                )
                assert found.explain(layout).illegal == space.reason(layout)


def test_recomputation_is_in_the_order_of_how_much_is_computed_again() -> None:
    file = "axes.recompute=['selective_ops:8','full:2']"
    found = choice(calculator(spec_of("8b.yaml", file)), "recompute")
    assert found.in_file == {"selective_ops:8", "full:2"}
    assert found.values == (
        "none",
        "selective_attention",
        "selective_ops:8",
        "selective_ops",
        "full:2",
        "full:8",
        "full:16",
        "full:24",
        "full",
    )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"tensor_parallel_size": "16"}, "is not the number of GPUs"),
        ({"tensor_parallel_size": "3"}, "is not the number of GPUs"),
        ({"micro_batch_size": "3"}, "is not global_batch_size"),
        ({"micro_batch_size": "32"}, "micro-batches beyond 16 x 4096 tokens"),
        ({"zero_stage": "3", "pipeline_parallel_size": "2"}, "ZeRO 2 and 3 communicate again"),
        ({"recompute": "full:99"}, "recomputes more than the model's 16 layers"),
        ({"data_parallel_size": "4"}, "is not the number of GPUs"),
        ({"grad_accum_steps": "5"}, "is not global_batch_size"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_the_rule(changes: dict[str, str], rule: str) -> None:
    found = calculator_of("playbook.yaml", 0)
    explained = found.explain(found.layout(fields(found.start, **changes)))
    assert explained.illegal is not None
    assert rule in explained.illegal
    assert explained.nearest
    legal = found.planned.space
    assert all(legal.reason(change.layout) is None for change in explained.nearest)


@pytest.mark.parametrize(
    ("field", "text", "says"),
    [
        ("micro_batchsize", "2", "did you mean micro_batch_size"),
        ("micro_batch_size", "0", "expected a whole number, at least 1"),
        ("micro_batch_size", "-1", "expected a whole number"),
        ("micro_batch_size", "9" * 40, "expected a whole number"),
        ("zero_stage", "two", "expected a whole number, at least 0"),
        ("recompute", "ful", "did you mean full"),
        ("precision", "bf61", "did you mean bf16"),
        ("accumulate", "first", "expected one of scatter, last"),
    ],
)
def test_a_field_or_value_that_there_is_not_is_named(field: str, text: str, says: str) -> None:
    with pytest.raises(UsageInvalid) as refused:
        calculator_of("8b.yaml", 0).layout([(field, text)])
    assert says in str(refused.value)


def test_replicas_and_accumulation_follow_from_what_is_chosen() -> None:
    found = calculator_of("8b.yaml", 1)
    layout = found.layout(fields(found.start, tensor_parallel_size="4", context_parallel_size="1"))
    rest = layout.pipeline_parallel_size
    assert layout.data_parallel_size == 16 // (4 * rest)
    assert layout.global_batch_size == 1024
    assert layout.world_size == 16


def test_the_choices_are_the_files_values_and_all_that_can_be_legal() -> None:
    found = calculator_of("8b.yaml", 0)
    micro = choice(found, "micro_batch_size")
    assert micro.values == tuple(str(2**power) for power in range(11))
    assert micro.in_file == {"1", "2", "4", "8"}
    assert micro.is_number
    assert not micro.may_follow
    following = {one.name for one in found.choices if one.may_follow}
    assert following == {"data_parallel_size", "grad_accum_steps"}
    recompute = choice(found, "recompute")
    # 32 layers: quarters in addition to the file's values, the least recomputation first.
    assert recompute.values == (
        *("none", "selective_attention", "selective_ops", "full:8", "full:16", "full:24", "full"),
    )
    assert recompute.in_file == {"none", "selective_ops", "full", "full:16", "full:24"}
    assert choice(found, "zero_stage").values == ("0", "1", "2", "3")
    assert choice(found, "accumulate").values == ("scatter", "last")
    assert not choice(found, "accumulate").is_number
    assert choice(found, "data_parallel_size").may_follow
    assert choice(found, "grad_accum_steps").may_follow
    assert choice(found, "pipeline_schedule").values == ("gpipe", "1f1b", "interleaved:2")


def test_a_schedule_that_the_file_lacks_is_no_reason_to_refuse() -> None:
    spec = spec_of("8b.yaml", "axes.pipeline_schedule=[gpipe]")
    found = calculator(spec)
    changes = {"pipeline_parallel_size": "2", "zero_stage": "1"}
    changes |= {"pipeline_schedule": "interleaved:3"}
    layout = found.layout(fields(found.start, **changes))
    assert layout.pipeline_schedule == PipelineSchedule.parse("interleaved:3")
    assert found.explain(layout).illegal is None
    plain = found.layout(fields(found.start, **(changes | {"pipeline_schedule": "1f1b"})))
    assert found.explain(plain).illegal is None
    assert found.planned.space.reason(plain) is not None


def test_without_a_legal_layout_the_calculator_still_starts() -> None:
    spec = spec_of("8b.yaml", "axes.micro_batch_size=[3]")
    found = calculator(spec)
    assert not len(found.planned.candidates)
    explained = found.explain(found.layout(fields(found.start, zero_stage="3")))
    assert explained.illegal is None
    assert explained.nearest == ()
    assert explained.memory_bytes > 0


def test_the_utilisation_is_model_flops_over_the_data_sheet() -> None:
    found = calculator_of("8b.yaml", 0)
    explained = found.explain(found.start)
    tokens = explained.tokens_per_second_per_gpu
    assert tokens is not None
    of_a_token = found.cell.model.flops_per_token(4096)
    # H100 SXM: 989 TFLOP/s in bf16, dense.
    assert explained.mfu == pytest.approx(tokens * of_a_token / 989e12, rel=0.001)


def test_bands_hold_the_prediction() -> None:
    explained = calculator_of("8b.yaml", 0).explain(calculator_of("8b.yaml", 0).start)
    for band in (explained.memory_band, explained.step_band):
        assert band is not None
        low, high = band
        assert low < 1 < high


SIZE = st.integers(1, 10) | st.sampled_from([16, 32, 64, 512, 1024, 999_999_999])
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        **{
            name: SIZE.map(str)
            for name in (
                "data_parallel_size",
                "tensor_parallel_size",
                "pipeline_parallel_size",
                "context_parallel_size",
                "micro_batch_size",
                "grad_accum_steps",
            )
        },
        "zero_stage": st.integers(0, 9).map(str),
        "recompute": st.sampled_from(["none", "full", "full:3", "full:99999", "selective_ops:7"]),
        "precision": st.sampled_from(["bf16", "fp32", "fp16", "fp8"]),
        "pipeline_schedule": st.sampled_from(["gpipe", "1f1b", "interleaved:2", "interleaved:64"]),
    },
)


@given(
    chosen=FIELDS,
    which=st.sampled_from([("8b.yaml", 0), ("8b.yaml", 3), ("playbook.yaml", 0)]),
)
@pytest.mark.filterwarnings("error")
def test_any_layout_is_predicted_or_refused(chosen: dict[str, str], which: tuple[str, int]) -> None:
    found = calculator_of(*which)
    explained = found.explain(found.layout(chosen.items()))
    if explained.illegal is None:
        assert explained.layout.world_size == found.cell.num_gpus
        assert explained.layout.global_batch_size == found.cell.global_batch_size
        assert explained.memory_bytes > 0
        assert explained.step_seconds is not None
        assert explained.step_seconds > 0
    else:
        assert explained.illegal


@given(text=st.text(max_size=20), name=st.sampled_from(["recompute", "zero_stage", "x", ""]))
def test_any_text_is_a_value_or_refused(text: str, name: str) -> None:
    found = calculator_of("playbook.yaml", 0)
    with suppress(UsageInvalid):
        layout = found.layout([(name, text)])
        assert texts_of(layout).keys() >= {name}


def test_texts_of_a_layout_read_back() -> None:
    layout = replace(
        calculator_of("8b.yaml", 0).start,
        recompute=Recompute.parse("full:16"),
        pipeline_schedule=PipelineSchedule.parse("interleaved:2"),
    )
    assert calculator_of("8b.yaml", 0).layout(texts_of(layout).items()) == layout


def test_replicas_and_accumulation_follow_unless_they_are_chosen() -> None:
    choices = calculator(spec_of("8b.yaml")).choices
    follow = {choice.name for choice in choices if choice.may_follow}
    assert follow == {"data_parallel_size", "grad_accum_steps"}


def test_an_accumulation_that_was_chosen_does_not_follow() -> None:
    chosen = calculator(spec_of("8b.yaml"))
    start = chosen.start
    assert chosen.following(start) == {"data_parallel_size", "grad_accum_steps"}
    more = replace(start, grad_accum_steps=start.grad_accum_steps + 1)
    assert chosen.following(more) == {"data_parallel_size"}
