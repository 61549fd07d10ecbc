"""What `sweep run` checks before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli.run.checks import check_home, values_not_passed
from orchestrator.core.search.space import CellSpaces
from orchestrator.core.sweepfile.spec import SweepSpec


def test_a_new_folder_for_runs_in_a_new_folder_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "mistyped" / "home"
    monkeypatch.setenv("SWEEP_HOME", str(home))
    check_home()
    assert capsys.readouterr().err == f"New folder for runs: {home} (SWEEP_HOME)\n"
    check_home()
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "other"))
    check_home()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("script", "argv", "expected"),
    [
        ("", ["{grad_accum_steps}"], "micro_batch_size"),
        ("", [], "micro_batch_size, grad_accum_steps"),
        ("", ["{micro_batch_size}", "{grad_accum_steps}"], None),
        # One follows from the other and the global batch.
        ("", ["{micro_batch_size}", "{global_batch_size}"], None),
        ("import os; os.environ['SWEEP_MICRO_BATCH_SIZE']", ["{grad_accum_steps}"], None),
        # Nobody knows what it reads.
        (None, ["{grad_accum_steps}"], None),
    ],
)
def test_a_value_that_varies_and_is_named_nowhere_is_named(
    script: str | None, argv: list[str], expected: str | None, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    if script is not None:
        program.write_text(script)
    spec = SweepSpec.model_validate(
        {
            "name": "mine",
            "model": "llama-tiny",
            "gpus": 1,
            "sequence_length": 64,
            "global_batch_size": 8,
            "axes": {"micro_batch_size": [1, 2, 8], "recompute": ["none"]},
            "workload": {
                "name": "command",
                "options": {"argv": ["python3", str(program), *argv]},
            },
        }
    )
    found = values_not_passed(spec, CellSpaces(spec))
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.startswith(f"{expected} may not reach the program: ")
