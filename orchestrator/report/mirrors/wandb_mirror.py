"""Runs of W&B, written offline into a folder. `wandb sync` sends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.report.mirrors.tracker_run import TrackerRun

PACKAGE = "wandb"
# In this folder, next to W&B's own, each complete run has a file that holds its version.
DONE = "layout-sweep"


class WandbMirror:
    """The runs of one sweep in a folder."""

    name = "wandb"

    def __init__(self, folder: Path, *, sweep: str, run_token: str) -> None:
        self._folder = folder.expanduser().absolute()
        self._sweep = sweep
        self._done = self._folder / DONE / run_token
        self._is_open = False

    def known(self) -> dict[str, str]:
        """Return the version of each run that is complete, by its key."""
        self._done.mkdir(parents=True, exist_ok=True)
        return {
            file.name: file.read_text(encoding="utf-8")
            for file in self._done.iterdir()
            if file.suffix != ".new"
        }

    def write(self, run: TrackerRun) -> None:
        """Write the run. One that has changed is written again with its id, which W&B updates."""
        # An extra, and it takes seconds.
        import wandb

        self._is_open = True
        made: Any = wandb.init(
            project=self._sweep,
            id=run.key,
            name=run.name,
            config={**run.params},
            notes=run.tags.get("why"),
            tags=[run.tags["state"]],
            dir=str(self._folder),
            mode="offline",
            resume="allow",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
            ),
        )
        try:
            made.config.update({"layout_sweep": dict(run.tags)}, allow_val_change=True)
            made.log(dict(run.metrics))
        finally:
            made.finish(exit_code=0 if run.is_measured else 1)
        part = self._done / f"{run.key}.new"
        part.write_text(run.version, encoding="utf-8")
        part.rename(self._done / run.key)

    def close(self) -> None:
        """End the process that W&B has started."""
        if self._is_open:
            import wandb

            wandb.teardown()
