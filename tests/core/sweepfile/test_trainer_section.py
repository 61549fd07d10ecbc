"""What a sweep file says of a trainer's memory: by name, by numbers, and what it may not say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from orchestrator.core.errors import SpecInvalid
from orchestrator.core.physics.trainer import TRAINERS, Trainer
from orchestrator.core.problem.layout import Recompute
from orchestrator.core.search.planner import trainer_of
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.spec_yaml import load
from orchestrator.core.sweepfile.trainer_section import BytesPerParameter, TracedTerm
from orchestrator.core.trial.protocol import Device
from tests.core.sweepfile.bounds import check_bounds

FILE = {
    "name": "s",
    "model": "llama-3.1-8b",
    "gpus": 8,
    "sequence_length": 4096,
    "global_batch_size": 64,
    "workload": {"name": "command", "options": {"argv": ["python", "x.py"]}},
}
NONE = {"kept": 168072, "backward": 65544.5, "head": {"per_token": 1555468, "fixed": 12}}
FULL = {
    "kept": 8192,
    "backward": {"per_token": -3, "per_token_and_position": 2},
    "head": 1555468,
    "end": {"fixed": 1050673160},
}


def spec(trainer: Any, **changed: Any) -> SweepSpec:
    return load(json.dumps({**FILE, "trainer": trainer, **changed}), source="s.yaml")


def refused(trainer: Any, **changed: Any) -> str:
    with pytest.raises(SpecInvalid) as caught:
        spec(trainer, **changed)
    return str(caught.value)


@pytest.mark.parametrize("name", list(TRAINERS))
def test_a_known_trainer_is_named(name: str) -> None:
    assert (
        trainer_of(spec(name), device=Device.CPU)
        == TRAINERS[name]
        == trainer_of(spec({"profile": name}), device=Device.CPU)
    )


def test_a_number_of_bytes_per_parameter_says_how_wide_gradients_are() -> None:
    for number, gradients in ((16, 2.0), (18, 4.0), (20, 6.0)):
        assert trainer_of(spec({"bytes_per_parameter": number}), device=Device.CPU) == Trainer(
            gradient_bytes=gradients
        )
    parts = {"parameters": 4, "gradients": 4, "optimizer": 8}
    found = trainer_of(spec({"profile": "fsdp", "bytes_per_parameter": parts}), device=Device.CPU)
    assert (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes) == (4, 4, 8)
    assert found.gathered_units == TRAINERS["fsdp"].gathered_units


def test_gradients_have_at_most_64_bytes_per_parameter() -> None:
    """Weights have 2 of the number, and Adam's master and moments 12."""
    assert trainer_of(spec({"bytes_per_parameter": 78}), device=Device.CPU).gradient_bytes == 64
    half = trainer_of(spec({"bytes_per_parameter": 14.5}), device=Device.CPU)
    assert half.gradient_bytes == 0.5
    assert "79 bytes per parameter are not" in refused({"bytes_per_parameter": 79})


def test_traced_bytes_reach_the_prediction() -> None:
    traced = trainer_of(
        spec({"activations": {"none": NONE, "full": FULL}}), device=Device.CPU
    ).traced
    assert traced is not None
    assert traced.of(Recompute()).backward.per_token == 65544.5
    assert traced.of(Recompute()).head.fixed == 12
    full = traced.of(Recompute.parse("full:8"))
    assert (full.kept.per_token, full.backward.per_token_and_position, full.end.fixed) == (
        8192,
        2,
        1050673160,
    )
    # What is not given adds nothing.
    assert (full.end.per_token, full.end.per_token_and_position) == (0, 0)


