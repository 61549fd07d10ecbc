"""Checks of `axes.options`: names that are taken, values that an option lacks, unknown {names}.

Each mistake is returned with its place in the sweep file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from orchestrator.core.problem.layout import OptionValue
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.config_files import templates
from orchestrator.core.sweepfile.constraint_language import Names
from orchestrator.core.sweepfile.suggestion import did_you_mean
from orchestrator.core.sweepfile.synthetic_options import LAYOUT_NAMES
from orchestrator.core.sweepfile.template import FRAMEWORK_NAMES, TEMPLATE_NAMES, checked
from orchestrator.core.sweepfile.workload_options import WorkloadOptions
from orchestrator.core.sweepfile.workload_section import Workload

# Keys and numbers of entries, from the top of the sweep file.
Place = tuple[str | int, ...]
# With its place; () if it concerns several sections.
Mistake = tuple[Place, str]

_NOT_FOR_OPTIONS = frozenset({*LAYOUT_NAMES, *TEMPLATE_NAMES, *FRAMEWORK_NAMES, *Names().all})
# A command gets option `x` as SWEEP_X in its environment; these variables have another meaning.
_OWN_VARIABLES = frozenset(
    {
        "SWEEP_HOME",
        "SWEEP_DB",
        "SWEEP_DB_READER",
        "SWEEP_RUN_DIR",
        "SWEEP_ATTEMPT",
        "SWEEP_LAUNCHER",
    }
)


def option_mistakes(workload: Workload, axes: Mapping[str, Sequence[OptionValue]]) -> list[Mistake]:
    """Return the mistakes in `axes.options`, and in the templates of a command, with places."""
    options = workload.options
    mistakes: list[Mistake] = []
    for name, values in axes.items():
        place = ("axes", "options", name)
        refusal = _option_refusal(workload, name, values)
        if refusal is None and isinstance(options, CommandOptions):
            refusal = _variable_refusal(name, list(axes))
        if refusal:
            mistakes.append((place, refusal))
        elif options.MAY_VARY is not None:
            wrong = ((i, _value_refusal(options, name, value)) for i, value in enumerate(values))
            mistakes += [((*place, i), message) for i, message in wrong if message]
    if isinstance(options, CommandOptions):
        mistakes += _template_mistakes(options, (*TEMPLATE_NAMES, *FRAMEWORK_NAMES, *axes))
    return mistakes


def _option_refusal(workload: Workload, name: str, values: Sequence[OptionValue]) -> str | None:
    options = workload.options
    if name in _NOT_FOR_OPTIONS:
        return f"{name} is already a name of the layout or its cell; rename the option"
    if len({type(value) for value in values}) > 1:
        return (
            "values of more than one kind; expected words only, whole numbers only, or true and"
            " false"
        )
    if options.MAY_VARY is None:
        return None
    if name in options.as_written():
        return f"{name} is also in workload.options; an option varies or is fixed: keep one of them"
    if name not in options.MAY_VARY:
        known = name in type(options).model_fields
        what = "may not vary" if known else f"is no option of workload {workload.name}"
        allowed = ", ".join(sorted(options.MAY_VARY)) or "none"
        return f"{name} {what}; those that may: {allowed}{did_you_mean(name, options.MAY_VARY)}"
    return None


def _variable_refusal(name: str, options: Sequence[str]) -> str | None:
    """Return what is wrong with the environment variable that passes an option to a command."""
    variable = f"SWEEP_{name.upper()}"
    if variable in _OWN_VARIABLES:
        return (
            f"{name} would be {variable} in the environment of ranks, which has another meaning;"
            " rename the option"
        )
    before = (*TEMPLATE_NAMES, *options[: options.index(name)])
    if other := next((known for known in before if known.upper() == name.upper()), None):
        return (
            f"{name} and {other} would both be {variable} in the environment of ranks;"
            " rename the option"
        )
    return None


def _value_refusal(options: WorkloadOptions, name: str, value: OptionValue) -> str | None:
    field = type(options).model_fields[name]
    of_field: TypeAdapter[Any] = TypeAdapter(
        Annotated[field.annotation, name, *field.metadata]  # type: ignore[arg-type]
    )
    try:
        of_field.validate_python(value)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        words = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
        shown = str(value).lower() if isinstance(value, bool) else repr(value)[:80]
        wrong = f"is not one of {', '.join(words)}" if words else f"is no {name}: {error['msg']}"
        return f"{shown} {wrong}{did_you_mean(value, words)}"
    return None


def _template_mistakes(options: CommandOptions, names: Sequence[str]) -> list[Mistake]:
    texts: list[Mistake] = [(("argv", i), text) for i, text in enumerate(options.argv)]
    texts += [(("env", name), text) for name, text in options.env.items()]
    texts += [(("cwd",), options.cwd)] if options.cwd is not None else []
    texts += [
        (("files", name, *path), text)
        for name, content in options.files.items()
        for path, text in templates(content)
    ]
    mistakes: list[Mistake] = []
    for place, text in texts:
        try:
            checked(text, names)
        except ValueError as exc:
            mistakes.append((("workload", "options", *place), str(exc)))
    return mistakes
