"""`sweep doctor --cluster`: checks every node of a cluster, and shows a row for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from orchestrator.cli.ray_start import start_ray_scheduler
from orchestrator.cli.store.defaults import writable_store
from orchestrator.cli.store.home import sweep_home
from orchestrator.cli.terminal.output import (
    Column,
    StyledText,
    TableRow,
    note,
    numbers,
    write_json,
    write_line,
    write_table,
)
from orchestrator.core.errors import SweepError, UsageInvalid
from orchestrator.core.machines.check import Check, Status
from orchestrator.core.machines.node_health import NodeFacts, judge_nodes, unfit
from orchestrator.report import quantities as show

if TYPE_CHECKING:
    from orchestrator.cluster.ray.scheduler import RayScheduler

POLL_SECONDS = 0.5
STYLES = {Status.OK: "", Status.WARN: "yellow", Status.FAIL: "red"}
_VERDICTS = {Status.OK: "fit", Status.WARN: "fit, with a warning", Status.FAIL: "not fit"}


def check_cluster(ray_address: str | None, db: str | None, *, as_json: bool) -> None:
    """Show every node, and keep the checks in the store if there is one.

    Ends with exit code 1 if a node is not fit.
    """
    from orchestrator.node.probe import versions_here

    scheduler = _join(ray_address)
    try:
        answers = _ask_nodes(scheduler)
    finally:
        scheduler.close()
    facts = {node: found for node, found in answers.items() if isinstance(found, NodeFacts)}
    checks = judge_nodes(list(facts.values()), own=versions_here())
    advice = "is the node up, and is its disk healthy?"
    for node, error in answers.items():
        if isinstance(error, str):
            failed = Check(name="answers", status=Status.FAIL, found=error, advice=advice)
            checks[node] = (failed,)
    _keep(db, facts, checks)
    all_fit = not any(map(unfit, checks.values()))
    if as_json:
        nodes = [_record(node, facts.get(node), checks[node]) for node in checks]
        write_json("doctor", {"ok": all_fit, "nodes": nodes})
    else:
        _print(facts, checks)
    if not all_fit:
        raise typer.Exit(1)


def _join(ray_address: str | None) -> RayScheduler:
    scheduler = start_ray_scheduler(ray_address, root=sweep_home())
    if not scheduler.slots.nodes:
        scheduler.close()
        raise UsageInvalid("the cluster has no node with GPUs or cores")
    return scheduler


def _ask_nodes(scheduler: RayScheduler) -> dict[str, NodeFacts | str]:
    """The facts of each node, sorted by name; an error text for a node that does not answer."""
    nodes = sorted(scheduler.slots.nodes)
    scheduler.begin_probes(nodes, reserve=False)
    answers: dict[str, NodeFacts | str] = {}
    while len(answers) < len(nodes):
        scheduler.poll(POLL_SECONDS)
        answers |= scheduler.probed()
    return {node: answers[node] for node in nodes}


def _keep(
    db: str | None, facts: Mapping[str, NodeFacts], checks: Mapping[str, Sequence[Check]]
) -> None:
    try:
        with writable_store(db) as store:
            store.record_node_checks(None, None, facts, checks)
    except UsageInvalid:
        # There is no store yet, and a check creates none.
        pass
    except SweepError as exc:
        note(f"the checks were not stored: {exc}")


def _record(node: str, facts: NodeFacts | None, checks: Sequence[Check]) -> dict[str, Any]:
    return {
        "node": node,
        "is_fit": unfit(checks) is None,
        "facts": asdict(facts) if facts is not None else None,
        "checks": [asdict(check) for check in checks],
    }


def _print(facts: Mapping[str, NodeFacts], checks: Mapping[str, Sequence[Check]]) -> None:
    columns = [Column("node"), Column("has"), *numbers("matmul", "disk", "clock")]
    columns += [Column("python"), Column("torch"), Column("driver"), Column()]
    write_table(columns, [_row(node, facts.get(node), some) for node, some in checks.items()])
    for node, some in checks.items():
        for check in some:
            if check.status is not Status.OK:
                text = f"{check.status:<4}  {node}, {check.name}: {check.found}"
                write_line(text, style=STYLES[check.status])
                write_line(f"      {check.advice}")
    num_unfit = sum(unfit(some) is not None for some in checks.values())
    nodes = show.counted(len(checks), "node")
    write_line(f"{nodes}; no trial is placed on {num_unfit} of them", style="bold")
    for node, found in facts.items():
        if found.unread:
            write_line(f"unknown of {node}: {'; '.join(found.unread)}", style="dim")


def _row(node: str, facts: NodeFacts | None, checks: Sequence[Check]) -> TableRow:
    worst = max((check.status for check in checks), key=list(_VERDICTS).index)
    verdict = StyledText(_VERDICTS[worst], STYLES[worst])
    if facts is None:
        return [node, *[show.UNKNOWN] * 7, verdict]
    rates = [gpu.matmul_flops for gpu in facts.gpus] if facts.gpus else [facts.cpu_matmul_flops]
    slowest = min((rate for rate in rates if rate is not None), default=None)
    offset = facts.clock_offset_seconds
    has = f"{facts.num_cores or '?'} cores"
    if facts.gpus:
        has = f"{len(facts.gpus)} x {facts.gpus[0].name or 'GPU'}"
    return [
        node,
        has,
        show.UNKNOWN if slowest is None else f"{slowest / 1e12:.3g} TFLOP/s",
        show.memory(facts.free_disk_bytes),
        show.UNKNOWN if offset is None else f"{offset:+.3f} s",
        facts.python or show.UNKNOWN,
        facts.packages.get("torch") or show.UNKNOWN,
        facts.driver or show.UNKNOWN,
        verdict,
    ]
