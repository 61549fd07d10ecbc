"""A secret named by `env_from` reaches the program on each rank, and is found nowhere that this program writes."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from tests.acceptance.command import Command

CANARY = "canary-7f3a9e51c2"  # what is looked for
PROGRAM = """
    import json, os, sys
    token, mbs = os.environ["WANDB_API_KEY"], int(sys.argv[1])
    assert token.startswith("canary") and token not in "".join(sys.argv)
    if mbs == 2:
        raise SystemExit("a program that fails")
    if os.environ["RANK"] == "0":
        result = {"step_seconds": [1.0] * 6, "loss_last": float(len(token))}
        json.dump(result, open(os.environ["SWEEP_RESULT_FILE"], "w"))
"""


def write(folder: Path) -> Path:
    (folder / "mine.py").write_text(textwrap.dedent(PROGRAM))
    content = {
        "name": "secret", "model": "llama-tiny", "gpus": 1, "device": "cpu", "sequence_length": 64, "global_batch_size": 4, "precision": "bf16",
        "axes": {"micro_batch_size": [1, 2], "recompute": "none"}, "measurement": {"warmup_steps": 2, "min_steps": 6, "max_steps": 6},
        "workload": {"name": "command", "options": {
            "argv": [sys.executable, "mine.py", "{micro_batch_size}"], "cwd": str(folder), "env_from": ["WANDB_API_KEY"],
        }},
    }  # fmt: skip
    path = folder / "secret.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


def files_with(text: str, folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes())


@pytest.mark.acceptance
def test_a_secret_reaches_every_rank_and_no_file_table_or_message(tmp_path: Path) -> None:
    sweep = Command(tmp_path, f"sqlite:///{tmp_path}/sweep.sqlite", {"SWEEP_HOME": str(tmp_path / "home"), "WANDB_API_KEY": CANARY})
    ran = sweep.run("-vv", "run", write(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert sweep.sql("select state, loss_last from v_trial order by micro_batch_size") == [["measured", len(CANARY)], ["failed", None]]
    said = [ran, sweep.ok("show", "2"), sweep.ok("logs", "2"), sweep.ok("export", "json", "secret")]
    assert [one for one in said if CANARY in one.stdout + one.stderr] == []
    assert len(files_with("mine.py", tmp_path)) >= 4  # the search finds requests, logs and the store
    assert files_with(CANARY, tmp_path) == []


def test_a_secret_that_is_not_set_is_asked_for_before_anything_starts(tmp_path: Path) -> None:
    sweep = Command(tmp_path, f"sqlite:///{tmp_path}/sweep.sqlite", {"SWEEP_HOME": str(tmp_path / "home")})
    refused = sweep.run("run", write(tmp_path), "workload.options.env_from=[NO_SUCH_TOKEN, NOR_THIS_KEY]")
    assert refused.returncode == 2
    assert "workload.options.env_from names NO_SUCH_TOKEN, NOR_THIS_KEY, not set in this environment" in refused.stderr
    assert not (tmp_path / "home").exists() and not (tmp_path / "sweep.sqlite").exists()
    assert sweep.ok("validate", tmp_path / "secret.yaml")  # another machine may check it
