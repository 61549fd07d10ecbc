from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.core.problem.layout import Precision, Recompute
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.problem.proofs import Dominance
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.objective import objectives_of
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.workload_options import LlamaOptions
from orchestrator.core.sweepfile.workload_section import compiles_layers, reports_on_last_node
from orchestrator.core.trial.limits import resolve_limits
from orchestrator.core.trial.protocol import Device
from tests.core.sweepfile.bounds import check_bounds


def sweep(**changes: Any) -> SweepSpec:
    data = {
        "name": "x",
        "model": "llama-tiny",
        "gpus": [1, 2],
        "sequence_length": 64,
        "global_batch_size": 16,
    }
    return SweepSpec.model_validate(
        {key: value for key, value in {**data, **changes}.items() if value is not ...}
    )


def refused(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        sweep(**changes)
    return str(caught.value)


def test_every_combination_is_a_cell_in_the_order_of_the_file() -> None:
    spec = sweep(
        model=["llama-60m", "llama-tiny"],
        gpus=[2, 1],
        sequence_length=[64, 32],
        global_batch_size=[8],
    )
    assert [cell.key for cell in spec.cells()] == [
        "llama-60m_2gpu_s64_gb8",
        "llama-60m_2gpu_s32_gb8",
        "llama-60m_1gpu_s64_gb8",
        "llama-60m_1gpu_s32_gb8",
        "llama-tiny_2gpu_s64_gb8",
        "llama-tiny_2gpu_s32_gb8",
        "llama-tiny_1gpu_s64_gb8",
        "llama-tiny_1gpu_s32_gb8",
    ]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4M", 4 << 20),
        ("256k", 256 << 10),
        ("1G", 1 << 30),
        ("4096", 4096),
        (4096, 4096),
        ("2 M", 2 << 20),
    ],
)
def test_tokens_are_counted_in_powers_of_two(text: str | int, tokens: int) -> None:
    spec = sweep(global_batch_size=..., global_batch_tokens=text, sequence_length=64)
    assert spec.cells()[0].tokens_per_step == tokens


def test_a_batch_in_tokens_is_another_number_of_sequences_at_each_length() -> None:
    spec = sweep(
        global_batch_size=..., global_batch_tokens="4M", sequence_length=["4K", "8K"], gpus=1
    )
    assert [(cell.sequence_length, cell.global_batch_size) for cell in spec.cells()] == [
        (4096, 1024),
        (8192, 512),
    ]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (90, 90.0),
        (1.5, 1.5),
        ("90s", 90.0),
        ("5min", 300.0),
        ("5m", 300.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("0.5 h", 1800.0),
    ],
)
def test_durations_are_seconds_or_carry_their_unit(given: Any, seconds: float) -> None:
    assert sweep(search={"max_wall_time": given}).search.max_wall_time == seconds


def test_one_value_may_stand_without_its_list() -> None:
    spec = sweep(
        gpus=4,
        precision="fp32",
        axes={"micro_batch_size": 2, "recompute": "full:2", "zero_stage": 1},
    )
    assert (spec.gpus, spec.precision) == ((4,), (Precision.FP32,))
    assert (spec.axes.micro_batch_size, spec.axes.recompute, spec.axes.zero_stage) == (
        (2,),
        (Recompute.parse("full:2"),),
        (1,),
    )


def test_a_model_is_a_preset_a_changed_preset_or_sizes() -> None:
    sizes = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "ffn_hidden_size": 96,
        "vocab_size": 100,
    }
    spec = sweep(
        model=[
            "llama-tiny",
            {"preset": "llama-tiny", "num_layers": 8},
            {**sizes, "name": "mine"},
            sizes,
            {"preset": "llama-60m"},
        ]
    )
    assert [model.name for model in spec.model] == [
        "llama-tiny",
        "llama-tiny-8x128",
        "mine",
        "llama-2x64",
        "llama-60m",
    ]
    assert spec.model[4] == PRESETS["llama-60m"]
    assert not spec.model[3].tied_embeddings


