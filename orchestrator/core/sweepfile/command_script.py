"""The program of workload command with one layout, as a shell script that needs no sweep.

Names that only a sweep can fill in become variables of the shell, without which the script ends.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.frameworks.job import Job
from orchestrator.core.frameworks.translation import TABLES, arguments, translate
from orchestrator.core.problem.layout import NAMED_AXES
from orchestrator.core.sweepfile.command_options import CommandOptions, Processes
from orchestrator.core.sweepfile.template import (
    FRAMEWORK_ARGUMENTS,
    FRAMEWORK_FILE,
    TEMPLATE_NAMES,
    fill,
    text_of,
)

# Marks a variable of the shell in a text; no template contains it.
_MARK = "\0"
_VARIABLE = re.compile(f"{_MARK}([a-z_]+){_MARK}")
# Their values for a gang on one node.
_ON_ONE_NODE = {"node_rank": "0", "master_addr": "127.0.0.1", "master_port": "29500"}
_ONLY_IN_A_SWEEP = ("SWEEP_RESULT_FILE", "SWEEP_METRICS_FILE", "SWEEP_STOP_FILE", "SWEEP_RUN_DIR")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandScript:
    text: str
    # What the script cannot say: one sentence each.
    remarks: Sequence[str]


def command_script(options: CommandOptions, job: Job) -> CommandScript:
    """Return the script. A program that starts its ranks itself is not put under torchrun."""
    known = _values(job)
    names = known | (_ON_ONE_NODE if job.num_nodes == 1 else {})
    unknown = {name: f"{_MARK}{name}{_MARK}" for name in TEMPLATE_NAMES if name not in names}
    filled = names | unknown | {FRAMEWORK_FILE: f"{_MARK}{FRAMEWORK_FILE}{_MARK}"}
    argv: list[str] = []
    for word in options.argv:
        if word == f"{{{FRAMEWORK_ARGUMENTS}}}" and options.framework is not None:
            form = TABLES[options.framework].form
            argv += arguments(translate(job, options.framework).settings, form)
        else:
            argv.append(fill(word, filled))
    if options.processes is Processes.PER_RANK:
        argv = [*_torchrun(job, filled), *argv]
    environment = {f"SWEEP_{name.upper()}": value for name, value in known.items()}
    environment |= {name: fill(text, filled) for name, text in options.env.items()}
    lines = [f"{name}={_quoted(value)}" for name, value in environment.items()]
    lines.append(" ".join([*map(_quoted, argv), '"$@"']))
    change = f"cd {_quoted(fill(options.cwd, filled))} || exit\n" if options.cwd is not None else ""
    text = change + " \\\n".join(lines) + "\n"
    return CommandScript(text=text, remarks=_remarks(options, text))


def _values(job: Job) -> dict[str, str]:
    """The values of names in templates that follow from the layout and its cell."""
    layout = job.layout
    sizes: Mapping[str, int] = {
        "world_size": layout.world_size,
        "gpus_per_node": job.gpus_per_node,
        "num_nodes": job.num_nodes,
        "global_batch_size": layout.global_batch_size,
        "sequence_length": job.cell.sequence_length,
    }
    axes = {name: str(getattr(layout, name)) for name in NAMED_AXES}
    return axes | {name: text_of(value) for name, value in [*sizes.items(), *layout.options]}


def _torchrun(job: Job, filled: Mapping[str, str]) -> list[str]:
    words = ["torchrun", f"--nnodes={job.num_nodes}", f"--nproc-per-node={job.gpus_per_node}"]
    if job.num_nodes > 1:
        words += [
            fill(f"--{name.replace('_', '-')}={{{name}}}", filled)
            for name in ("node_rank", "master_addr", "master_port")
        ]
    # The program may be anything, and Python has options of its own.
    return [*words, "--no-python"]


def _quoted(text: str) -> str:
    """A text as a word of the shell, with its variables."""
    parts = _VARIABLE.split(text)
    # Every second part is a name.
    words = [
        _expansion(part) if place % 2 else shlex.quote(part)
        for place, part in enumerate(parts)
        if part
    ]
    return "".join(words) or "''"


def _expansion(name: str) -> str:
    """A variable of the shell; if it is not set, the script ends with its meaning."""
    means = TEMPLATE_NAMES.get(name, "the file of your framework with this layout")
    return f'"${{{name.upper()}:?{means.replace("`", "")}}}"'


def _remarks(options: CommandOptions, text: str) -> list[str]:
    remarks = []
    if names := dict.fromkeys(re.findall(r"\$\{([A-Z_]+):\?", text)):
        remarks.append(f"set before you run it: {', '.join(names)}")
    if secrets := [*options.env_from, *options.pass_env]:
        remarks.append(f"it takes from the environment: {', '.join(secrets)}")
    if options.files:
        remarks.append(f"it does not write the config files: {', '.join(options.files)}")
    told = ", ".join(_ONLY_IN_A_SWEEP)
    remarks.append(f"{told} are set under `sweep run` only")
    return remarks
