"""The section `workload` of a sweep file: which program ranks run, with its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator

from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout, Options, Precision
from orchestrator.core.sweepfile.command_options import CommandOptions, Processes
from orchestrator.core.sweepfile.metrics_section import MetricsSection, PrintingNode
from orchestrator.core.sweepfile.spec_values import AlsoForm, key
from orchestrator.core.sweepfile.synthetic_options import SyntheticOptions
from orchestrator.core.sweepfile.workload_options import (
    LlamaOptions,
    ReplayOptions,
    WorkloadOptions,
)

_NAME = key("`llama`, `synthetic`, `command`, `replay`", "The program")
_OPTIONS = key("mapping", "Options of that program: [workloads.md](workloads.md)")


class _WorkloadSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LlamaWorkload(_WorkloadSection):
    """Ranks train a Llama in plain torch."""

    name: Annotated[Literal["llama"], _NAME] = "llama"
    options: Annotated[LlamaOptions, _OPTIONS] = LlamaOptions()


class SyntheticWorkload(_WorkloadSection):
    """Ranks train nothing: they follow a model of memory and time, and fail on request."""

    name: Annotated[Literal["synthetic"], _NAME]
    options: Annotated[SyntheticOptions, _OPTIONS] = SyntheticOptions()


class CommandWorkload(_WorkloadSection):
    """Ranks run any program."""

    name: Annotated[Literal["command"], _NAME]
    options: Annotated[CommandOptions, _OPTIONS]


class ReplayWorkload(_WorkloadSection):
    """Nothing runs: a trial returns the result that a table has for its layout."""

    name: Annotated[Literal["replay"], _NAME]
    options: Annotated[ReplayOptions, _OPTIONS]


Workload = LlamaWorkload | SyntheticWorkload | CommandWorkload | ReplayWorkload
WORKLOADS: Mapping[str, type[Workload]] = MappingProxyType(
    {
        "llama": LlamaWorkload,
        "synthetic": SyntheticWorkload,
        "command": CommandWorkload,
        "replay": ReplayWorkload,
    }
)


def _section(value: Any) -> Any:
    """Expand a name to its section. A section without a name is llama's."""
    if isinstance(value, str):
        return {"name": value, "options": {}}
    return {"name": "llama", "options": {}, **value} if isinstance(value, Mapping) else value


WorkloadChoice = Annotated[
    Workload,
    Discriminator("name"),
    BeforeValidator(_section),
    AlsoForm({"enum": list(WORKLOADS)}),
]


def workload_mistake(
    workload: Workload, *, precisions: Sequence[Precision], device: str
) -> str | None:
    """Return what the workload is asked for and can never do; None if there is nothing."""
    match workload:
        case SyntheticWorkload(options=options):
            able = DEVICES[options.device_name].peak_flops
            for precision in precisions:
                if precision not in able:
                    return (
                        f"precision {precision} is none that {options.device_name} has"
                        f" (workload.options.device_name); it has {', '.join(sorted(able))}"
                    )
        case LlamaWorkload(options=options) if (
            options.memory_limit_bytes is not None and device not in ("auto", "cpu")
        ):
            return (
                f"device {device} has its own limit; workload.options.memory_limit_bytes"
                " is for device cpu: leave it out"
            )
    return None


def is_one_process_per_node(workload: Workload) -> bool:
    """Return whether one process per node represents the node's ranks."""
    match workload.options:
        case SyntheticOptions(one_rank_per_node=is_one):
            return is_one
        case CommandOptions(processes=processes):
            return processes is Processes.PER_NODE
    return False


def steps_per_line(workload: Workload) -> int:
    """Return how many steps a line of the user's program covers."""
    metrics = workload.options.metrics if isinstance(workload.options, CommandOptions) else None
    return metrics.every if metrics is not None else 1


def reports_on_last_node(workload: Workload) -> bool:
    """Return whether the steps come from the gang's last node, and not from that of rank 0."""
    match workload.options:
        case CommandOptions(metrics=MetricsSection(node=node)):
            return node is PrintingNode.LAST
    return False


def compiles_layers(workload: Workload, varying: Options, *, on_gpu: bool) -> bool:
    """Return whether it is known that a layout with such options is compiled."""
    options = varied(workload.options, varying)
    return isinstance(options, LlamaOptions) and options.compiles(on_gpu=on_gpu)


def options_of(workload: Workload, layout: Layout) -> dict[str, Any]:
    """Return the options for a trial: the sweep's, replaced by the layout's."""
    return {**workload.options.as_written(), **varying_options(workload, layout)}


def varying_options(workload: Workload, layout: Layout) -> dict[str, Any]:
    """Return the options of a trial that replace those of the sweep.

    Options that vary reach a command through its templates instead.
    """
    return dict(layout.options) if workload.options.MAY_VARY is not None else {}


def varied(options: WorkloadOptions, varying: Options) -> WorkloadOptions:
    """Return the options with those that vary in place."""
    if not varying or options.MAY_VARY is None:
        return options
    return type(options).model_validate({**options.as_written(), **dict(varying)})
