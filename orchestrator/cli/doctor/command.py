"""The command `sweep doctor`: checks this machine, or every node of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import Db, Json, Overrides
from orchestrator.cli.terminal.output import write_json, write_line
from orchestrator.core.errors import UsageInvalid

if TYPE_CHECKING:
    from orchestrator.core.machines.check import Check


def doctor(
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            metavar="ADDRESS",
            help="Also connect to this Ray cluster: auto or HOST:PORT.",
        ),
    ] = None,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="Check every node of the cluster instead, and how the nodes differ."
        ),
    ] = False,
    workload: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Check the program of this sweep file instead, by one short attempt here.",
        ),
    ] = None,
    overrides: Overrides = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Check this machine, a cluster, or your own program.

    Checks packages, GPUs, Ray, database, disk and ports, and changes nothing. With --workload it
    runs a few steps of the program, and goes through what it has to do, point by point. Ends with
    exit code 1 if something would keep a sweep from running.

    Examples:
      sweep doctor
      sweep doctor --ray-address auto --json
      sweep doctor --cluster --ray-address auto     GPUs, disk, clock and versions of every node
      sweep doctor --workload mine.yaml gpus=1      does the program keep its contract?
    """
    from orchestrator.cli.doctor.cluster import STYLES, check_cluster
    from orchestrator.cli.doctor.workload import check_workload
    from orchestrator.core.machines.check import Status

    if workload is not None:
        if cluster or ray_address is not None:
            raise UsageInvalid(
                "--workload checks on this machine: leave out --cluster, --ray-address"
            )
        check_workload(workload, overrides, as_json=as_json)
        return
    if overrides:
        raise UsageInvalid(f"{overrides[0]!r} changes a sweep file: add --workload FILE")
    if cluster:
        check_cluster(ray_address, db, as_json=as_json)
        return
    checks = []
    for check in _all_checks(db, ray_address):
        checks.append(check)
        if not as_json:
            write_line(
                f"{check.status:<4}  {check.name:<12} {check.found}", style=STYLES[check.status]
            )
            if check.advice:
                write_line(f"{'':<19}{check.advice}")
    num_failed = sum(check.status is Status.FAIL for check in checks)
    num_warnings = sum(check.status is Status.WARN for check in checks)
    if as_json:
        fields = {"ok": not num_failed, "checks": [asdict(check) for check in checks]}
        write_json("doctor", fields)
    else:
        summary = f"{len(checks)} checks: {num_warnings} with a warning, {num_failed} failed"
        write_line(summary, style="bold")
    if num_failed:
        raise typer.Exit(1)


def _all_checks(db: str | None, ray_address: str | None) -> Iterator[Check]:
    from orchestrator.cli.doctor import machine_checks, store_checks

    # Both take seconds to import: they do so at the same time.
    torch = machine_checks.start(machine_checks.TORCH_PROGRAM)
    ray = machine_checks.start(machine_checks.RAY_PROGRAM)
    checks: tuple[Callable[[], Check | list[Check]], ...] = (
        machine_checks.python,
        machine_checks.packages,
        lambda: machine_checks.torch(torch),
        machine_checks.gpus,
        lambda: machine_checks.ray(ray),
        lambda: [] if ray_address is None else machine_checks.cluster(ray_address),
        lambda: machine_checks.ray_access(ray_address),
        lambda: machine_checks.environment(ray_address),
        lambda: store_checks.database(db),
        lambda: store_checks.reader(db),
        store_checks.home,
        machine_checks.ports,
        machine_checks.proc,
        machine_checks.clean_up,
        store_checks.clock,
        machine_checks.open_files,
        machine_checks.shared_memory,
        machine_checks.compiler,
    )
    for check in checks:
        found = check()
        yield from found if isinstance(found, list) else [found]
