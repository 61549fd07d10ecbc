"""Errors that a caller can do something about, with the exit codes of `sweep`."""

from __future__ import annotations

from orchestrator.core import errors
from orchestrator.core.errors import SweepError

CODES = {
    "SpecInvalid": 2,
    "UsageInvalid": 2,
    "SweepChanged": 2,
    "ResourcesInsufficient": 2,
    "SweepInUse": 5,
    "LeaseLost": 5,
    "StoreUnavailable": 75,
    "MachineUnready": 75,
    "ClusterUnavailable": 75,
}


def test_no_error_ends_with_the_code_of_success() -> None:
    """An error without a code of its own ends with 1, as a failed trial does."""
    found = [
        one
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, SweepError)
    ]
    assert SweepError.exit_code == 1
    assert {one.exit_code for one in found} == {1, 2, 5, 75}


def test_an_error_tells_a_program_whose_fault_it_is() -> None:
    """2: the user's input; 5: another orchestrator; 75: try again."""
    codes = {
        name: one.exit_code
        for name, one in vars(errors).items()
        if isinstance(one, type) and issubclass(one, SweepError) and one is not SweepError
    }
    assert codes == CODES
