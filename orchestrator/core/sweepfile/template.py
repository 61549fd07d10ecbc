"""Templates of a command: names in braces, such as `{micro_batch_size}`, and their replacement.

The values are known when a rank starts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches

from orchestrator.core.problem.layout import NAMED_AXES, SHORT_NAMES, OptionValue

# Each name with the meaning of its value.
TEMPLATE_NAMES: Mapping[str, str] = {
    **dict.fromkeys(NAMED_AXES, "the layout's"),
    "recompute": "as in the sweep file: `full:8`",
    "world_size": "ranks of the gang",
    "gpus_per_node": "ranks of the gang on each of its nodes",
    "num_nodes": "nodes of the gang",
    "node_rank": "number of this node in the gang, from 0",
    "master_addr": "address of the node that has rank 0",
    "master_port": "port there that is kept free for the gang",
    "global_batch_size": "sequences of an optimizer step",
    "sequence_length": "tokens of a sequence",
    "num_steps": "`warmup_steps` + `max_steps`;"
    " sometimes fewer in the [first trial of a cell](#when-it-has-enough)",
    "seed": "`search.seed`",
    "run_dir": "a folder for this attempt",
    "result_file": "where its result goes",
    "metrics_file": "where its lines go",
    "stop_file": "appears when the numbers are enough",
}
# Those of option `framework`: the path of its file, and its arguments, an entry of `argv` alone.
FRAMEWORK_FILE, FRAMEWORK_ARGUMENTS = FRAMEWORK_NAMES = ("framework_file", "framework_arguments")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace {names} by values; doubled braces become single. Raises ValueError for other text."""

    def value(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        if match[1] not in values:
            raise ValueError(_unknown(match[0], template, tuple(values)))
        return values[match[1]]

    return _PLACEHOLDER.sub(value, template)


def fill_known(template: str, values: Mapping[str, str]) -> str | None:
    """Return the template filled in; None if it has other names."""
    return fill(template, values) if names_in(template) <= values.keys() else None


def names_in(template: str) -> set[str]:
    """Return the names in braces, known or not."""
    return {match[1] for match in _PLACEHOLDER.finditer(template) if match[1] is not None}


def text_of(value: OptionValue) -> str:
    """Return a value as templates and environment variables have it: `true`, `8`, `full:2`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def checked(template: str, names: Collection[str] = TEMPLATE_NAMES) -> str:
    """Return the template if every name in it is known. Raises ValueError with a suggestion."""
    fill(template, dict.fromkeys(names, ""))
    return template


def well_formed(template: str) -> str:
    """Return the template if its braces match; its names are checked later. Raises ValueError."""
    for match in _PLACEHOLDER.finditer(template):
        if match[0] in "{}" or (match[1] is not None and not _NAME.fullmatch(match[1])):
            raise ValueError(_unknown(match[0], template, TEMPLATE_NAMES))
    return template


def _unknown(placeholder: str, template: str, names: Collection[str]) -> str:
    asked = placeholder.strip("{} ")[:80]
    meant = SHORT_NAMES.get(asked)
    close = [meant] if meant in names else get_close_matches(asked, names, n=1)
    hint = f"; did you mean {{{close[0]}}}?" if close else "; write {{ and }} for braces that stay"
    return (
        f"{_short(placeholder)} in {_short(template)} is not a name that can be filled in;"
        f" possible: {', '.join(names)}{hint}"
    )


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
