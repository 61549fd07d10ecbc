"""What `sweep run` checks before it starts anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.cli.run.checks import check_home, text_of_script, values_not_passed
from orchestrator.core.search.space import CellSpaces
from orchestrator.core.sweepfile.command_options import CommandOptions
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
        ("# SWEEP_MICRO_BATCH_SIZE", ["{grad_accum_steps}"], None),
        # A script that is not here may read anything, and so may one that is very large.
        (None, ["{grad_accum_steps}"], None),
        ("#" * (1 << 20) + "\n", ["{grad_accum_steps}"], None),
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


def test_sizes_that_follow_from_the_ranks_are_not_missed_in_several_cells(tmp_path: Path) -> None:
    """Three GPUs have no legal layout: the batch cannot be split over them."""
    program = tmp_path / "train.py"
    program.write_text("print()")
    spec = SweepSpec.model_validate(
        {
            "name": "mine",
            "model": "llama-tiny",
            "gpus": [1, 2, 3],
            "sequence_length": 64,
            "global_batch_size": 8,
            "axes": {"micro_batch_size": [1, 2], "recompute": ["none"]},
            "workload": {
                "name": "command",
                "options": {"argv": ["python3", str(program), "{micro_batch_size}"]},
            },
        }
    )
    found = values_not_passed(spec, CellSpaces(spec))
    assert found is not None and found.startswith("grad_accum_steps may not reach the program: ")


def test_a_script_that_the_sweep_writes_is_searched_and_a_pipe_is_not_read(tmp_path: Path) -> None:
    files = {"train.py": "os.environ['SWEEP_ZERO_STAGE']"}
    written = CommandOptions.model_validate({"argv": ["python3", "train.py"], "files": files})
    assert text_of_script(written) == files["train.py"]
    os.mkfifo(tmp_path / "pipe.py")
    piped = CommandOptions.model_validate({"argv": ["python3", str(tmp_path / "pipe.py")]})
    assert text_of_script(piped) is None
