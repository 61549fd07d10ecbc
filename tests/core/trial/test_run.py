"""How surely a run shows what its layout takes."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.run import Run


@pytest.mark.parametrize(
    ("confidence", "load", "own", "whole"),
    [
        # Half of a 95 % interval is 1.96 standard deviations.
        (0.0196, 0.0, 0.01, 0.01),
        (0.0196, 0.2, 0.01, (0.01**2 + 0.2**2) ** 0.5),
        # Without an interval, runs differ by 2 %.
        (None, 0.0, 0.02, 0.02),
        (None, 0.1, 0.02, (0.02**2 + 0.1**2) ** 0.5),
    ],
)
def test_a_run_varies_by_its_steps_and_by_the_load(
    confidence: float | None, load: float, own: float, whole: float
) -> None:
    run = Run(step_seconds=3.0, relative_confidence=confidence, load_sd=load)
    assert run.own_variance == pytest.approx(own**2)
    assert run.variance == pytest.approx(whole**2)
    assert run.variance_at(0.0) == run.own_variance
    assert run.variance_at(0.5) == pytest.approx(own**2 + load**2 / 4)
    assert not run.thrashing
