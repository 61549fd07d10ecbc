"""The commands of a group, each imported once it is asked for: `sweep best` needs no web server.

Only `--help` and the shell's completion ask for all of them. It knows no command.
"""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

# The modules of commands are named without it.
PACKAGE = "orchestrator.cli"


class LazyGroup(TyperGroup):
    """A group that has the commands of its `table`, before those that are added to it."""

    # The module of each command, by the command's name, in the order of `--help`. The command is
    # the function of that name.
    table: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = LazyCommands({**self.table, **self.commands})

    def list_commands(self, ctx: object) -> list[str]:
        """Return the names of the commands. It imports none of them."""
        return list(self.commands)


class LazyCommands(UserDict[str, Any]):
    """Commands by name. The module's name takes the place of a command until it is asked for."""

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if isinstance(found, str):
            function = getattr(import_module(f"{PACKAGE}.{found}"), name.replace("-", "_"))
            found = self.data[name] = _command(function)
        return found


def _command(function: Callable[..., None]) -> Any:
    """Return a command. Its docstring is its help; the examples at its end go below the options."""
    text, _, examples = (inspect.getdoc(function) or "").partition("\n\nExamples:\n")
    # \b keeps the lines of a paragraph as they are.
    epilog = "\b\nExamples:\n" + examples.replace("\n\n", "\n\n\b\n")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(help=text, epilog=epilog if examples else None)(function)
    return typer.main.get_command(alone)
