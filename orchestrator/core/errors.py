"""The mistakes a caller can do something about. Each class is one thing to do; its docstring is its message.

`exit_code` is what `sweep` ends with (2 your input, 4 nothing feasible, 5 held by another, 75 try again: docs/troubleshooting.md).
"""

from __future__ import annotations


class SweepError(Exception):
    """Something the person at the keyboard can mend."""

    exit_code = 1


class SpecInvalid(SweepError):
    """The sweep file does not say what can be run. The message lists every mistake with its place."""

    exit_code = 2


class UsageInvalid(SweepError):
    """The command names something that does not exist, or asks for what cannot be done."""

    exit_code = 2


class SweepChanged(SweepError):
    """A sweep of this name was measured under other conditions. Rename it, or restore the spec."""

    exit_code = 2


class ResourcesInsufficient(SweepError):
    """The cluster can never hold what the sweep asks for, however long it waits."""

    exit_code = 2


class SweepHeld(SweepError):
    """Another orchestrator holds this sweep. Wait for it, or stop it."""

    exit_code = 5


class LeaseLost(SweepError):
    """Another orchestrator has taken this sweep over. This one may write nothing more, and stops."""

    exit_code = 5


class StoreUnavailable(SweepError):
    """The database cannot be reached or written. Nothing acknowledged is lost; the same command goes on."""

    exit_code = 75


class MachineUnready(SweepError):
    """This machine, or a limit of this process, leaves too little to work with. Mend it; the same command goes on."""

    exit_code = 75


class ClusterUnavailable(SweepError):
    """The Ray cluster cannot be reached. Nothing acknowledged is lost; the same command goes on."""

    exit_code = 75
