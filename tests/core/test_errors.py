"""Errors that a caller can do something about, with the exit codes of `sweep`."""

from __future__ import annotations

from orchestrator.core import errors
from orchestrator.core.errors import SweepError


def test_no_error_ends_with_the_code_of_success() -> None:
    """An error without a code of its own ends with 1, as a failed trial does."""
    found = [
        one
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, SweepError)
    ]
    assert SweepError.exit_code == 1
    assert {one.exit_code for one in found} == {1, 2, 5, 75}
