"""The command `netbench`: measures collectives on a machine or cluster, and stores the times."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import Db, Json, RayAddress
from orchestrator.cli.ray_start import start_ray_scheduler
from orchestrator.cli.run.ending import EXIT_SOME_FAILED
from orchestrator.cli.store import home
from orchestrator.cli.terminal.output import (
    Column,
    note,
    numbers,
    write_json,
    write_line,
    write_table,
)
from orchestrator.core.errors import ResourcesInsufficient, UsageInvalid
from orchestrator.report import quantities as show

if TYPE_CHECKING:
    from orchestrator.cluster.contract import Scheduler
    from orchestrator.core.physics.links import LinkFit
    from orchestrator.sweep.netbench import SpanResult


def netbench(
    ray_address: RayAddress = None,
    device: Annotated[
        str, typer.Option(help="cuda, cpu, or auto: GPUs if there are any.")
    ] = "auto",
    max_bytes: Annotated[
        int | None,
        typer.Option(
            min=1024,
            max=1 << 32,
            help="Largest message. Default: 256 MiB on GPUs, 16 MiB on cores.",
        ),
    ] = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Measure how fast collectives are.

    All-reduce, all-gather, reduce-scatter and point to point, by message size, within a node and
    between nodes. Later predictions use the results.

    Examples:
      sweep netbench
      sweep netbench --ray-address auto --max-bytes 67108864
      sweep sql 'select * from link order by id'
    """
    from db.store import Store
    from orchestrator.core.physics.links import fit_links
    from orchestrator.sweep.netbench import measure_links

    _check_sizes(max_bytes)
    token = uuid.uuid4().hex[:12]
    results: list[SpanResult] = []
    with Store.open(db) as store:
        scheduler = _join(ray_address, device, token)
        try:
            for result in measure_links(scheduler, store, run_token=token, largest_bytes=max_bytes):
                results.append(result)
                _report(result)
        finally:
            scheduler.close()
        where = store.url
    fits = fit_links(sample for result in results for sample in result.samples)
    if as_json:
        fields = {"run_token": token, "fits": [_fit_record(fit) for fit in fits]}
        write_json("netbench", fields | {"spans": [_span_record(result) for result in results]})
    else:
        _print(fits, where)
    if any(result.failure is not None for result in results):
        raise typer.Exit(EXIT_SOME_FAILED)


def _check_sizes(max_bytes: int | None) -> None:
    """Raise UsageInvalid if there are too few message sizes to tell latency from bandwidth."""
    from orchestrator.core.physics.links import FEWEST_SIZES
    from orchestrator.sweep.netbench import SMALLEST_BYTES, sizes

    if max_bytes is not None and len(found := sizes(max_bytes)) < FEWEST_SIZES:
        least = SMALLEST_BYTES * 4 ** (FEWEST_SIZES - 1)
        raise UsageInvalid(
            f"--max-bytes {max_bytes} gives messages of {show.counted(len(found), 'size')}"
            f" ({', '.join(map(str, found))} bytes); latency and bandwidth need"
            f" {FEWEST_SIZES} sizes or more: --max-bytes {least} at least, or leave it out"
        )


def _join(ray_address: str | None, device: str, token: str) -> Scheduler:
    from orchestrator.core.trial.protocol import Device
    from orchestrator.sweep.netbench import shapes

    if device not in ("auto", *Device):
        raise UsageInvalid(f"--device {device} is not one of auto, {', '.join(Device)}")
    root = home.run_root(f"netbench-{token}")
    scheduler = start_ray_scheduler(ray_address, root=root, device=device)
    slots = scheduler.slots
    if not shapes(slots.nodes):
        scheduler.close()
        raise ResourcesInsufficient(
            f"links need two ranks at least; here are {slots.by_size} slots per node"
        )
    return scheduler


def _report(result: SpanResult) -> None:
    ranks, nodes = result.span.num_ranks, result.span.num_nodes
    text = show.counted(len(result.samples), "measurement")
    if result.failure is not None:
        text = f"{result.failure.kind}: {result.failure.message}"
    note(f"{show.counted(ranks, 'rank')} on {show.counted(nodes, 'node')}: {text}")


def _fit_record(fit: LinkFit) -> dict[str, Any]:
    return {
        "collective": fit.collective,
        "num_ranks": fit.span.num_ranks,
        "num_nodes": fit.span.num_nodes,
        "latency_seconds": fit.latency_seconds,
        "bus_bytes_per_second": fit.bus_bytes_per_second,
        "residual_sd": fit.residual_sd,
        "num_sizes": fit.num_sizes,
    }


def _span_record(result: SpanResult) -> dict[str, Any]:
    failure = result.failure
    return {
        "num_ranks": result.span.num_ranks,
        "num_nodes": result.span.num_nodes,
        "nodes": result.nodes,
        "failure": failure and {"kind": failure.kind, "message": failure.message},
        "samples": [
            {
                "collective": sample.collective,
                "message_bytes": sample.message_bytes,
                "seconds": sample.seconds,
                "algorithm_bytes_per_second": sample.algorithm_bytes_per_second,
                "bus_bytes_per_second": sample.bus_bytes_per_second,
            }
            for sample in result.samples
        ],
    }


def _print(fits: Sequence[LinkFit], where: str) -> None:
    titles = ("ranks", "nodes", "latency", "bus bandwidth", "misfit")
    rows = [
        [
            fit.collective.replace("_", " "),
            str(fit.span.num_ranks),
            str(fit.span.num_nodes),
            f"{fit.latency_seconds * 1e6:,.1f} us",
            f"{fit.bus_bytes_per_second / 1e9:,.2f} GB/s",
            show.percent(fit.residual_sd),
        ]
        for fit in fits
    ]
    write_table([Column("collective"), *numbers(*titles)], rows)
    write_line(
        f"All samples: select * from link, in {where}. `sweep calibration` shows what predictions"
        " make of them."
    )
