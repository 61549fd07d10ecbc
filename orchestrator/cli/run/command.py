"""The command `run`: what its options mean.

The functions import what they need, so that `sweep --help` loads none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.mirror.targets import mirror_secrets
from orchestrator.cli.options import (
    Db,
    File,
    Json,
    Overrides,
    Quiet,
    RayAddress,
    Takeover,
    complete_names,
)
from orchestrator.cli.run import checks as run_checks
from orchestrator.cli.run.sweep_run import RunOptions, run_spec
from orchestrator.cli.sweep_file import load
from orchestrator.cli.terminal.console_log import Redactor
from orchestrator.cli.terminal.output import note
from orchestrator.core.errors import UsageInvalid

if TYPE_CHECKING:
    from orchestrator.cluster.simulated import SimulatedScheduler
    from orchestrator.core.sweepfile.spec import SweepSpec


def run(
    context: typer.Context,
    file: File,
    overrides: Overrides = None,
    db: Db = None,
    ray_address: RayAddress = None,
    wait_for_nodes: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="How long to wait, for example 15min, for a cluster that is too small for the"
            " largest gang. Default: do not wait, end with an error.",
        ),
    ] = None,
    takeover: Takeover = False,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Pretend to run, on a simulated cluster and clock, as sweep NAME-simulated.",
        ),
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Nodes of the simulated cluster. Default: enough for the largest gang."
        ),
    ] = None,
    node_loss_hours: Annotated[
        float | None,
        typer.Option(min=0.01, help="Mean time until a simulated node is lost. Default: never."),
    ] = None,
    reuse: Annotated[
        str | None,
        typer.Option(
            "--reuse",
            metavar="SWEEP",
            help="Take over what this sweep measured, where conditions, code and cell are equal.",
            autocompletion=complete_names,
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with exit code 3 if trials failed.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure layouts, or continue to measure.

    Runs until every layout is known or the budget is spent. After an interruption, give the same
    command to continue.

    Examples:
      sweep run sweeps/quickstart.yaml
      sweep run sweeps/quickstart.yaml search.max_trials=10
      sweep run sweeps/8b.yaml --ray-address auto
      sweep run wider.yaml --reuse narrow
    """
    from orchestrator.cli.run.notifier import secrets_of  # http.client, ssl

    spec = load(file, overrides)
    redact = context.obj if isinstance(context.obj, Redactor) else Redactor([])
    secrets = run_checks.rank_secrets(spec) | secrets_of(spec) | mirror_secrets(spec.mirror)
    redact.add_values(secrets)
    simulator = None
    if simulate:
        spec, simulator = _simulation(spec, num_nodes=nodes, node_loss_hours=node_loss_hours)
    elif nodes is not None or node_loss_hours is not None:
        raise UsageInvalid("--nodes and --node-loss-hours need a simulated cluster: add --simulate")
    wait_seconds = None
    if wait_for_nodes is not None:
        wait_seconds = _wait_seconds(wait_for_nodes, spec, ray_address)
    options = RunOptions(
        db=db,
        takeover=takeover,
        quiet=quiet,
        as_json=as_json,
        strict=strict,
        ray_address=ray_address,
        wait_seconds=wait_seconds,
        simulator=simulator,
        reused=reuse,
        redact=redact,
    )
    run_spec(spec, options)


def _simulation(
    spec: SweepSpec, *, num_nodes: int | None, node_loss_hours: float | None
) -> tuple[SweepSpec, SimulatedScheduler]:
    """Return the sweep that is simulated instead of this one, and its cluster."""
    from orchestrator.cluster.simulated import SimulatedScheduler, simulated

    asked_device, spec = spec.device, simulated(spec)
    if spec.device != asked_device:
        note(
            f"A simulation needs a device with a data sheet: it uses {spec.device}, and its"
            f" speeds say nothing about the file's device ({asked_device})"
        )
    return spec, SimulatedScheduler(spec, num_nodes=num_nodes, node_loss_hours=node_loss_hours)


def _wait_seconds(text: str, spec: SweepSpec, ray_address: str | None) -> float:
    """The seconds of --wait-for-nodes. Raises UsageInvalid if waiting could only be in vain."""
    from pydantic import TypeAdapter, ValidationError

    from orchestrator.core.sweepfile.spec_values import Duration

    if ray_address is None:
        raise UsageInvalid("--wait-for-nodes is for a cluster: add --ray-address")
    if not isinstance(spec.gpus_per_node, int):
        raise UsageInvalid(
            "--wait-for-nodes needs gpus_per_node in the sweep file: the size of nodes that are not"
            " there yet is unknown"
        )
    try:
        return float(TypeAdapter(Duration).validate_python(text))
    except ValidationError as exc:
        message = exc.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageInvalid(f"--wait-for-nodes: {message}") from None