def test_two_definitions_need_two_names() -> None:
    assert "two definitions need two names" in refused(
        model=[
            {"preset": "llama-tiny", "num_layers": 2, "name": "a"},
            {"preset": "llama-tiny", "name": "a"},
        ]
    )
    assert "is a preset of other sizes" in refused(
        model={"preset": "llama-tiny", "num_layers": 2, "name": "llama-tiny"}
    )


def test_a_batch_that_the_length_does_not_divide_is_refused() -> None:
    assert "the batch is exact, never rounded" in refused(
        global_batch_size=..., global_batch_tokens=1000
    )


@pytest.mark.parametrize("key", ["gpus", "sequence_length", "global_batch_size"])
@pytest.mark.parametrize(
    "value", [True, "8", 8.5, None, [], [8, 8], 0, -1, [[8]], {}, float("nan")]
)
def test_counts_are_whole_numbers_and_nothing_else(key: str, value: Any) -> None:
    # Tokens may be text; a batch may be absent.
    if (key, value) in (
        ("sequence_length", "8"),
        ("global_batch_size", None),
    ):
        return
    assert refused(
        **{
            key: value,
            **({"global_batch_tokens": 64} if value is None and key == "global_batch_size" else {}),
        }
    )


_LONG = {
    "name": "x",
    "model": "llama-tiny",
    "gpus": 1,
    "sequence_length": 64,
    "global_batch_size": 16,
}


@pytest.mark.parametrize(
    ("name", "taken", "too_large"),
    [
        ("gpus_per_node", [1, 1024], 1025),
        ("device_memory_gib", [0.5, 4096.0], 4097.0),
        ("price_per_gpu_hour", [0.5, 10_000.0], 10_001.0),
    ],
)
def test_numbers_are_bounded_by_what_no_machine_exceeds(
    name: str, taken: list[float], too_large: float
) -> None:
    others = {key: value for key, value in _LONG.items() if key != name}
    check_bounds(SweepSpec, name, taken=taken, refused=[0, too_large], others=others)


def test_a_sweep_has_at_most_so_many_gpus_and_cells() -> None:
    assert sweep(gpus=[1, 16_384]).gpus == (1, 16_384)
    assert "gpus" in refused(gpus=16_385)
    batches = list(range(1, 33))
    assert len(sweep(gpus=batches, global_batch_size=batches).cells()) == 1024
    said = refused(gpus=list(range(1, 42)), global_batch_size=list(range(1, 26)))
    assert "make 1,025 cells; at most 1,024" in said


def test_a_spec_survives_json() -> None:
    spec = sweep(
        model=["llama-tiny", {"preset": "llama-tiny", "num_layers": 8}],
        axes={"recompute": ["none", "full:2", "selective"], "micro_batch_size": "auto"},
        constraints=["tp <= 8", {"require": "mbs > 1", "because": "slow"}],
        workload={
            "name": "command",
            "options": {"argv": ["a", "--mbs={micro_batch_size}"], "env": {"A": "1"}},
        },
        search={"plateau": {}, "max_wall_time": "1h"},
    )
    assert SweepSpec.model_validate_json(spec.model_dump_json()) == spec


def test_the_conditions_are_those_that_make_numbers_incomparable() -> None:
    before = sweep().conditions()
    for changes in (
        {"search": {"max_trials": 3}},
        {"axes": {"micro_batch_size": [1]}},
        {"gpus": [1, 2, 4]},
        {"constraints": ["tp == 1"]},
        {"measurement": {"limits": {"total": 5}}},
    ):
        assert sweep(**changes).conditions() == before
    for changes in (
        {"workload": "synthetic"},
        {"measurement": {"warmup_steps": 9}},
        {"device": "cpu"},
        {"workload": {"options": {"attention": "eager"}}},
    ):
        assert sweep(**changes).conditions() != before


