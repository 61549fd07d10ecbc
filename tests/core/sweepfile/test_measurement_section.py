"""How a layout is measured: what a sweep file may say of it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from orchestrator.core.sweepfile.measurement_section import Measuring


def test_there_may_be_as_many_steps_at_least_as_at_most() -> None:
    assert Measuring(min_steps=20, max_steps=20).min_steps == 20
    with pytest.raises(ValidationError, match="min_steps 21 is more than max_steps 20"):
        Measuring(min_steps=21, max_steps=20)
