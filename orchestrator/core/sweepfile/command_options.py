"""The options of workload command: a program, its arguments and its environment variables.

A value that is refused may be a secret in the wrong place, so no error message repeats one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from orchestrator.core.sweepfile.spec_values import key
from orchestrator.core.sweepfile.template import well_formed
from orchestrator.core.sweepfile.workload_options import WorkloadOptions, few_entries
from orchestrator.core.trial.rank_environment import LAUNCHERS_OWN, is_secret_name

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_PATTERN = re.compile(r"(?:[A-Za-z_]|\*)[A-Za-z0-9_*]{0,254}")


def _variable(name: str) -> str:
    """Check the name of an environment variable. Errors do not repeat it: it may be a secret."""
    if not _VARIABLE.fullmatch(name):
        raise ValueError(
            "this is no name of an environment variable:"
            " letters, digits and _, no digit first, nothing else"
        )
    if name in LAUNCHERS_OWN or name.startswith("SWEEP_"):
        raise ValueError(f"{name} is set for each rank by its launcher; leave it out")
    return name


def _names_only(value: Any) -> Any:
    rule = (
        "names of environment variables only, [HF_TOKEN]:"
        " the values are taken from the environment of `sweep run`"
    )
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"expected a list of {rule}")
    for number, name in enumerate(value, 1):
        try:
            _variable(name)
        except ValueError as exc:
            raise ValueError(f"entry {number}: {exc}; expected {rule}") from None
        if name in value[: number - 1]:
            raise ValueError(f"{name} appears twice in the list")
    return value


def _name_or_pattern(value: str) -> str:
    """Check the name of a variable that ranks get, or a pattern of names with `*`."""
    if "*" not in value:
        if is_secret_name(_variable(value)):
            raise ValueError(
                f"{value} looks like a secret: name it in env_from,"
                " whose values are kept out of the store and the logs"
            )
    elif not _PATTERN.fullmatch(value):
        raise ValueError(
            f"{value[:80]!r} is no pattern of names: letters, digits, _ and *, as in MY_*"
        )
    return value


def _absolute(value: str) -> str:
    if not value.startswith(("/", "{run_dir}")):
        raise ValueError(
            f"{value[:80]!r} is relative, and each rank starts in its own run directory:"
            " give the absolute path"
        )
    return value


def _without_nul(value: str) -> str:
    if "\0" in value:
        # The same words as in `yaml_document`: the mistake is then reported once.
        raise ValueError("control character '\\x00' in a text")
    return value


Variable = Annotated[str, AfterValidator(_variable)]
Template = Annotated[str, AfterValidator(_without_nul), AfterValidator(well_formed)]


class CommandOptions(WorkloadOptions):
    """Options of workload command."""

    MAY_VARY = None  # they are names in templates

    argv: Annotated[
        tuple[Template, ...],
        BeforeValidator(few_entries),
        Field(min_length=1),
        key("list of texts", "The program and its arguments, with `{names}` filled in; no shell"),
    ]
    env: Annotated[
        Mapping[Variable, Template],
        BeforeValidator(few_entries),
        key(
            "mapping of texts",
            "Environment variables to add, with `{names}` filled in. They are stored: no secrets",
        ),
    ] = {}
    # Validators run last to first.
    env_from: Annotated[
        tuple[str, ...],
        BeforeValidator(_names_only),
        BeforeValidator(few_entries),
        key(
            "list of names",
            "Secrets: variables whose values ranks get from the environment of `sweep run`."
            " The values are not stored anywhere",
        ),
    ] = ()
    pass_env: Annotated[
        tuple[Annotated[str, AfterValidator(_name_or_pattern)], ...],
        BeforeValidator(few_entries),
        key(
            "list of names and patterns",
            "Other variables that ranks get from the environment of `sweep run`, by name or by"
            " pattern (`MY_*`). A pattern passes nothing that looks like a secret",
        ),
    ] = ()
    cwd: Annotated[
        Annotated[Template, AfterValidator(_absolute)] | None,
        key("absolute path", "Working directory. Default: the run directory"),
    ] = None

    def conditions(self) -> dict[str, Any]:
        """Variables that come from the environment may change within one sweep."""
        options = self.as_written()
        return {name: options[name] for name in options if name not in ("env_from", "pass_env")}

    @model_validator(mode="after")
    def _given_once(self) -> Self:
        for name in self.env_from:
            if name in self.env:
                raise ValueError(
                    f"env_from names {name}, and env gives it a value:"
                    " keep one of them, env_from for a secret"
                )
        for name in self.pass_env:
            if name in self.env or name in self.env_from:
                raise ValueError(
                    f"pass_env names {name}, which env or env_from names as well: keep one of them"
                )
        return self