def test_a_gpu_is_timed_for_seconds_and_longer_to_confirm_the_best() -> None:
    auto, asked = sweep().measurement, sweep(measurement={"min_seconds": 1.5}).measurement
    seconds = [auto.plan(device).min_seconds for device in (Device.CPU, Device.CUDA)]
    assert seconds == [0.0, 5.0]
    assert auto.plan(Device.CUDA, confirms=True).min_seconds == 10.0
    assert auto.plan(Device.CPU, confirms=True).min_seconds == 0.0
    assert auto.plan(Device.CUDA).warmup_seconds == 2.0
    assert asked.plan(Device.CPU).min_seconds == asked.plan(Device.CUDA).min_seconds == 1.5
    none = sweep(measurement={"min_seconds": 0}).measurement.plan(Device.CUDA)
    assert (none.min_seconds, none.warmup_seconds) == (0.0, 0.0)


def test_trials_that_cannot_win_are_ended_early_on_gpus_unless_all_are_to_be_measured() -> None:
    search, exhaustive = sweep().search, sweep(search={"strategy": "exhaustive"}).search
    assert [search.stops_early(device) for device in (Device.CPU, Device.CUDA)] == [False, True]
    assert not exhaustive.stops_early(Device.CUDA)
    asked = sweep(search={"strategy": "exhaustive", "early_stop": True}).search
    assert asked.stops_early(Device.CPU)


def test_defaults_are_what_the_measurement_and_the_limits_need() -> None:
    spec = sweep()
    plan = spec.measurement.plan(Device.CPU)
    assert plan.warmup_steps >= 2
    limits = resolve_limits(spec.measurement.limits.asked, plan=plan, num_ranks=1, predicted=None)
    assert limits.first_step == 300.0
    assert spec.axes.data_parallel_size == "auto"
    assert spec.axes.tensor_parallel_size == (1,)


def test_a_bound_on_the_gain_needs_a_strategy_that_predicts_one() -> None:
    assert sweep(search={"bound": 0.1}).search.bound == 0.1
    assert sweep(search={"bound": 0.1, "strategy": "auto"}).search.bound == 0.1
    assert "predicts no gain" in refused(search={"bound": 0.1, "strategy": "random"})


def test_one_objective_is_stored_as_one_value_and_several_as_a_list() -> None:
    for one in ("step_seconds", ["step_seconds"]):
        spec = sweep(objective=one)
        assert spec.model_dump(mode="json")["objective"] == "step_seconds"
        assert spec.conditions()["objective"] == "step_seconds"
    both = sweep(objective=["memory_headroom", "step_seconds"])
    stored = both.model_dump(mode="json")
    assert stored["objective"] == ["memory_headroom", "step_seconds"]
    assert SweepSpec.model_validate(stored) == both
    assert objectives_of(stored["objective"]) == both.objective
    assert objectives_of(None) == sweep().objective


@pytest.mark.parametrize(
    ("objectives", "merits", "ranked_by"),
    [
        (["tokens_per_second_per_gpu"], ["speed"], "tokens_per_second_per_gpu"),
        # Within a cell a price orders layouts as their speed does.
        (["step_seconds", "dollars_per_billion_tokens"], ["speed"], "step_seconds"),
        (["memory_headroom"], ["headroom"], "tokens_per_second_per_gpu"),
        (
            ["joules_per_token", "tokens_per_second_per_gpu"],
            ["efficiency", "speed"],
            "tokens_per_second_per_gpu",
        ),
    ],
)
def test_objectives_are_compared_by_their_merits_within_a_cell(
    objectives: list[str], merits: list[str], ranked_by: str
) -> None:
    spec = sweep(objective=objectives, price_per_gpu_hour=2.0)
    assert list(spec.merits) == merits
    assert spec.ranked_by == ranked_by


