"""The phase and step of a running attempt, from the heartbeats of its ranks on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.cli.store.home import attempt_folders

if TYPE_CHECKING:
    from db.read.rows import SweepRow, UnderWayRow
    from orchestrator.report.sweep_status import PhaseAndStep

MAX_HEARTBEAT_BYTES = 4096


def phase_and_step(sweep: SweepRow, trial: UnderWayRow) -> PhaseAndStep:
    """Return phase and step of the slowest rank; None without an orchestrator or a rank here."""
    from orchestrator.core.trial.protocol import BadResult, Phase, decode_heartbeat

    if sweep.holder is None:
        return None, None
    beats = []
    for folder in attempt_folders(sweep.run_folder, trial.trial_id, trial.attempt):
        for path in folder.glob("heartbeat-*.json"):
            try:
                with path.open("rb") as file:
                    beats.append(decode_heartbeat(file.read(MAX_HEARTBEAT_BYTES)))
            except (OSError, BadResult):
                continue
    if not beats:
        return None, None
    order = list(Phase)
    slowest = min(beats, key=lambda beat: (order.index(beat.phase), beat.step))
    return slowest.phase, slowest.step
