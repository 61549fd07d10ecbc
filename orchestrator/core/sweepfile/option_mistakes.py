"""What is wrong with `axes.options`: names that are taken or may not vary, values that an option does not have, placeholders that nothing fills.

Told with its place in the sweep file. What each option is stands in `workload_options`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from orchestrator.core.problem.layout import OptionValue
from orchestrator.core.sweepfile.constraint import Names
from orchestrator.core.sweepfile.template import TEMPLATE_NAMES, checked
from orchestrator.core.sweepfile.workload_options import (
    LAYOUT_NAMES,
    CommandOptions,
    Workload,
    WorkloadOptions,
)

Place = tuple[
    str | int, ...
]  # of a mistake in the sweep file: keys and numbers of entries from its top

_NOT_FOR_OPTIONS = frozenset({*LAYOUT_NAMES, *TEMPLATE_NAMES, *Names().all})
# A command's options are in its environment as SWEEP_ and their names in capitals; these say something else there.
_OWN_VARIABLES = frozenset(
    {
        "SWEEP_HOME",
        "SWEEP_DB",
        "SWEEP_DB_READER",
        "SWEEP_RUN_DIR",
        "SWEEP_ATTEMPT",
        "SWEEP_LAUNCHER",
        "SWEEP_ORIGINAL_PYTHONPATH",
    }
)


def option_mistakes(
    workload: Workload, axes: Mapping[str, Sequence[OptionValue]]
) -> list[tuple[Place, str]]:
    """What `axes.options` cannot mean with this workload, each with its place in the sweep file; the templates of a command included."""
    mistakes: list[tuple[Place, str]] = []
    for name, values in axes.items():
        place = ("axes", "options", name)
        refusal = _option_refusal(workload, name, values)
        if refusal is None and isinstance(workload.options, CommandOptions):
            refusal = _variable_refusal(name, list(axes))
        if refusal:
            mistakes.append((place, refusal))
        elif workload.options.MAY_VARY is not None:
            wrong = (
                (number, _value_refusal(workload.options, name, value))
                for number, value in enumerate(values)
            )
            mistakes += [((*place, number), said) for number, said in wrong if said]
    if isinstance(workload.options, CommandOptions):
        mistakes += _template_mistakes(workload.options, (*TEMPLATE_NAMES, *axes))
    return mistakes


def _option_refusal(workload: Workload, name: str, values: Sequence[OptionValue]) -> str | None:
    options = workload.options
    if name in _NOT_FOR_OPTIONS:
        return f"{name} is a name of the layout or its cell already; call the option otherwise"
    if len({type(value) for value in values}) > 1:
        return "values of more than one kind; expected words only, whole numbers only, or true and false"
    if options.MAY_VARY is None:
        return None
    if name in options.as_written():
        return f"{name} also stands in workload.options; an option varies or is fixed: keep one of them"
    if name not in options.MAY_VARY:
        allowed = ", ".join(sorted(options.MAY_VARY)) or "none"
        close = get_close_matches(name[:80], options.MAY_VARY, n=1)
        what = (
            "may not vary"
            if name in type(options).model_fields
            else f"is no option of workload {workload.name}"
        )
        return f"{name} {what}; those that may: {allowed}{f'; did you mean {close[0]}?' if close else ''}"
    return None


def _variable_refusal(name: str, options: Sequence[str]) -> str | None:
    """What is wrong with the variable that tells an option to a command."""
    variable = f"SWEEP_{name.upper()}"
    if variable in _OWN_VARIABLES:
        return f"{name} would be {variable} in the environment of ranks, which has a meaning of its own; call the option otherwise"
    before = (*TEMPLATE_NAMES, *options[: options.index(name)])
    if other := next((known for known in before if known.upper() == name.upper()), None):
        return f"{name} and {other} would both be {variable} in the environment of ranks; call the option otherwise"
    return None


def _value_refusal(options: WorkloadOptions, name: str, value: OptionValue) -> str | None:
    field = type(options).model_fields[name]
    of_field: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, name, *field.metadata])  # type: ignore[arg-type]  # known at run time
    try:
        of_field.validate_python(value)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        words = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
        close = get_close_matches(str(value)[:80], words, n=1)
        shown = str(value).lower() if isinstance(value, bool) else repr(value)[:80]
        said = f"is not one of {', '.join(words)}" if words else f"is no {name}: {error['msg']}"
        return f"{shown} {said}{f'; did you mean {close[0]}?' if close else ''}"
    return None


def _template_mistakes(options: CommandOptions, names: Sequence[str]) -> list[tuple[Place, str]]:
    places: list[tuple[Place, str]] = [
        (("argv", number), text) for number, text in enumerate(options.argv)
    ]
    places += [(("env", name), text) for name, text in options.env.items()]
    places += [(("cwd",), options.cwd)] if options.cwd is not None else []
    mistakes: list[tuple[Place, str]] = []
    for place, text in places:
        try:
            checked(text, names)
        except ValueError as exc:
            mistakes.append((("workload", "options", *place), str(exc)))
    return mistakes
