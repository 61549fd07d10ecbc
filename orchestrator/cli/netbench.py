"""The command that measures links: `sweep netbench` runs collectives over a machine or cluster, and keeps what they took in the store."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import home
from orchestrator.cli.output import (
    Column,
    DbOption,
    JsonOption,
    StyledText,
    examples,
    note,
    write_json,
    write_line,
    write_table,
)
from orchestrator.report import quantities as show

if TYPE_CHECKING:
    from orchestrator.cluster.contract import Scheduler
    from orchestrator.core.physics.links import LinkFit
    from orchestrator.sweep.netbench import SpanResult

EXIT_SOME_FAILED = 3


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(
        epilog=examples(
            "sweep netbench",
            "sweep netbench --ray-address auto --max-bytes 67108864",
            "sweep sql 'select * from link order by id'",
        )
    )(netbench)


def netbench(
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            metavar="ADDRESS",
            help="auto or HOST:PORT of a Ray cluster. Default: a local Ray.",
            envvar="RAY_ADDRESS",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="cuda, cpu, or auto: GPUs where there are any.")
    ] = "auto",
    max_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-bytes",
            min=1024,
            max=1 << 32,
            help="Largest message. Default: 256 MiB on GPUs, 16 MiB on cores.",
            show_default=False,
        ),
    ] = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast collectives are.

    All-reduce, all-gather, reduce-scatter and point to point, by message size, inside a node and between nodes. Predictions rest on it
    from then on.
    """
    from db.store import Store
    from orchestrator.core.physics.links import fit_links
    from orchestrator.sweep.netbench import measure_links

    _check_sizes(max_bytes)
    token = uuid.uuid4().hex[:12]
    with Store.open(db) as store:
        scheduler = _join(ray_address, device, token)
        results: list[SpanResult] = []
        try:
            for result in measure_links(scheduler, store, run_token=token, largest_bytes=max_bytes):
                results.append(result)
                _say(result)
        finally:
            scheduler.close()
        where = store.url
    fits = fit_links(sample for result in results for sample in result.samples)
    if as_json:
        write_json(
            "netbench",
            {
                "run_token": token,
                "fits": [_fit(one) for one in fits],
                "spans": [_span(one) for one in results],
            },
        )
    else:
        _print(fits, where)
    if any(result.failure is not None for result in results):
        raise typer.Exit(EXIT_SOME_FAILED)


def _check_sizes(max_bytes: int | None) -> None:
    """Raise UsageInvalid where the messages would be of too few sizes to tell a latency from a bandwidth."""
    from orchestrator.core.errors import UsageInvalid
    from orchestrator.core.physics.links import FEWEST_SIZES
    from orchestrator.sweep.netbench import SMALLEST_BYTES, sizes

    if max_bytes is not None and len(found := sizes(max_bytes)) < FEWEST_SIZES:
        raise UsageInvalid(
            f"--max-bytes {max_bytes} gives messages of {show.counted(len(found), 'size')} ({', '.join(map(str, found))} bytes);"
            f" latency and bandwidth are told from {FEWEST_SIZES} sizes or more: --max-bytes {SMALLEST_BYTES * 4 ** (FEWEST_SIZES - 1)}"
            " at least, or leave it out"
        )


def _join(ray_address: str | None, device: str, token: str) -> Scheduler:
    from orchestrator.core.errors import ResourcesInsufficient, UsageInvalid
    from orchestrator.core.trial.protocol import Device
    from orchestrator.sweep.netbench import shapes

    if device not in ("auto", *Device):
        raise UsageInvalid(f"--device {device} is not one of auto, {', '.join(Device)}")
    if ray_address is None:
        os.environ.setdefault(
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"
        )  # as `sweep run` does: a local Ray binds loopback
    from orchestrator.cluster.ray.scheduler import RayScheduler  # Ray takes seconds to import

    note(
        f"Joining the Ray cluster at {ray_address} ..."
        if ray_address is not None
        else "Starting a local Ray ..."
    )
    chosen = None if device == "auto" else Device(device)
    scheduler = RayScheduler(
        address=ray_address, device=chosen, root=home.run_root(f"netbench-{token}")
    )
    if not shapes(scheduler.slots.nodes):
        slots = scheduler.slots.by_size
        scheduler.close()
        raise ResourcesInsufficient(
            f"links need two ranks at least; here are {slots} slots per node"
        )
    return scheduler


def _say(result: SpanResult) -> None:
    who = f"{show.counted(result.span.num_ranks, 'rank')} on {show.counted(result.span.num_nodes, 'node')}"
    if result.failure is not None:
        note(f"{who}: {result.failure.kind}: {result.failure.message}")
    else:
        note(f"{who}: {show.counted(len(result.samples), 'measurement')}")


def _fit(one: LinkFit) -> dict[str, Any]:
    return {
        "collective": one.collective,
        "num_ranks": one.span.num_ranks,
        "num_nodes": one.span.num_nodes,
        "latency_seconds": one.latency_seconds,
        "bus_bytes_per_second": one.bus_bytes_per_second,
        "residual_sd": one.residual_sd,
        "num_sizes": one.num_sizes,
    }


def _span(result: SpanResult) -> dict[str, Any]:
    failure = (
        {"kind": result.failure.kind, "message": result.failure.message}
        if result.failure is not None
        else None
    )
    samples = [
        {
            "collective": sample.collective,
            "message_bytes": sample.message_bytes,
            "seconds": sample.seconds,
            "algorithm_bytes_per_second": sample.algorithm_bytes_per_second,
            "bus_bytes_per_second": sample.bus_bytes_per_second,
        }
        for sample in result.samples
    ]
    where = {
        "num_ranks": result.span.num_ranks,
        "num_nodes": result.span.num_nodes,
        "nodes": result.nodes,
    }
    return {**where, "failure": failure, "samples": samples}


def _print(fits: Sequence[LinkFit], where: str) -> None:
    titles = ("collective", "ranks", "nodes", "latency", "bus bandwidth", "off the line by")
    columns = [Column(title=title, right=title != "collective") for title in titles]
    rows: list[list[str | StyledText]] = [
        [
            one.collective.replace("_", " "),
            str(one.span.num_ranks),
            str(one.span.num_nodes),
            f"{one.latency_seconds * 1e6:,.1f} us",
            f"{one.bus_bytes_per_second / 1e9:,.2f} GB/s",
            show.percent(one.residual_sd),
        ]
        for one in fits
    ]
    write_table(columns, rows)
    write_line(
        f"All of it: select * from link, in {where}. `sweep calibration` shows what predictions make of it."
    )
