"""What varies between the layouts of a sweep, and what of it reaches a user's program.

A program gets values in its arguments, its variables and its files; or its script reads variables
SWEEP_NAME. Modules that the script imports are not searched.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import chain

import numpy as np

from orchestrator.core.problem.layout import CODED, NAMED_AXES
from orchestrator.core.problem.layout_table import COLUMNS, LayoutTable
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.template import TEMPLATE_NAMES, text_of

# Names of templates that say where a rank runs, not how the layout trains.
_OF_THE_RANK = frozenset(
    {
        *("gpus_per_node", "num_nodes", "node_rank", "master_addr", "master_port"),
        *("run_dir", "result_file", "metrics_file", "stop_file"),
    }
)


def varying_values(
    tables: Iterable[LayoutTable], sequence_lengths: Collection[int]
) -> dict[str, list[str]]:
    """Return the axes of some cells, options included, that have several values, with them."""
    values: dict[str, list[str]] = {"sequence_length": list(map(str, sequence_lengths))}
    for table in tables:
        for name in COLUMNS:
            found = np.unique(getattr(table, name)).tolist()
            if name in CODED:
                distinct = getattr(table, CODED[name].distinct)
                found = [distinct[code] for code in found]
            named = chain(*found) if name == "options" else ((name, value) for value in found)
            for axis, value in named:
                if (text := text_of(value)) not in values.setdefault(axis, []):
                    values[axis].append(text)
    return {name: given for name, given in values.items() if len(given) > 1}


def names_passed(options: CommandOptions, axes: Collection[str], script: str) -> set[str]:
    """Return the names that the command's templates have, or whose variable the script reads.

    `axes`: the options of the program that vary. `script`: its text, empty if it is not known.
    """
    names = {*TEMPLATE_NAMES, *axes} - _OF_THE_RANK
    # A script may compose the name, in either case: os.environ[f"SWEEP_{name.upper()}"].
    composes = re.search(r"SWEEP_(?![A-Z0-9])", script) is not None
    text = script.upper() if composes else script
    words = set(re.findall(r"[A-Z][A-Z0-9_]+", text.replace("SWEEP_", " ")))
    read = {name for name in names if "SWEEP_" in script and name.upper() in words}
    if options.framework is not None:
        read |= {*NAMED_AXES, "sequence_length"}  # it writes all of them
    return options.names_used() & names | read
