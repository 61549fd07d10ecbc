"""The files in sweeps/recipes: what they say, and their patterns on lines of real logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.search.space import enumerate_cell
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.metrics_section import LinePatterns
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.spec_yaml import load
from tests.core.sweepfile.test_metrics_section import MEGATRON, NANOTRON, TORCHTITAN

RECIPES = Path(__file__).parents[3] / "sweeps" / "recipes"
FILES = sorted(RECIPES.glob("*.yaml"))
# ROCm's blog about MPT-30B with composer 0.21.3, two nodes of eight MI300X.
LLM_FOUNDRY = "         Train throughput/tokens_per_sec: 20082.8418"


def read(name: str) -> SweepSpec:
    path = RECIPES / f"{name}.yaml"
    return load(path.read_text(encoding="utf-8"), source=path.name)


def options_of(spec: SweepSpec) -> CommandOptions:
    assert isinstance(spec.workload.options, CommandOptions)
    return spec.workload.options


def values(name: str, line: str, *, tokens: int = 1 << 20) -> dict[str, Any]:
    spec = read(name)
    metrics = options_of(spec).metrics
    assert metrics is not None
    patterns = LinePatterns(metrics, tokens_per_step=tokens, world_size=spec.gpus[0])
    return patterns.values_of(line)


def test_every_framework_of_the_issue_has_a_recipe() -> None:
    assert {path.stem for path in FILES} == {
        "accelerate",
        "deepspeed",
        "fsdp2",
        "litgpt",
        "llm-foundry",
        "megatron",
        "nanotron",
        "torchtitan",
        "transformers",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_says_how_to_run_it_and_has_legal_layouts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"#   sweep run sweeps/recipes/{path.name}" in text
    assert "docs/recipes.md#" in text
    spec = read(path.stem)
    assert spec.name == f"recipe-{path.stem}"
    for cell in spec.cells():
        found = enumerate_cell(spec, cell, gpus_per_node=8)
        assert len(found.legal) >= 2


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_program_of_a_recipe_on_a_cpu_lies_beside_it(path: Path) -> None:
    options = options_of(read(path.stem))
    if options.cwd == "/home/me/recipes":
        scripts = [word for word in options.argv if word.endswith(".py")]
        modules = [f"{path.stem}_tokens.py"] if "litgpt" in options.argv else []
        assert scripts or modules
        assert all((RECIPES / name).is_file() for name in (*scripts, *modules))


def test_the_patterns_read_the_lines_that_the_frameworks_print() -> None:
    found = values("megatron", MEGATRON)
    assert found["step_seconds"] == pytest.approx(5.4449)
    assert (found["step"], found["loss"], found["grad_norm"]) == (43, 1.825991, 1.426)
    found = values("nanotron", NANOTRON)
    assert found["step_seconds"] == pytest.approx(11.5)
    assert (found["step"], found["loss"]) == (327281, 2.38)
    found = values("torchtitan", TORCHTITAN, tokens=8 * 7282)
    assert found["step_seconds"] == pytest.approx(1.0)
    assert (found["step"], found["loss"]) == (14, 3.24405)
    assert found["peak_memory_reserved_bytes"] == round(9.46 * 2**30)
    assert values("llm-foundry", LLM_FOUNDRY, tokens=20082842) == {
        "step_seconds": pytest.approx(1000.0)
    }
    # The same number for each device, a line below.
    assert values("llm-foundry", LLM_FOUNDRY.replace("/tokens", "/device/tokens")) == {}
