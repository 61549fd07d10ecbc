"""Finds what a command cannot start without: its working folder, its program, its script.

`sweep run` asks here before anything starts, and a rank before it starts its program. The files
themselves are looked up by the caller.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from orchestrator.core.trial.python_command import python_command

_SHELL = re.compile(r"(?:ba|da|k|z)?sh")
# Options of shells whose value is the next word.
_SHELL_VALUES = frozenset({"-o", "+o", "-O", "+O", "--rcfile", "--init-file"})
# Their script is the first word that ends in .py, unless one of the options below precedes it.
_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "colossalai"})
_LAUNCHER_MODULES = frozenset(
    {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
)
_NO_SCRIPT = frozenset({"-m", "--module", "--no-python", "--no_python"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Looks up files on the machine on which a command will run."""

    exists: Callable[[str], bool]
    is_folder: Callable[[str], bool]
    may_run: Callable[[str], bool]

    def is_file(self, path: str) -> bool:
        """Return whether there is anything but a folder: a file, a pipe."""
        return self.exists(path) and not self.is_folder(path)


def why_not_startable(
    argv: Sequence[str | None],
    *,
    cwd: str | None,
    search_path: str | None,
    files: Files,
    written: Collection[str] = (),
) -> str | None:
    """Return what is missing, with the rule and the fix; None if nothing is known to be.

    `argv`, `cwd` and `search_path` (PATH) are filled in; a word, or the `search_path`, is None if
    only a rank knows it. `cwd` None is the run directory, where a rank finds the files `written`.
    """
    if cwd is not None and not files.is_folder(cwd):
        what = "a file" if files.is_file(cwd) else "missing"
        return (
            f"workload.options.cwd {cwd!r} is {what}: it has to be a folder that exists wherever"
            " ranks run; correct it, or leave cwd out to start in the run directory"
        )
    if argv[0] is not None:
        problem = _why_no_program(argv[0], cwd, search_path, files)
        if problem is not None:
            return problem
    script = script_of(argv)
    if script is None or script in written:
        return None
    path = posixpath.join(cwd or "", script.removeprefix("./"))
    # Python also runs a folder that has a __main__.py.
    if posixpath.isabs(path) and any(map(files.is_file, (path, f"{path}/__main__.py"))):
        return None
    if not posixpath.isabs(path):
        return f"workload.options.argv names the script {script!r}, {_RELATIVE}"
    what = "is a folder" if files.is_folder(path) else "does not exist"
    named = "" if script == path else f" ({script!r} in argv)"
    return (
        f"workload.options.argv: the script {path}{named} {what}: correct the path in argv, or cwd,"
        " from which a relative path starts"
    )


_RELATIVE = (
    "a relative path, and each rank starts in its own run directory: give the absolute path, or set"
    " workload.options.cwd"
)


def _why_no_program(
    name: str, cwd: str | None, search_path: str | None, files: Files
) -> str | None:
    shown = f"workload.options.argv[0] {name!r}"
    if "/" not in name:
        if search_path is None:
            return None
        places = [entry for entry in search_path.split(":") if entry]
        found = [posixpath.join(cwd or "", entry, name) for entry in places]
        if any(files.is_file(path) and files.may_run(path) for path in found):
            return None
        return (
            f"{shown} is in none of the folders of PATH: correct the name, or give the absolute"
            f" path (PATH={search_path})"
        )
    path = posixpath.join(cwd or "", name.removeprefix("./"))
    if not posixpath.isabs(path):
        return f"{shown} is {_RELATIVE}"
    if not files.is_file(path):
        what = "is a folder" if files.is_folder(path) else "does not exist"
        return f"{shown}: {path} {what}: correct it"
    if not files.may_run(path):
        return (
            f"{shown}: {path} is not executable: chmod +x {path}, or put the program that runs it"
            " before it, as in [bash, run.sh]"
        )
    return None


def script_of(argv: Sequence[str | None]) -> str | None:
    """Return the script that Python, a shell or a launcher of ranks is to run, if it is known."""
    first, *rest = argv
    if first is None:
        return None
    name = posixpath.basename(first)
    if (python := python_command(argv)) is not None:
        is_launcher = python.module in _LAUNCHER_MODULES
        return _script_of_launcher(python.arguments) if is_launcher else python.script
    if _SHELL.fullmatch(name):
        return _script_of_shell(rest)
    return _script_of_launcher(rest) if name in _LAUNCHERS else None


def _script_of_shell(words: Sequence[str | None]) -> str | None:
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word is None:
            return None
        elif word[:1] not in ("-", "+"):
            return word
        elif word in _SHELL_VALUES or re.fullmatch(r"[-+][A-Za-z]*o", word):
            skip = True
        elif re.fullmatch(r"-[A-Za-z]*[cs][A-Za-z]*", word):
            return None
    return None


def _script_of_launcher(words: Sequence[str | None]) -> str | None:
    for word in words:
        if word is None or word in _NO_SCRIPT:
            return None
        if word.endswith(".py") and not word.startswith("-"):
            return word
    return None
