"""A job in the words of each framework: its settings, what the program has to do, what is lacking.

To add a framework: its name in framework.py, a module with its rules, and a line in `TABLES`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from orchestrator.core.frameworks import (
    accelerate,
    deepspeed,
    litgpt,
    llm_foundry,
    megatron,
    nanotron,
    torchrun,
    torchtitan,
    transformers,
)
from orchestrator.core.frameworks.expression import JOB_NUMBERS, Rule
from orchestrator.core.frameworks.framework import Framework
from orchestrator.core.frameworks.job import Job
from orchestrator.core.frameworks.tried_versions import TriedVersions


class Form(StrEnum):
    """How settings are written."""

    JSON = "json"
    YAML = "yaml"
    # --name value, and --name alone for true
    ARGUMENTS = "arguments"
    # --name=value; a name that ends in a colon is a subcommand: name:value
    TYRO_ARGUMENTS = "tyro"
    # Variables in capitals, and the arguments of torchrun.
    TORCHRUN = "torchrun"


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameworkTable:
    """The rules of one framework, and what its users call the result."""

    rules: Mapping[str, Rule]
    form: Form
    # The name of its file in a run folder; None: arguments.
    file: str | None
    # How the result is used, for people.
    use: str
    # None: no release was tried, or all releases take the same settings.
    tried: TriedVersions | None = None
    # Other names of settings that the rules write: a user's keys of these names are left out.
    other_names: frozenset[str] = frozenset()


TABLES: Mapping[Framework, FrameworkTable] = MappingProxyType(
    {
        Framework.TRANSFORMERS: FrameworkTable(
            rules=transformers.RULES,
            form=Form.JSON,
            file="transformers.json",
            use="HfArgumentParser(TrainingArguments).parse_json_file(FILE), or Trainer scripts:"
            " python run_clm.py FILE",
            tried=TriedVersions(package="transformers", oldest="5.17", newest="5.24"),
            other_names=transformers.NEW_NAMES,
        ),
        Framework.ACCELERATE: FrameworkTable(
            rules=accelerate.RULES,
            form=Form.YAML,
            file="accelerate.yaml",
            use="accelerate launch --config_file FILE train.py",
            tried=TriedVersions(package="accelerate", oldest="1.15", newest="1.15"),
        ),
        Framework.DEEPSPEED: FrameworkTable(
            rules=deepspeed.RULES,
            form=Form.JSON,
            file="deepspeed.json",
            use="deepspeed.initialize(config=FILE), or deepspeed train.py --deepspeed_config FILE",
            tried=TriedVersions(package="deepspeed", oldest="0.19", newest="0.19"),
        ),
        Framework.TORCHTITAN: FrameworkTable(
            rules=torchtitan.RULES,
            form=Form.TYRO_ARGUMENTS,
            file=None,
            use="torchrun ... -m torchtitan.train --module llama3 --config llama3_8b $(cat FILE)",
            tried=TriedVersions(package="torchtitan", oldest="0.3", newest="0.3"),
        ),
        Framework.MEGATRON: FrameworkTable(
            rules=megatron.RULES,
            form=Form.ARGUMENTS,
            file=None,
            use="torchrun ... pretrain_gpt.py $(cat FILE), and those of your model and data",
        ),
        Framework.NANOTRON: FrameworkTable(
            rules=nanotron.RULES,
            form=Form.YAML,
            file="nanotron.yaml",
            use="merge FILE into your configuration: torchrun ... run_train.py --config-file",
        ),
        Framework.LITGPT: FrameworkTable(
            rules=litgpt.RULES,
            form=Form.YAML,
            file="litgpt.yaml",
            use="litgpt pretrain MODEL --config FILE",
            tried=TriedVersions(package="litgpt", oldest="0.5.13", newest="0.5.13"),
        ),
        Framework.LLM_FOUNDRY: FrameworkTable(
            rules=llm_foundry.RULES,
            form=Form.YAML,
            file="llm-foundry.yaml",
            use="merge FILE into your configuration: composer train.py",
        ),
        Framework.TORCHRUN: FrameworkTable(
            rules=torchrun.RULES,
            form=Form.TORCHRUN,
            file=None,
            use="sh FILE train.py, which reads the SWEEP_ variables as under `sweep run`",
        ),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A job as one framework's settings."""

    framework: Framework
    # Names with dots for the sections of a file.
    settings: Mapping[str, Any]
    # By the number of the job: what the user has to do, in the program or at its start.
    program: Mapping[str, str]
    # By the number of the job: why the framework cannot do it.
    impossible: Mapping[str, str]

    def nested(self) -> dict[str, Any]:
        """The settings with their sections as mappings."""
        return nested(self.settings)


def translate(job: Job, framework: Framework) -> Translation:
    """Write a job as a framework's settings. Nothing is dropped: see `impossible`."""
    rules = TABLES[framework].rules
    written = {name: rules[name](job) for name in JOB_NUMBERS}
    found: dict[str, Any] = {}
    for expression in written.values():
        found |= expression.settings
    instructions = {name: it.program for name, it in written.items() if it.program is not None}
    lacking = {name: it.impossible for name, it in written.items() if it.impossible is not None}
    for name, value in job.layout.options:
        instructions[name] = f"set your own option {name} to {value}"
    return Translation(
        framework=framework, settings=found, program=instructions, impossible=lacking
    )


def version_remark(found: Translation, packages: Mapping[str, str], failure: str) -> str | None:
    """Return which versions were tried, if a failure names a setting and another is installed.

    `packages`: the versions of those that the program has, by name.
    """
    tried = TABLES[found.framework].tried
    installed = tried.other_than_tried(packages) if tried is not None else None
    names = (name.rstrip(":") for name in found.settings)
    named = (it for it in names if re.search(rf"\b{re.escape(it.split('.')[-1])}\b", failure))
    if installed is None or (name := next(named, None)) is None:
        return None
    return (
        f"`framework: {found.framework}` writes {name}; it was tried with {tried}, and this is"
        f" {installed}: if that is the cause, install one of those"
    )


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn names with dots into mappings of mappings."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return found


def arguments(settings: Mapping[str, Any], form: Form) -> list[str]:
    """The settings as arguments of a command line. Raises ValueError for a form of files."""
    match form:
        case Form.ARGUMENTS:
            return [text for name, value in settings.items() for text in _plain(name, value)]
        case Form.TYRO_ARGUMENTS:
            plain = [f"--{name}={v}" for name, v in settings.items() if name[-1] != ":"]
            # A subcommand ends the arguments of the command before it.
            return plain + [f"{name}{v}" for name, v in settings.items() if name[-1] == ":"]
        case Form.TORCHRUN:
            return [f"--{name}={v}" for name, v in settings.items() if not name.isupper()]
        case Form.JSON | Form.YAML:
            raise ValueError(f"{form} settings are a file, not arguments")


def variables(settings: Mapping[str, Any], form: Form) -> dict[str, str]:
    """The settings that are environment variables."""
    if form is not Form.TORCHRUN:
        return {}
    return {name: value for name, value in settings.items() if name.isupper()}


def _plain(name: str, value: Any) -> list[str]:
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]
