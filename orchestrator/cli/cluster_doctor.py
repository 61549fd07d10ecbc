"""What `sweep doctor --cluster` shows: every node of a cluster looked at, one row each, and what is to be mended or differs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from orchestrator.cli.defaults import existing_store
from orchestrator.cli.home import sweep_home
from orchestrator.cli.output import Column, StyledText, note, write_json, write_line, write_table
from orchestrator.core.errors import SweepError, UsageInvalid
from orchestrator.core.machines.check import Check, Status
from orchestrator.core.machines.node_health import NodeFacts, judge_nodes, unfit
from orchestrator.report import quantities as show

if TYPE_CHECKING:
    from orchestrator.cluster.ray.scheduler import RayScheduler

POLL_SECONDS = 0.5
STYLES = {Status.OK: "", Status.WARN: "yellow", Status.FAIL: "red"}
_ORDER = (Status.OK, Status.WARN, Status.FAIL)


def look_at_cluster(ray_address: str | None, db: str | None, *, as_json: bool) -> None:
    """Show every node; ends with exit code 1 where one is not fit. What is found is kept in the store, where there is one."""
    from orchestrator.node.probe import versions_here

    scheduler = _join(ray_address)
    try:
        said = _ask(scheduler)
    finally:
        scheduler.close()
    facts = {name: found for name, found in said.items() if isinstance(found, NodeFacts)}
    checks = judge_nodes(list(facts.values()), own=versions_here())
    for name, text in said.items():
        if isinstance(text, str):
            checks[name] = (
                Check(
                    name="answers",
                    status=Status.FAIL,
                    found=text,
                    advice="is the node up, and its disk well?",
                ),
            )
    _keep(db, facts, checks)
    if as_json:
        write_json(
            "doctor",
            {
                "ok": not any(map(unfit, checks.values())),
                "nodes": [_record(n, facts.get(n), checks[n]) for n in checks],
            },
        )
    else:
        _print(facts, checks)
    if any(map(unfit, checks.values())):
        raise typer.Exit(1)


def _join(ray_address: str | None) -> RayScheduler:
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
    scheduler = RayScheduler(address=ray_address, device=None, root=sweep_home())
    if not scheduler.slots.nodes:
        scheduler.close()
        raise UsageInvalid("the cluster has no node with GPUs or cores")
    return scheduler


def _ask(scheduler: RayScheduler) -> dict[str, NodeFacts | str]:
    """What each node says of itself, in the order of their names, or that it says nothing."""
    nodes = sorted(scheduler.slots.nodes)
    scheduler.begin_looks(nodes, reserve=False)
    said: dict[str, NodeFacts | str] = {}
    while len(said) < len(nodes):
        scheduler.poll(POLL_SECONDS)
        said |= scheduler.looks()
    return {node: said[node] for node in nodes}


def _keep(
    db: str | None, facts: Mapping[str, NodeFacts], checks: Mapping[str, Sequence[Check]]
) -> None:
    try:
        with existing_store(db, to_read=False) as store:
            store.record_node_checks(None, None, facts, checks)
    except UsageInvalid:
        pass  # there is no store yet, and looking makes none
    except SweepError as exc:
        note(f"not kept: {exc}")


def _record(node: str, facts: NodeFacts | None, checks: Sequence[Check]) -> dict[str, Any]:
    return {
        "node": node,
        "is_fit": unfit(checks) is None,
        "facts": asdict(facts) if facts is not None else None,
        "checks": [asdict(check) for check in checks],
    }


def _print(facts: Mapping[str, NodeFacts], checks: Mapping[str, Sequence[Check]]) -> None:
    titles = ("node", "has", "matmul", "disk", "clock", "python", "torch", "driver", "")
    columns = [Column(title=title, right=title in ("matmul", "disk", "clock")) for title in titles]
    write_table(columns, [_row(node, facts.get(node), some) for node, some in checks.items()])
    for node, some in checks.items():
        for check in some:
            if check.status is not Status.OK:
                write_line(
                    f"{check.status:<4}  {node}, {check.name}: {check.found}",
                    style=STYLES[check.status],
                )
                write_line(f"      {check.advice}")
    num_unfit = sum(unfit(some) is not None for some in checks.values())
    write_line(
        f"{show.counted(len(checks), 'node')}, {num_unfit} that no trial is placed on", style="bold"
    )
    for node, found in facts.items():
        if found.unread:
            write_line(f"not known of {node}: {'; '.join(found.unread)}", style="dim")


def _row(node: str, facts: NodeFacts | None, checks: Sequence[Check]) -> list[str | StyledText]:
    worst = max((check.status for check in checks), key=_ORDER.index)
    verdict = StyledText(
        text={Status.OK: "fit", Status.WARN: "fit; look at it", Status.FAIL: "not fit"}[worst],
        style=STYLES[worst],
    )
    if facts is None:
        return [node, *[show.UNKNOWN] * 7, verdict]
    rates = [gpu.matmul_flops for gpu in facts.gpus] if facts.gpus else [facts.cpu_matmul_flops]
    slowest = min((rate for rate in rates if rate is not None), default=None)
    return [
        node,
        f"{len(facts.gpus)} x {facts.gpus[0].name or 'GPU'}"
        if facts.gpus
        else f"{facts.num_cores or '?'} cores",
        show.UNKNOWN if slowest is None else f"{slowest / 1e12:.3g} TFLOP/s",
        show.memory(facts.free_disk_bytes),
        show.UNKNOWN
        if facts.clock_offset_seconds is None
        else f"{facts.clock_offset_seconds:+.3f} s",
        facts.python or show.UNKNOWN,
        facts.packages.get("torch") or show.UNKNOWN,
        facts.driver or show.UNKNOWN,
        verdict,
    ]
