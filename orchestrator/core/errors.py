"""Errors that a caller can do something about. The docstring of a class is its message.

`exit_code` is that of `sweep`: 2 your input, 4 nothing feasible, 5 another orchestrator has the
sweep, 75 try again (docs/troubleshooting.md).
"""

from __future__ import annotations


class SweepError(Exception):
    """Something that the user can fix."""

    exit_code = 1


class SpecInvalid(SweepError):
    """The sweep file is not valid. The message lists every mistake with its place."""

    exit_code = 2


class UsageInvalid(SweepError):
    """The command names something that does not exist, or asks for something impossible."""

    exit_code = 2


class SweepChanged(SweepError):
    """A sweep of this name was measured under other conditions.

    Give the changed sweep file another name, or set its keys back to what they were.
    """

    exit_code = 2


class ResourcesInsufficient(SweepError):
    """The cluster can never provide what the sweep asks for, however long it waits."""

    exit_code = 2


class SweepInUse(SweepError):
    """Another orchestrator holds this sweep. Wait for it, or stop it."""

    exit_code = 5


class LeaseLost(SweepError):
    """Another orchestrator has taken over this sweep.

    This one may not write any more, and stops.
    """

    exit_code = 5


class StoreUnavailable(SweepError):
    """The database cannot be reached or written. Nothing acknowledged is lost; run it again."""

    exit_code = 75


class MachineUnready(SweepError):
    """This machine, or a limit of this process, is too small. Fix that, and run it again."""

    exit_code = 75


class ClusterUnavailable(SweepError):
    """The Ray cluster cannot be reached. Nothing acknowledged is lost; run it again."""

    exit_code = 75
