"""Starts every process of this project, so that it imports nothing from the user's folders.

A user's project may well have a folder `db` or a file `workloads.py`, in the working folder or on
PYTHONPATH (docs/decisions/imports.md). So `sweep` begins here, and so do the processes that it
starts: `python -P .../layout_sweep/start.py MODULE [ARGUMENTS]` calls `main` of that module.
Nothing but the standard library may be imported at the top.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder

OWN_PACKAGES = ("db", "layout_sweep", "orchestrator", "workloads")
# The folder that has these packages: a checkout, or the site-packages of an environment.
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
# What an installer leaves in the folder of the packages that it installs.
_OF_INSTALLED = ".dist-info"


class _OwnPackages:
    """Finds the packages of this project in ROOT, whatever else has their names."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [ROOT]) if name in OWN_PACKAGES else None


def sweep() -> int:
    """Run the command `sweep`, and return its exit code."""
    end_at_signals()
    claim_imports()
    # Only now is this package surely ours.
    code = int(import_module("orchestrator.cli").main())
    if code - 128 in _BEFORE:
        # After a signal. A library that it interrupted, as Ray while it starts, can crash at the
        # end of Python; what was asked for is written.
        os._exit(code)
    # As it ends Python would search all objects for garbage and free it, which takes 0.1 s.
    gc.freeze()
    return code


def main() -> int:
    """Run a module of this project, or the text after `-c`, with the arguments that follow."""
    claim_imports()
    del sys.argv[0]
    if sys.argv[0] == "-c":
        exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
        return 0
    return import_module(sys.argv[0]).main() or 0


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a process that runs a module of this project."""
    # -P: nothing from this file's folder either.
    return [sys.executable, "-P", os.path.realpath(__file__), module, *arguments]


def end_at_signals() -> None:
    """Let Ctrl-C, SIGTERM and SIGHUP end this process with their documented code from now on.

    Nothing has begun while a command's modules are imported, so nothing has to be cleared up.
    Later `terminable` of the command line handles the signals.
    """
    for number, before in _BEFORE.items():
        # What somebody ignores, as `nohup` does, stays ignored.
        if signal.getsignal(number) is before:
            signal.signal(number, end_at_once)


def end_at_once(number: int, _frame: object) -> None:
    """End this process with the code that a shell gives to a death by this signal."""
    if number == signal.SIGINT:
        with suppress(OSError):  # stderr may be closed
            os.write(2, b"interrupted\n")
    os._exit(128 + number)


# How Python handles these signals when it starts.
_BEFORE = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


def claim_imports() -> None:
    """Import nothing from the user's folders any more, and our packages only from ROOT."""
    script = os.path.dirname(os.path.realpath(sys.argv[0])) if sys.argv and sys.argv[0] else ""
    is_scripts = bool(sys.path) and not sys.flags.safe_path and _real(sys.path[0]) == script
    sys.path[:] = own_path(sys.path[is_scripts:], os.environ.get("PYTHONPATH", ""))
    # Not by identity: this file may have been run as a script, and imported again.
    if not any(map(_is_ours, sys.meta_path)):
        sys.meta_path.insert(0, _OwnPackages)


def own_path(path: Sequence[str], python_path: str) -> list[str]:
    """Return a search path without the user's folders, and with ROOT.

    The user's are the working folder, and those on PYTHONPATH. A folder on PYTHONPATH that holds
    installed packages (`*.dist-info`) stays: many clusters provide packages that way. So does the
    standard library.
    """
    users = {_real(entry) for entry in python_path.split(os.pathsep)} if python_path else set()
    users = {entry for entry in users | {_real(".")} if not _is_pythons(entry)} - {ROOT}
    kept = [entry for entry in path if entry and _real(entry) not in users]
    return kept if ROOT in map(_real, kept) else [*kept, ROOT]


def installed_python_path(python_path: str) -> str:
    """Return the folders on PYTHONPATH that hold installed packages, as a PYTHONPATH."""
    entries = [entry for entry in python_path.split(os.pathsep) if entry]
    return os.pathsep.join(entry for entry in entries if _holds_installed(entry))


def return_imports() -> None:
    """Import from the user's folders again, before all others: for code of theirs.

    A package of ours that has the name of one of theirs becomes theirs; whoever has imported ours
    keeps it.
    """
    python_path = os.environ.get("PYTHONPATH", "")
    users = [os.path.abspath(entry) for entry in ["", *filter(None, python_path.split(os.pathsep))]]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_ours(finder)]
    sys.path[:0] = users
    foreign = [entry for entry in users if _real(entry) != ROOT]
    taken = {name for name in OWN_PACKAGES if PathFinder.find_spec(name, foreign) is not None}
    for name in list(sys.modules):
        if name.partition(".")[0] in taken:
            del sys.modules[name]


def _is_ours(finder: object) -> bool:
    return getattr(finder, "__name__", "") == _OwnPackages.__name__


def _real(entry: str) -> str:
    try:
        return os.path.realpath(entry or ".")
    except FileNotFoundError:  # the working folder was removed
        return entry


def _is_pythons(folder: str) -> bool:
    """True for a folder of installed packages, and for those of the standard library."""
    library = os.path.dirname(os.path.realpath(os.__file__))
    return folder in (library, os.path.join(library, "lib-dynload")) or _holds_installed(folder)


def _holds_installed(folder: str) -> bool:
    try:
        return any(name.endswith(_OF_INSTALLED) for name in os.listdir(folder))
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