def test_a_trainer_is_no_condition_of_a_measurement_and_leaves_stored_sweeps_as_they_were() -> None:
    plain = load(json.dumps(FILE), source="s.yaml")
    assert "trainer" not in plain.model_dump()
    named = spec({"bytes_per_parameter": 18})
    assert named.conditions() == plain.conditions()
    assert SweepSpec.model_validate_json(named.model_dump_json()) == named


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ("nanotrn", "did you mean nanotron?"),
        ({}, "trainer is empty"),
        ({"bytes_per_parameter": 12}, "12 bytes per parameter are not"),
        ({"bytes_per_parameter": 14}, "14 bytes per parameter are not"),
        (
            {"activations": {f"mode {n}": NONE for n in range(17)}},
            "trainer.activations: 17 modes; at most 16",
        ),
        ({"activations": {f"mode {n}": NONE for n in range(16)}}, "'mode 0' is not one of"),
        ({"bytes_per_parameter": {"gradient": 2}}, "gradient"),
        ({"activations": {"full": FULL}}, "none is missing"),
        ({"activations": {"none": NONE, "selctive": FULL}}, "'selctive' is not one of"),
        (
            {"activations": {"none": NONE, "full:8": FULL}},
            "activations are those of one layer: full",
        ),
        (
            {"activations": {"none": NONE | {"keep": 1}}},
            "keep: unknown key; allowed: kept, backward, head, end; did you mean kept?",
        ),
        ({"activations": {"none": {"kept": 1}}}, "trainer.activations.none.head: is required"),
        ({"activations": {"none": NONE | {"kept": "many"}}}, "trainer.activations.none.kept"),
    ],
)
def test_what_means_nothing_is_refused_with_its_place(trainer: Any, said: str) -> None:
    assert said in refused(trainer)


def test_traced_bytes_are_of_one_precision() -> None:
    text = refused({"activations": {"none": NONE}}, precision=["bf16", "fp32"])
    assert "trainer.activations are of one precision" in text


def test_the_json_schema_knows_the_short_forms() -> None:
    schema = json.dumps(SweepSpec.model_json_schema()["properties"]["trainer"])
    assert "nanotron" in schema
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(SweepSpec.model_json_schema())
    for trainer in (
        "nanotron",
        {"bytes_per_parameter": 16},
        {"activations": {"none": NONE, "full": FULL}},
    ):
        assert validator.is_valid({**FILE, "trainer": trainer}), trainer
    assert not validator.is_valid({**FILE, "trainer": {"activations": {"none": {"kept": 1}}}})
    with pytest.raises(ValidationError):
        SweepSpec.model_validate({**FILE, "trainer": 3})


def test_parts_of_bytes_per_parameter_that_are_left_out_are_those_of_bf16() -> None:
    for part in ("parameters", "gradients", "optimizer"):
        usual = {"parameters": 2.0, "gradients": 2.0, "optimizer": 12.0}
        found = trainer_of(spec({"bytes_per_parameter": {part: 5.0}}), device=Device.CPU)
        assert {
            "parameters": found.parameter_bytes,
            "gradients": found.gradient_bytes,
            "optimizer": found.optimizer_bytes,
        } == usual | {part: 5.0}


@pytest.mark.parametrize(
    ("section", "name", "taken", "refused"),
    [
        (TracedTerm, "per_token", [-1e15, 1e15], [-1.1e15, 1.1e15]),
        (TracedTerm, "per_token_and_position", [0.0, 1e15], [-0.1, 1.1e15]),
        (TracedTerm, "fixed", [0.0, 1e15], [-0.1, 1.1e15]),
        (BytesPerParameter, "parameters", [1e-9, 64.0], [0.0, 64.1]),
        (BytesPerParameter, "gradients", [0.0, 64.0], [-0.1, 64.1]),
        (BytesPerParameter, "optimizer", [0.0, 64.0], [-0.1, 64.1]),
    ],
)
def test_a_number_is_taken_up_to_its_bounds(
    section: type[BaseModel], name: str, taken: list[object], refused: list[object]
) -> None:
    check_bounds(section, name, taken=taken, refused=refused)


def test_a_term_that_is_left_out_adds_nothing() -> None:
    assert TracedTerm() == TracedTerm(per_token=0.0, per_token_and_position=0.0, fixed=0.0)
