"""The code that `sweep run` takes for the measured one."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli.run.code_fingerprint import code_of, edits_of
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.sweep.provenance import PACKAGE, code_fingerprint


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program, in which the sweep's own files lie too."""
    for name, text in {
        "train.py": "pass\n",
        "run.toml": "seed = 1\n",
        "out/runs/t/trial-1/copy.py": "pass\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "out"))
    return tmp_path


def spec(program: Path | None = None) -> SweepSpec:
    """A sweep of a program, or of workload llama."""
    workload: dict[str, object] = {"name": "llama"}
    if program is not None:
        environment = {"SETTINGS": "run.toml"}
        options = {"argv": ["python", "train.py"], "cwd": str(program), "env": environment}
        workload = {"name": "command", "options": options}
    fields = {
        "name": "t",
        "model": "llama-tiny",
        "gpus": 1,
        "sequence_length": 64,
        "global_batch_size": 8,
        "precision": "fp32",
        "workload": workload,
    }
    return SweepSpec.model_validate(fields)


def test_the_code_of_a_command_is_its_program_without_the_sweep_s_own_folders(
    program: Path,
) -> None:
    def digest() -> str | None:
        return code_of(spec(program), None).dirty_diff_digest

    before = digest()
    assert before is not None
    (program / "out" / "runs" / "t" / "trial-1" / "copy.py").write_text("written by a trial\n")
    assert digest() == before
    # Named by the environment.
    (program / "run.toml").write_text("seed = 2\n")
    assert digest() != before


def test_the_code_of_other_workloads_is_this_package_s() -> None:
    assert code_of(spec(), None) == code_fingerprint(PACKAGE)
    assert edits_of(spec()) is None


def test_an_edit_of_the_program_is_found_once_its_files_have_changed(program: Path) -> None:
    edits = edits_of(spec(program))
    assert edits is not None
    assert edits() is None
    (program / "train.py").write_text("print(1)  # edited\n")
    assert edits() == code_of(spec(program), None)
