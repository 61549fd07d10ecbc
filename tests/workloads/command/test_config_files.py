"""Config files that a command gets: in place before it starts, once per node, never half."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.core.sweepfile.config_files import file_name
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.protocol import (
    REQUEST_FILE,
    failure_file,
    heartbeat_file,
    log_file,
    result_file,
)
from orchestrator.node.launcher import NodeLauncher
from tests.node.launching import order
from workloads.command.config_files import write_files

PROGRAM = """
import json, os, sys
folder = sys.argv[1]
given = json.load(open(os.path.join(folder, "ds.json")))
assert given == {"mbs": 1, "path": folder + "/x", "words": ["dp2", "none"]}, given
assert os.access(os.path.join(folder, "run.sh"), os.X_OK)
assert open(os.path.join(folder, "note")).read() == "world size 2"
if os.environ["RANK"] == "0":
    json.dump({"step_seconds": [0.5]}, open(os.environ["SWEEP_RESULT_FILE"], "w"))
"""
FILES = {
    "ds.json": {
        "mbs": "{micro_batch_size}",
        "path": "{run_dir}/x",
        "words": ["dp{data_parallel_size}", "{recompute}"],
    },
    "run.sh": "#!/bin/sh\n",
    "note": "world size {world_size}",
}


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeLauncher]:
    launcher = NodeLauncher(tmp_path_factory.mktemp("runs"), node="node-a")
    yield launcher
    launcher.close()


def test_every_rank_finds_its_files_whole_when_its_program_starts(launcher: NodeLauncher) -> None:
    source = PROGRAM.replace("{", "{{").replace("}", "}}")
    options = {"argv": [sys.executable, "-c", source, "{run_dir}"], "files": FILES}
    report = launcher.run(order("workloads.command", trial_id=1, options=options))
    assert report.failure is None, (report.failure, report.ranks[0].log_tail)
    folder = Path(report.ranks[0].log_path).parent
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".ds.json")]


def test_a_template_in_a_file_that_names_nothing_refuses_the_layout(launcher: NodeLauncher) -> None:
    options = {"argv": ["true"], "files": {"a.json": {"b": "{micro}"}}}
    report = launcher.run(order("workloads.command", trial_id=2, options=options))
    assert report.failure is not None and report.failure.kind is FailureKind.CONFIG_REJECTED
    assert "{micro}" in report.failure.evidence


def test_what_another_rank_has_written_and_its_program_changed_is_left_alone(
    tmp_path: Path,
) -> None:
    write_files({"a.json": {"b": "{seed}"}}, tmp_path, {"seed": 7})
    (tmp_path / "a.json").write_text("changed by the program")
    write_files({"a.json": {"b": "{seed}"}}, tmp_path, {"seed": 7})
    assert (tmp_path / "a.json").read_text() == "changed by the program"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_without_hard_links_the_file_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    write_files({"a": "x"}, tmp_path, {})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "x")]


@pytest.mark.parametrize(
    "name",
    [
        REQUEST_FILE,
        heartbeat_file(12),
        result_file(0),
        failure_file(3),
        log_file(1),
        "program-result.json",
        "program-metrics-3.jsonl",
        "stop",
    ],
)
def test_no_file_may_have_a_name_that_is_used_in_the_run_folder(name: str) -> None:
    with pytest.raises(ValueError, match="is a file of this program"):
        file_name(name)
