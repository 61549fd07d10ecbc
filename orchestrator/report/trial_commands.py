"""The commands about a trial that pages print. Each runs as it is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.frameworks.framework import Framework
from orchestrator.core.pretend.simulated_name import SIMULATED_SUFFIX

if TYPE_CHECKING:
    from db.read.rows import TrialDetail

# Workloads that train nothing, so no profiler has anything to measure.
UNTRAINED = frozenset({"synthetic", "replay"})


def export_command(trial_id: int, *, workload: str, sweep: str | None = None) -> str:
    """Return the command that writes a layout for a framework; a comment names the others."""
    # A program of the user becomes a script for torchrun.
    first = Framework.TORCHRUN if workload == "command" else Framework.TORCHTITAN
    others = ", ".join(one.value for one in Framework if one is not first)
    named = "" if sweep is None else f"{sweep} "
    return f"sweep export config {named}--trial {trial_id} --to {first.value}  # or {others}"


def commands(detail: TrialDetail, *, workload: str) -> list[tuple[str, str]]:
    """Return commands about a trial, each with what it is for."""
    trial = detail.trial
    is_simulated = workload == "synthetic" and detail.sweep_name.endswith(SIMULATED_SUFFIX)
    again = f"sweep run trial-{trial.id}.yaml" + (" --simulate" if is_simulated else "")
    found = [
        ("measure it again", again),
        ("write it for your framework", export_command(trial.id, workload=workload)),
        ("all that the store knows", f"sweep show {trial.id}"),
    ]
    if trial.num_attempts and not is_simulated and workload != "replay":
        found.append(("what a rank printed", f"sweep logs {trial.id} --rank 0"))
    if trial.num_attempts and workload not in UNTRAINED:
        found.append(("what its steps are spent on", f"sweep profile {trial.id} --memory"))
    return found
