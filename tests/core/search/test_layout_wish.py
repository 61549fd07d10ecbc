"""How people name a layout: as tables print it, or by some of its fields."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.search.layout_wish import complete, first, is_field, parse_wish
from orchestrator.core.search.planner import CellPlan, plan_cell
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import Device

RICH = Layout(
    data_parallel_size=2,
    tensor_parallel_size=4,
    micro_batch_size=2,
    grad_accum_steps=8,
    recompute=Recompute.parse("full:8"),
    zero_stage=1,
    options=(("attention", "eager"),),
)


def planned(**changes: Any) -> CellPlan:
    spec = SweepSpec.model_validate(
        {
            "name": "t",
            "model": "llama-3.1-8b",
            "sequence_length": 4096,
            "global_batch_size": 64,
            "gpus": 8,
            "device": "h100-sxm",
            "axes": {
                "micro_batch_size": [1, 2, 4],
                "recompute": ["none", "full"],
                "zero_stage": [0, 1],
            },
        }
        | changes
    )
    return plan_cell(
        spec, spec.cells()[0], hardware=DEVICES["h100-sxm"], gpus_per_node=8, device=Device.CPU
    )


def meant(plan: CellPlan, *words: str) -> Layout:
    wish = parse_wish(words, options={}) if words else {}
    return complete(wish, plan.candidates, plan.space.cell)


@pytest.mark.parametrize("text", [RICH.key, RICH.short])
def test_what_tables_print_is_read_back(text: str) -> None:
    wish = parse_wish([text], options={"attention": ("flash", "eager")})
    assert all(
        wish[name] == getattr(RICH, name)
        for name in ("data_parallel_size", "tensor_parallel_size", "recompute", "zero_stage")
    )
    assert wish["options"] == {"attention": "eager"}


def test_fields_may_be_short_long_or_mixed_and_in_one_word_or_several() -> None:
    expected = {
        "data_parallel_size": 2,
        "micro_batch_size": 4,
        "recompute": Recompute.parse("full"),
        "zero_stage": 1,
    }
    assert (
        parse_wish(["dp=2", "micro_batch_size=4", "recompute=full", "zero=1"], options={})
        == expected
    )
    assert parse_wish(["dp=2 mbs=4 recompute=full z=1"], options={}) == expected
    assert parse_wish(["dp2 mbs4 full z1"], options={}) == expected
    assert parse_wish(["bf16"], options={}) == {"precision": Precision.BF16}
    for text in ("mbs=1 z=0", "mbs1 z0"):
        assert parse_wish([text], options={}) == {"micro_batch_size": 1, "zero_stage": 0}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mbbs=3"], "did you mean mbs"),
        (["recompute=ful"], "did you mean full"),
        (["precision=bf61"], "did you mean bf16"),
        (["fulll"], "did you mean full"),
        (["mbs=0"], "at least 1"),
        (["z=-1"], "at least 0"),
        (["mbs=1234567890"], "at least 1"),
        (["mbs=two"], "whole number"),
        (["dp=2", "dp=4"], "both 2 and 4"),
        (["attention=eager"], "no field of a layout"),
        ([], "no layout is named"),
    ],
)
def test_a_mistake_is_answered_with_what_was_meant(words: list[str], says: str) -> None:
    with pytest.raises(UsageInvalid, match=says):
        parse_wish(words, options={})


@pytest.mark.parametrize(
    "words",
    [["attention=eagr"], ["dp8_tp1_pp1_cp1_mbs1_ga8_none_z1_bf16-attention=eagr"]],
    ids=["field", "key"],
)
def test_an_option_has_one_of_its_axis_values(words: list[str]) -> None:
    with pytest.raises(
        UsageInvalid, match="attention=eagr: expected one of flash, eager; did you mean eager"
    ):
        parse_wish(words, options={"attention": ("flash", "eager")})
    assert parse_wish(
        ["fused=true", "threads=2"], options={"fused": (True, False), "threads": (1, 2)}
    ) == {"options": {"fused": True, "threads": 2}}
    with pytest.raises(UsageInvalid, match="attention=eager: it is no axis of this sweep"):
        parse_wish([f"{Layout().key}-attention=eager"], options={})


def test_a_mistyped_key_is_answered_with_the_nearest_of_the_cell() -> None:
    keys = [Layout(micro_batch_size=size).key for size in (1, 2, 4)]
    with pytest.raises(UsageInvalid, match=f"did you mean {keys[1]}"):
        parse_wish([keys[1].replace("bf16", "bf61")], options={}, keys=keys)


def test_what_is_left_out_is_taken_from_the_best_predicted_layout_that_has_the_rest() -> None:
    sizes = {"micro_batch_size": [1, 2, 4], "recompute": ["none", "full"], "zero_stage": [0, 1]}
    varied = sizes | {"options": {"attention": ["flash", "eager"]}}
    for plan in (planned(), planned(axes=varied)):
        found = meant(plan, "recompute=full")
        place = [plan.candidates.table.layout(int(row)) for row in plan.candidates.order]
        full = [layout for layout in place if layout.recompute == Recompute.parse("full")]
        assert found == full[0]
        assert meant(plan) == first(plan.candidates) == place[0]


def test_a_layout_that_is_not_legal_is_made_up_so_that_its_products_are_exact() -> None:
    found = meant(planned(), "tp=2", "mbs=2")
    assert (
        found.tensor_parallel_size,
        found.data_parallel_size,
        found.micro_batch_size,
        found.grad_accum_steps,
    ) == (2, 4, 2, 8)


def test_a_cell_without_legal_layouts_still_has_one_to_explain() -> None:
    assert meant(planned(axes={"micro_batch_size": [3]}), "mbs=3").micro_batch_size == 3


def test_words_of_a_layout_are_told_from_keys_of_the_sweep_file() -> None:
    assert is_field("precision=bf16", ())
    assert is_field("attention=eager", ["attention"])
    assert not is_field("gpus=8", ())
    assert not is_field("search.max_trials=3", ())
