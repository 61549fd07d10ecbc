"""The project's own sweep files: each is valid, says how to run it, and has legal layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from orchestrator.core.physics.memory import predict_memory
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.hardware import DEVICES, GIB
from orchestrator.core.problem.layout import Layout
from orchestrator.core.search.space import CellSpace, enumerate_cell
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.spec_yaml import load, to_json_schema
from orchestrator.core.sweepfile.synthetic_options import SyntheticOptions
from orchestrator.core.sweepfile.yaml_document import read as read_yaml

FILES = sorted((Path(__file__).resolve().parents[3] / "sweeps").glob("*.yaml"))


def read(name: str, *overrides: str) -> SweepSpec:
    path = next(path for path in FILES if path.stem == name)
    return load(path.read_text(encoding="utf-8"), source=path.name, overrides=overrides)


def spaces(spec: SweepSpec) -> list[CellSpace]:
    gpus_per_node = 8 if spec.gpus_per_node == "auto" else spec.gpus_per_node
    return [enumerate_cell(spec, cell, gpus_per_node=gpus_per_node) for cell in spec.cells()]


def test_the_promised_files_are_there() -> None:
    assert {"quickstart", "8b", "playbook", "faults"} <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_says_what_it_is_for_and_every_cell_has_legal_layouts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"#   sweep run sweeps/{path.name}" in text
    spec = load(text, source=path.name)
    assert spec.name == path.stem
    for found in spaces(spec):
        assert len(found.legal) > 0, found.cell.key
        assert len(found.legal) + sum(found.rejected.values()) == found.num_combinations


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_editor_that_checks_by_the_schema_finds_nothing_wrong(path: Path) -> None:
    validator = Draft202012Validator(to_json_schema())
    value = read_yaml(path.read_text(encoding="utf-8")).value
    assert [error.message for error in validator.iter_errors(value)] == []
    assert not validator.is_valid({**value, "gpus": "many"})
    assert not validator.is_valid({**value, "gpu": 8})


def test_the_quickstart_measures_twenty_layouts_at_least_and_a_third_of_its_space_at_most() -> None:
    spec = read("quickstart")
    one, two = spaces(spec)
    assert (one.cell.num_gpus, two.cell.num_gpus) == (1, 2)
    assert set(two.legal.data_parallel_size.tolist()) == {2}
    most = spec.search.max_trials
    assert most is not None
    assert 2 * most >= 20
    assert all(3 * most <= len(space.legal) for space in (one, two))


def test_the_playbook_is_four_models_on_one_to_sixty_four_nodes() -> None:
    spec = read("playbook")
    assert {(cell.model.name, cell.num_gpus // 8) for cell in spec.cells()} == {
        (model, nodes)
        for model in ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b")
        for nodes in (1, 2, 4, 8, 16, 32, 64)
    }
    assert {cell.tokens_per_step for cell in spec.cells()} == {1 << 20}


def num_predicted_to_fit(found: CellSpace, spec: SweepSpec) -> int:
    memory = predict_memory(found.legal, found.cell, Trainer()).total
    return int((memory <= DEVICES[spec.device].memory_bytes).sum())


def test_8_billion_parameters_fit_by_sharding_or_by_sharing_layers_and_not_without() -> None:
    spec = read("8b")
    assert DEVICES[spec.device].memory_bytes < 80 * GIB
    cells = spaces(spec)
    assert [found.cell.num_gpus for found in cells] == [8, 16, 32, 64]
    assert all(10 <= num_predicted_to_fit(found, spec) < len(found.legal) for found in cells)
    plain = read(
        "8b",
        "axes.zero_stage=0",
        *(f"axes.{name}_parallel_size=1" for name in ("tensor", "pipeline", "context")),
    )
    assert all(num_predicted_to_fit(found, plain) == 0 for found in spaces(plain))


def test_the_8b_file_can_be_cut_to_one_gpu_as_its_comment_says() -> None:
    text = next(path for path in FILES if path.stem == "8b").read_text(encoding="utf-8")
    command = (
        next(line for line in text.splitlines() if "gpus=1" in line)
        .split("8b.yaml ")[1]
        .split("    ")[0]
        .split()
    )
    spec = read("8b", *command)
    (found,) = spaces(spec)
    assert (found.cell.model.num_parameters, found.cell.num_gpus) == (8_030_261_248, 1)
    assert 5 <= num_predicted_to_fit(found, spec) < len(found.legal)


def test_every_fault_of_the_faults_file_strikes_a_layout_that_will_run() -> None:
    spec = read("faults")
    (found,) = spaces(spec)
    layouts: list[Layout] = [found.legal.layout(row) for row in range(len(found.legal))]
    assert isinstance(spec.workload.options, SyntheticOptions)
    faults = spec.workload.options.faults
    assert len({fault.fault for fault in faults}) >= 8
    struck = 0
    for fault in faults:
        only_if = fault.only_if
        hit = [
            layout
            for layout in layouts
            if all(str(getattr(layout, name)) == str(value) for name, value in only_if.items())
        ]
        assert hit, fault
        struck += len(hit) if only_if else 0
    assert struck < len(layouts)  # some run well
