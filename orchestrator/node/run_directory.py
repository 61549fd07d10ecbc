"""The folder in which the ranks of one node leave the files of one attempt."""

from __future__ import annotations

from pathlib import Path

from orchestrator.core.trial.protocol import REQUEST_FILE, TrialRequest, encode


def run_directory(root: Path, request: TrialRequest, node_rank: int) -> Path:
    """The folder of one node's ranks and one attempt: nodes may share the file system of a root."""
    return root / f"trial-{request.trial_id}" / request.folder / f"node-{node_rank}"


def make_run_directory(run_dir: Path, request: TrialRequest) -> str | None:
    """Make it with the request in it. Returns why it cannot be used."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    try:
        run_dir.mkdir()
    except FileExistsError:
        return (
            f"{run_dir} exists: an attempt's directory is never written twice. "
            "Give the attempt a new number, or the sweep a new folder"
        )
    (run_dir / REQUEST_FILE).write_bytes(encode(request))
    return None
