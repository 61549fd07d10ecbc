"""The fingerprint of the code that a call of `sweep run` measures, and a check for edits of it.

The functions import what they need, so that a call that is refused loads little of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import __version__
from orchestrator.cli.store import home

if TYPE_CHECKING:
    from orchestrator.core.pretend.replay import ReplayTable
    from orchestrator.core.sweepfile.command_options import CommandOptions
    from orchestrator.core.sweepfile.spec import SweepSpec
    from orchestrator.core.trial.fingerprint import Fingerprint


def code_of(spec: SweepSpec, table: ReplayTable | None) -> Fingerprint:
    """The measured code: the user's program, a table's runs, or this package's workloads."""
    from orchestrator.core.sweepfile.command_options import CommandOptions
    from orchestrator.core.trial.fingerprint import Fingerprint
    from orchestrator.sweep.provenance import code_fingerprint, program_fingerprint

    if table is not None:
        return Fingerprint(orchestrator_version=__version__, dirty_diff_digest=table.digest)
    options = spec.workload.options
    if not isinstance(options, CommandOptions):
        return code_fingerprint(Path(__file__).parents[1])
    return program_fingerprint(*_program_of(options), skip=[home.sweep_home()])


def edits_of(spec: SweepSpec) -> Callable[[], Fingerprint | None] | None:
    """Return a check for edits of the user's program; None: there is no such program."""
    from orchestrator.core.sweepfile.command_options import CommandOptions
    from orchestrator.sweep.provenance import sources
    from orchestrator.sweep.watched_files import WatchedFiles

    options = spec.workload.options
    if not isinstance(options, CommandOptions):
        return None
    watched = WatchedFiles(sources(*_program_of(options), skip=[home.sweep_home()]))
    return lambda: code_of(spec, None) if watched.have_changed() else None


def _program_of(options: CommandOptions) -> tuple[Sequence[str], Path | None]:
    """The words that may name files of the program, and the folder it runs in."""
    words = [*options.argv, *options.env.values()]
    return words, Path(options.cwd) if options.cwd is not None else None
