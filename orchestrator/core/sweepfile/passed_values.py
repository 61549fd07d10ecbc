"""What varies between the layouts of a sweep, and what of it reaches a user's program.

A program gets values in its arguments, its variables and its files; or its script reads variables
SWEEP_NAME. A module that the script imports may read them too, which nobody looks for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from orchestrator.core.problem.layout import NAMED_AXES, Layout
from orchestrator.core.problem.layout_table import COLUMNS
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.template import TEMPLATE_NAMES, text_of

# Names of templates that have the same value in every layout.
_OF_THE_RANK = frozenset(
    {
        *("gpus_per_node", "num_nodes", "node_rank", "master_addr", "master_port"),
        *("run_dir", "result_file", "metrics_file", "stop_file"),
    }
)


def varying_values(
    layouts: Iterable[Layout], sequence_lengths: Collection[int]
) -> dict[str, list[str]]:
    """Return the axes, options included, that have several values, with them."""
    values: dict[str, list[str]] = {"sequence_length": list(map(str, sequence_lengths))}
    for layout in layouts:
        named = {name: getattr(layout, name) for name in COLUMNS if name != "options"}
        for name, value in {**named, **dict(layout.options)}.items():
            text = text_of(value)
            if text not in values.setdefault(name, []):
                values[name].append(text)
    return {name: given for name, given in values.items() if len(given) > 1}


def names_passed(options: CommandOptions, axes: Collection[str], script: str) -> set[str]:
    """Return the names that the command's templates have, or whose variable the script reads.

    `axes`: the options of the program that vary. `script`: its text, empty if it is not known.
    """
    names = {*TEMPLATE_NAMES, *axes} - _OF_THE_RANK
    # A script may compose the name: os.environ[f"SWEEP_{name}"].
    words = set(re.findall(r"[A-Z][A-Z0-9_]+", script.replace("SWEEP_", " ")))
    read = {name for name in names if "SWEEP_" in script and name.upper() in words}
    if options.framework is not None:
        read |= {*NAMED_AXES, "sequence_length"}  # it writes all of them
    return options.names_used() & names | read