BOTH = ["tokens_per_second_per_gpu", "memory_headroom"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": "joules_per_token", "device": "cpu"}, "device cpu has none; leave it out"),
        (
            {"objective": "joules_per_token", "workload": "synthetic"},
            "workload synthetic uses none; leave it out",
        ),
        (
            {"objective": "dollars_per_billion_tokens", "device": "h20"},
            "device h20 has no list price",
        ),
        ({"objective": BOTH, "search": {"strategy": "tpe"}}, "strategy tpe looks for the fastest"),
        ({"objective": BOTH, "search": {"strategy": "gp"}}, "strategy gp looks for the fastest"),
        ({"objective": BOTH, "search": {"early_stop": True}}, "search.early_stop would end trials"),
        ({"objective": ["step_seconds", "step_seconds"]}, "step_seconds appears twice"),
        ({"objective": []}, "at least 1 item"),
    ],
)
def test_objectives_that_nothing_tells_or_looks_for_are_refused(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        sweep(**changes)


@pytest.mark.parametrize(
    ("options", "axis", "sums"),
    [({}, {}, False), ({"replicas": 2}, {}, True), ({}, {"replicas": [1, 2]}, True)],
)
def test_shards_are_summed_up_where_llama_has_replicas(
    options: dict[str, Any], axis: dict[str, Any], sums: bool
) -> None:
    axes = {"micro_batch_size": [1], **({"options": axis} if axis else {})}
    assert sweep(workload={"name": "llama", "options": options}, axes=axes).sums_shards is sums


COMMAND = {"name": "command", "options": {"argv": ["a", "{micro_batch_size}"], "env": {"A": "1"}}}


def test_the_memory_of_a_program_is_known_if_it_is_ours_or_declared() -> None:
    ours, foreign = sweep(workload="llama"), sweep(workload=COMMAND)
    declared = sweep(workload=COMMAND, trainer="megatron")
    assert ours.knows_memory == "workload llama is our own"
    assert declared.knows_memory == "the file declares its trainer"
    assert foreign.knows_memory is None
    proofs = [one.dominance for one in (ours, declared, foreign)]
    assert proofs == [Dominance.TRUSTED, Dominance.TRUSTED, Dominance.CONFIRMED]
    asked = sweep(workload=COMMAND, search={"dominance": "off"})
    assert asked.dominance is Dominance.OFF


def test_a_plateau_of_an_exhaustive_search_is_remarked_as_ignored() -> None:
    plateau = {"plateau": {"trials": 5}}
    assert sweep(search={"strategy": "auto"} | plateau).remarks() == ()
    assert sweep(search={"strategy": "exhaustive"}).remarks() == ()
    (remark,) = sweep(search={"strategy": "exhaustive"} | plateau).remarks()
    assert remark.startswith("search.plateau is ignored")


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ("x" * 100, True),
        ("x" * 101, False),
        ("two\nlines", False),
        (10**15, True),
        (10**15 + 1, False),
        (-(10**15), True),
        (-(10**15) - 1, False),
        (True, True),
        (1.5, False),
    ],
)
def test_a_value_of_an_option_is_a_short_word_or_a_number_of_15_digits(
    value: object, good: bool
) -> None:
    command = {"name": "command", "options": {"argv": ["a", "{kernel}"]}}
    axes = {"options": {"kernel": [value]}}
    if good:
        assert sweep(workload=command, axes=axes).axes.options["kernel"] == (value,)
    else:
        assert "is no value of an option" in refused(workload=command, axes=axes)


@pytest.mark.parametrize(
    ("because", "good"),
    [("x", True), ("x" * 200, True), ("", False), ("x" * 201, False), ("a\nb", False), (7, False)],
)
def test_the_reason_of_a_constraint_is_one_line_of_at_most_200_characters(
    because: object, good: bool
) -> None:
    constraint = {"require": "tp <= 8", "because": because}
    if good:
        (found,) = sweep(constraints=[constraint]).constraints
        assert found.because == because
    else:
        assert "is not one line of at most 200 characters" in refused(constraints=[constraint])


