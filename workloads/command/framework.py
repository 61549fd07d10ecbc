"""A trial's layout in the words of the sweep's framework, in a command's arguments and files."""

from __future__ import annotations

from orchestrator.core.frameworks.framework import Framework
from orchestrator.core.frameworks.framework_file import with_settings
from orchestrator.core.frameworks.job import Job
from orchestrator.core.frameworks.translation import TABLES, Translation, arguments, translate
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.template import FRAMEWORK_ARGUMENTS, FRAMEWORK_FILE
from orchestrator.core.trial.protocol import TrialRequest
from workloads.rank import ConfigRejected


def with_framework(
    options: CommandOptions, request: TrialRequest, *, gpus_per_node: int
) -> CommandOptions:
    """Return the options with the layout in them, and without names of a framework.

    Raises ConfigRejected if the framework cannot express the layout.
    """
    if options.framework is None:
        return options
    found = _translated(options.framework, request, gpus_per_node)
    table = TABLES[options.framework]
    if table.file is None:
        at = options.argv.index(f"{{{FRAMEWORK_ARGUMENTS}}}")
        words = [_literal(word) for word in arguments(found.settings, table.form)]
        argv = (*options.argv[:at], *words, *options.argv[at + 1 :])
        return options.model_copy(update={"argv": argv, "framework": None})
    path = f"{{run_dir}}/{table.file}"

    def placed(text: str) -> str:
        return text.replace(f"{{{FRAMEWORK_FILE}}}", path)

    changes = {
        "argv": tuple(map(placed, options.argv)),
        "env": {name: placed(text) for name, text in options.env.items()},
        "files": with_settings(options.files, found),
        "framework": None,
    }
    return options.model_copy(update=changes)


def _translated(framework: Framework, request: TrialRequest, gpus_per_node: int) -> Translation:
    layout = request.layout
    job = Job.of_layout(
        layout,
        request.model,
        sequence_length=request.sequence_length,
        gpus_per_node=gpus_per_node,
    )
    found = translate(job, framework)
    if found.impossible:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.impossible.items())
        raise ConfigRejected(f"{framework} cannot express {layout.short}: {reasons}")
    return found


def _literal(text: str) -> str:
    """A text that a template leaves as it is."""
    return text.replace("{", "{{").replace("}", "}}")
