"""The folder of an attempt's ranks: one for each node, with the request, written once."""

from __future__ import annotations

from pathlib import Path

from orchestrator.core.trial.protocol import REQUEST_FILE, encode
from orchestrator.node.run_directory import make_run_directory, run_directory
from tests.node.launching import order


def test_nodes_that_share_a_file_system_have_folders_of_their_own(tmp_path: Path) -> None:
    request = order().request
    first, second = (run_directory(tmp_path, request, node_rank) for node_rank in (0, 1))
    assert first == tmp_path / f"trial-{request.trial_id}" / "attempt-1" / "node-0"
    assert (second.parent, second.name) == (first.parent, "node-1")


def test_a_new_folder_has_the_request_and_one_that_exists_is_refused(tmp_path: Path) -> None:
    request = order().request
    folder = run_directory(tmp_path, request, 0)
    assert make_run_directory(folder, request) is None
    assert (folder / REQUEST_FILE).read_bytes() == encode(request)
    (folder / REQUEST_FILE).write_text("of the attempt before")
    refusal = make_run_directory(folder, request)
    assert refusal is not None
    assert refusal.startswith(f"{folder} exists")
    assert (folder / REQUEST_FILE).read_text() == "of the attempt before"
