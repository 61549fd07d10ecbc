"""Reads the command line of a Python interpreter: the script or module that it runs.

A word is None if it is not known yet. No file is looked up.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*")
# Options whose value is the next word.
_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_MODULE = re.compile(r"-(?![WX])[A-Za-z]*m")
_CODE = re.compile(r"-(?![WX])[A-Za-z]*c.*")


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonCommand:
    """The program of an interpreter. Neither: code, standard input, or not known yet."""

    script: str | None = None
    module: str | None = None
    arguments: Sequence[str | None] = ()  # of the script or module


def is_python(path: str) -> bool:
    """Return whether a program is a Python interpreter, by the name of its file."""
    return _PYTHON.fullmatch(posixpath.basename(path)) is not None


def python_command(argv: Sequence[str | None]) -> PythonCommand | None:
    """Return what the Python of a command line runs; None if it begins with no Python."""
    if not argv or argv[0] is None or not is_python(argv[0]):
        return None
    words = iter(range(1, len(argv)))
    for place in words:
        word = argv[place]
        if word is None or word == "-" or _CODE.fullmatch(word):
            break
        if not word.startswith("-"):
            return PythonCommand(script=word, arguments=argv[place + 1 :])
        if word in _WITH_VALUE:
            next(words, None)
        elif _MODULE.fullmatch(word):
            module = argv[place + 1] if place + 1 < len(argv) else None
            return PythonCommand(module=module, arguments=argv[place + 2 :])
    return PythonCommand()
