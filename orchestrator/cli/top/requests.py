"""What a person may ask for from the screen: the same changes as `sweep cancel`, `invalidate`."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.cli.defaults import existing_store
from orchestrator.report.quantities import counted


@dataclass(frozen=True, slots=True)
class Requests:
    """Changes one sweep. Each returns a sentence for the person; each may raise SweepError."""

    db: str | None
    sweep: str

    def stop(self, *, drain: bool) -> str:
        """Ask the sweep's orchestrator to stop, as `sweep cancel` does."""
        from orchestrator.cli.admin import ask_to_stop

        return ask_to_stop(self.db, self.sweep, drain=drain).text

    def retry(self, trial_id: int) -> str:
        """Let a trial wait again, as `sweep invalidate` does."""
        with existing_store(self.db, to_read=False) as store:
            number = store.invalidate(f"trial_id = {trial_id}", sweep=self.sweep)
        if not number:
            return f"Trial {trial_id} has not ended: nothing was changed."
        return f"{counted(number, 'trial')} will be measured again by the next `sweep run`."