def test_names_of_a_command_s_templates_have_the_values_that_the_file_gives() -> None:
    found = sweep(
        workload={"name": "command", "options": {"argv": ["a", "{kernel}", "{micro_batch_size}"]}},
        axes={"micro_batch_size": [1, 2], "options": {"kernel": ["flash", "math"]}},
        precision=["bf16", "fp32"],
        search={"seed": 7},
    ).template_values()
    assert found["micro_batch_size"] == ("1", "2")
    assert found["kernel"] == ("flash", "math")
    assert found["precision"] == ("bf16", "fp32")
    assert (found["world_size"], found["sequence_length"]) == (("1", "2"), ("64",))
    assert (found["global_batch_size"], found["seed"]) == (("16",), ("7",))
    # It follows from the others.
    assert found["data_parallel_size"] == ()
    tokens = sweep(global_batch_size=..., global_batch_tokens="64k").template_values()
    assert tokens["global_batch_size"] == ()


@pytest.mark.parametrize(("node", "last"), [(None, False), ("first", False), ("last", True)])
def test_steps_come_from_the_last_node_if_the_file_says_so(node: str | None, last: bool) -> None:
    metrics = {"log": "step (.*) s", "unit": "s"} | ({} if node is None else {"node": node})
    command = {
        "name": "command",
        "options": {"argv": ["a", "{micro_batch_size}"], "metrics": metrics},
    }
    assert reports_on_last_node(sweep(workload=command).workload) is last
    assert not reports_on_last_node(sweep(workload="llama").workload)


def test_layers_are_compiled_on_gpus_unless_the_options_say_otherwise() -> None:
    plain, never = (
        sweep(workload={"name": "llama", "options": options}).workload
        for options in ({}, {"compile": False})
    )
    always = (("compile", True),)
    assert [compiles_layers(plain, (), on_gpu=on_gpu) for on_gpu in (True, False)] == [True, False]
    assert not compiles_layers(never, (), on_gpu=True)
    assert compiles_layers(never, always, on_gpu=False)
    assert not compiles_layers(sweep(workload=COMMAND).workload, always, on_gpu=True)


def test_a_command_uses_the_names_of_all_its_templates() -> None:
    options = {
        "argv": ["a", "--mbs={micro_batch_size}"],
        "env": {"TP": "{tensor_parallel_size}"},
        "cwd": "/runs/{seed}",
        "files": {"c.json": {"zero": ["{zero_stage}", 1], "deep": {"x": "{precision}"}}},
    }
    workload = sweep(workload={"name": "command", "options": options}).workload
    assert isinstance(workload.options, CommandOptions)
    assert workload.options.names_used() == {
        "micro_batch_size",
        "tensor_parallel_size",
        "seed",
        "zero_stage",
        "precision",
    }


def test_what_a_sweep_file_leaves_out_is_what_most_sweeps_want() -> None:
    """A change of these changes every sweep that does not name them."""
    spec = sweep()
    search, measuring = spec.search, spec.measurement
    assert (search.strategy, search.seed, search.plateau, search.bound) == ("auto", 0, None, None)
    assert (search.confirm.contenders, search.confirm.repeats) == (3, 2)
    assert (search.anchor_every, search.early_stop, search.dominance) == (8, "auto", "auto")
    assert {search.max_trials, search.max_gpu_hours, search.max_cost, search.max_wall_time} == {
        None
    }
    steps = (measuring.warmup_steps, measuring.min_steps, measuring.max_steps)
    assert (*steps, measuring.precision, measuring.min_seconds) == (3, 5, 50, 0.02, "auto")
    assert (measuring.exclusive, measuring.preflight, measuring.profile) == ("none", True, "none")
    assert measuring.wait_for_nodes == 900.0
    assert set(measuring.limits.model_dump().values()) == {"auto"}
    assert not spec.tensor_parallel_across_nodes
    assert (spec.precision, spec.objective) == (("bf16",), ("tokens_per_second_per_gpu",))
    plateau = sweep(search={"plateau": {}}).search.plateau
    assert plateau is not None
    assert (plateau.trials, plateau.gain) == (20, 0.01)
    options = LlamaOptions()
    assert spec.workload.options == options
    assert (options.loss, options.accumulate, options.replicas) == ("chunked:8", "scatter", 1)
    assert (options.clip_gradients, options.num_threads) == (1.0, 1)
