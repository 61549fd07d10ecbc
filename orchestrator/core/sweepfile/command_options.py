"""The options of workload command: a program, its arguments and its environment variables.

A value that is refused may be a secret in the wrong place, so no error message repeats one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from orchestrator.core.frameworks.framework import Framework
from orchestrator.core.frameworks.translation import TABLES
from orchestrator.core.sweepfile.config_files import checked_content, file_name, templates
from orchestrator.core.sweepfile.metrics_section import MetricsSection
from orchestrator.core.sweepfile.spec_values import key
from orchestrator.core.sweepfile.template import (
    FRAMEWORK_ARGUMENTS,
    FRAMEWORK_FILE,
    FRAMEWORK_NAMES,
    names_in,
    well_formed,
)
from orchestrator.core.sweepfile.workload_options import WorkloadOptions, few_entries
from orchestrator.core.trial.nested_launch import FIX, launcher_in
from orchestrator.core.trial.rank_environment import LAUNCHERS_OWN, RANKS_OWN, is_secret_name

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_PATTERN = re.compile(r"(?:[A-Za-z_]|\*)[A-Za-z0-9_*]{0,254}")


class Processes(StrEnum):
    # We start every rank, as torchrun does.
    PER_RANK = "per_rank"
    # The program starts the ranks of its node itself.
    PER_NODE = "per_node"


def _variable(name: str, *, may_set: frozenset[str] = frozenset()) -> str:
    """Check the name of an environment variable. Errors do not repeat it: it may be a secret."""
    if not _VARIABLE.fullmatch(name):
        raise ValueError(
            "this is no name of an environment variable:"
            " letters, digits and _, no digit first, nothing else"
        )
    if name.startswith("SWEEP_"):
        raise ValueError(f"{name}: names that begin with SWEEP_ are the launcher's; choose another")
    if name in LAUNCHERS_OWN - may_set:
        raise ValueError(f"{name} is set for each rank by its launcher; leave it out")
    return name


def _set_variable(name: str, info: ValidationInfo) -> str:
    """Check the name of a variable that `env` sets. A node's program may get its own ranks' too."""
    is_per_node = (info.data or {}).get("processes") is Processes.PER_NODE
    return _variable(name, may_set=RANKS_OWN if is_per_node else frozenset())


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


def _contents(files: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: checked_content(name, content) for name, content in files.items()}


Variable = Annotated[str, AfterValidator(_set_variable)]
Template = Annotated[str, AfterValidator(_without_nul), AfterValidator(well_formed)]


class CommandOptions(WorkloadOptions):
    """Options of workload command."""

    MAY_VARY = None  # they are names in templates

    argv: Annotated[
        tuple[Template, ...],
        BeforeValidator(few_entries),
        Field(min_length=1),
        key(
            "list of texts",
            "The program and its arguments, with `{names}` filled in; no shell. Files that it names"
            " are part of the code: put what the program writes under `{run_dir}`",
        ),
    ]
    # It comes before `env`, which it decides about.
    processes: Annotated[
        Processes,
        key(
            "`per_rank`, `per_node`",
            "`per_rank`: the program is started once per GPU, with torchrun's variables."
            " `per_node`: once per node, and calls torchrun, accelerate, deepspeed or srun itself",
        ),
    ] = Processes.PER_RANK
    framework: Annotated[
        Framework | None,
        key(
            ", ".join(f"`{framework}`" for framework in Framework),
            "Write each layout as this framework does: as arguments in place of"
            " `{framework_arguments}`, or as the file `{framework_file}`. Layouts that it cannot"
            " express are not legal: [recipes.md](recipes.md)",
        ),
    ] = None
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

    files: Annotated[
        Mapping[Annotated[str, AfterValidator(file_name)], Any],
        BeforeValidator(few_entries),
        AfterValidator(_contents),
        key(
            "mapping of files",
            "Files that are written into `{run_dir}` before the program starts:"
            " [config files](#config-files)",
        ),
    ] = {}

    metrics: Annotated[
        MetricsSection | None,
        key(
            "section",
            "Patterns of the numbers that the program prints:"
            " [numbers that it prints](#numbers-that-the-program-prints)",
        ),
    ] = None

    traces: Annotated[
        bool,
        Field(strict=True),
        key(
            "`true`, `false`",
            "The program writes Chrome traces into the folder SWEEP_PROFILE_DIR if that variable is"
            " set, so that `sweep profile` can show its steps:"
            " [traces](profile.md#your-own-program)",
        ),
    ] = False

    def names_used(self) -> set[str]:
        """The names in braces of all its templates."""
        texts = [*self.argv, *self.env.values(), *filter(None, [self.cwd])]
        texts += [text for content in self.files.values() for _, text in templates(content)]
        return set().union(*map(names_in, texts))

    def conditions(self) -> dict[str, Any]:
        """Variables that come from the environment may change within one sweep.

        Whether the program can be profiled changes nothing that is measured.
        """
        options = self.as_written()
        unconditional = ("env_from", "pass_env", "traces")
        return {name: options[name] for name in options if name not in unconditional}

    @model_validator(mode="after")
    def _one_launcher(self) -> Self:
        launcher = launcher_in(self.argv)
        if launcher is not None and self.processes is Processes.PER_RANK:
            raise ValueError(
                f"argv calls {launcher}, which starts the ranks of a node, and it would be called"
                f" once per rank: {FIX}"
            )
        return self

    @model_validator(mode="after")
    def _framework_is_used(self) -> Self:
        """Check that the program gets what the framework writes."""
        texts = [*self.argv, *self.env.values()]
        asked = [name for name in FRAMEWORK_NAMES if any(f"{{{name}}}" in it for it in texts)]
        if self.framework is None:
            if asked:
                raise ValueError(f"{{{asked[0]}}} is written by `framework`: name one")
            return self
        file = TABLES[self.framework].file
        needed = FRAMEWORK_ARGUMENTS if file is None else FRAMEWORK_FILE
        if asked != [needed]:
            raise ValueError(
                f"framework {self.framework} writes {{{needed}}}: use it in argv, and no other"
            )
        if file is not None and not isinstance(self.files.get(file, {}), Mapping):
            raise ValueError(f"files.{file} gets the layout's keys: write it as a mapping")
        if file is None and f"{{{needed}}}" not in self.argv:
            raise ValueError(
                f"{{{needed}}} becomes several arguments: give it an entry of argv of its own"
            )
        return self

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
