"""Requests that a person makes on a screen or page: as `sweep cancel`, `retry` and `enqueue`."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.cli import requests
from orchestrator.cli.admin import ask_to_stop


@dataclass(frozen=True, slots=True)
class Requests:
    """Changes one sweep. Each returns a sentence for the person; each may raise SweepError."""

    db: str | None
    sweep: str

    def stop(self, *, drain: bool) -> str:
        """Ask the sweep's orchestrator to stop, as `sweep cancel` does."""
        return ask_to_stop(self.db, self.sweep, drain=drain).text

    def retry(self, trial_id: int) -> str:
        """Have a trial measured again, as `sweep retry` does."""
        return requests.retry_trial(self.db, trial_id)[2]

    def enqueue(self, layout: str, cell: str) -> str:
        """Have a layout measured next, as `sweep enqueue` does. `cell`: its name."""
        return requests.enqueue_layout(self.db, self.sweep, layout.split(), cell).text
