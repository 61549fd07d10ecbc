"""The numbers of a stored trial from which its objectives follow."""

from __future__ import annotations

from db.read.rows import TrialRow
from orchestrator.core.sweepfile.objective import LayoutNumbers
from orchestrator.core.trial.merit import OtherMerits, headroom
from orchestrator.core.trial.peak_memory import taken_peak


def numbers_of(
    trial: TrialRow,
    *,
    device_memory_bytes: float | None = None,
    price_per_gpu_hour: float | None,
) -> LayoutNumbers:
    """Return the numbers of a trial as stored.

    `device_memory_bytes`: of the device, if the trial does not name it.
    """
    return LayoutNumbers(
        tokens_per_second_per_gpu=trial.tokens_per_second_per_gpu,
        step_seconds=trial.step_seconds_median,
        others=others_of(trial, device_memory_bytes),
        price_per_gpu_hour=price_per_gpu_hour,
    )


def others_of(trial: TrialRow, device_memory_bytes: float | None) -> OtherMerits:
    """Return what is known of a measured trial besides its speed.

    `device_memory_bytes`: of the device, if the trial does not name it.
    """
    return OtherMerits(
        headroom=headroom(taken_peak(trial), trial.device_memory_bytes or device_memory_bytes),
        joules_per_token=trial.joules_per_token,
    )
