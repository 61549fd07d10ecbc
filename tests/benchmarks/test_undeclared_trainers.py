"""The benchmark on simulated programs: its problems, and what it counts."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import undeclared_trainers
from benchmarks.simulated_trainer import simulated_problem
from orchestrator.core.pretend.run_table import RunStatus


def test_a_simulated_program_is_the_same_every_time_and_none_is_trivial() -> None:
    for seed in range(3):
        problem = simulated_problem(seed, profile="llama")
        again = simulated_problem(seed, profile="llama")
        assert problem.runs == again.runs
        counts = Counter(run.status for run in problem.runs)
        assert counts[RunStatus.OK] >= 8
        assert 0.1 <= counts[RunStatus.OOM] / len(problem.runs) <= 0.8
        assert len({run.layout for run in problem.runs}) > 8
        assert all((run.step_seconds is None) == (run.status is not RunStatus.OK)
                   for run in problem.runs)  # fmt: skip


def test_programs_differ_in_what_they_report_and_vary() -> None:
    problems = [simulated_problem(seed, profile="llama") for seed in range(12)]
    reports = {any(run.peak_memory_bytes for run in problem.runs) for problem in problems}
    assert reports == {True, False}
    assert len({len(problem.runs[0].extra) for problem in problems}) > 1


def test_every_method_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = f"--problems 2 --methods auto,random --trainer wrong --out {out}"
    monkeypatch.setattr(sys, "argv", ["undeclared_trainers", *options.split()])
    undeclared_trainers.main()
    result = json.loads(out.read_text(encoding="utf-8"))
    auto, random = result["summary"]["auto"], result["summary"]["random"]
    assert auto["problems"] == random["problems"] == 2
    assert 1 <= auto["launches_to_5_percent"] < random["launches_to_5_percent"]
    assert 0.5 < auto["auc_cold"] <= 1 and "auc_cold" not in random
    assert set(result["problems"]) == {"simulated_000", "simulated_001"}
    monkeypatch.setattr(sys, "argv", ["undeclared_trainers", "--methods", "magic"])
    with pytest.raises(SystemExit):
        undeclared_trainers.main()
