"""The commands about the nodes of a sweep: nodes, bench, unbench."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import Db, Json, SweepArgument, SweepOption
from orchestrator.cli.store.defaults import existing_store, select_sweep, writable_store
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
from orchestrator.core.errors import UsageInvalid
from orchestrator.report import quantities as show

if TYPE_CHECKING:
    from db.store_reads import StoreReads

NodeArgument = Annotated[
    str, typer.Argument(metavar="NODE", help="The node's name, as `sweep nodes` shows it.")
]
# The longest name of a host that the domain name system allows.
LONGEST_NAME = 253
# Relative: below it, nodes that cannot be told apart are not worth a remark.
PLAINLY_SLOWER = 0.05


def nodes(sweep: SweepArgument = None, db: Db = None, as_json: Json = False) -> None:
    """Show the nodes of a sweep.

    For each node: its measurements, how much slower it is than the others on the same layouts, its
    faults, and whether it is benched and why.

    Examples:
      sweep nodes
      sweep nodes 8b --json
    """
    with existing_store(db) as store:
        row = select_sweep(store, sweep)
        found = _records(store, row.id)
    if as_json:
        write_json("nodes", {"sweep": row.name, "nodes": found})
    elif not found:
        write_line(f"No trial of sweep {row.name} was placed on a node yet.")
    else:
        columns = [Column("node"), *numbers("measured", "slower by"), Column(style="dim")]
        columns += [*numbers("faults"), Column(wrap=True)]
        write_table(columns, [_row(one) for one in found])


def bench(
    node: NodeArgument,
    sweep: SweepOption = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also repeat what was measured on the node.")
    ] = False,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Place no further trial on a node.

    A running sweep obeys within 5 s. Trials that run there now may finish.

    Examples:
      sweep bench gpu-17
      sweep bench gpu-17 --again     also repeat what was measured there
    """
    from db.types import BenchReason

    _refuse_long(node)
    with writable_store(db) as store:
        row = select_sweep(store, sweep)
        if node not in _known_nodes(store, row.id):
            note(f"no trial of sweep {row.name} was placed on node {node} yet")
        is_new = store.bench(row.id, node, reason=BenchReason.ASKED, is_remeasured=again)
    if as_json:
        write_json("bench", {"sweep": row.name, "node": node, "benched": is_new})
    elif is_new:
        then = "; what it measured is measured again" if again else ""
        write_line(f"Node {node} is benched in sweep {row.name}{then}.")
    else:
        write_line(f"Node {node} was benched before: nothing was changed.")


def unbench(
    node: NodeArgument, sweep: SweepOption = None, db: Db = None, as_json: Json = False
) -> None:
    """Place trials on a node again.

    Examples:
      sweep unbench gpu-17
    """
    _refuse_long(node)
    with writable_store(db) as store:
        row = select_sweep(store, sweep)
        was_benched = store.unbench(row.id, node)
    if as_json:
        write_json("unbench", {"sweep": row.name, "node": node, "unbenched": was_benched})
    elif was_benched:
        write_line(f"Node {node} may be used in sweep {row.name} again.")
    else:
        write_line(f"Node {node} is not benched in sweep {row.name}.")


def _refuse_long(node: str) -> None:
    if len(node) > LONGEST_NAME:
        raise UsageInvalid(
            f"a node's name has at most {LONGEST_NAME} characters, and {node} has {len(node):,}"
        )


def _known_nodes(store: StoreReads, sweep_id: int) -> set[str]:
    """Return the nodes that the store knows of a sweep: by runs, checks, faults or benches."""
    runs = {node for run in store.node_runs(sweep_id) for node in run.nodes}
    benched = {bench.node for bench in store.benches(sweep_id)}
    return runs | benched | {*store.node_checks(sweep_id), *store.node_faults(sweep_id)}


def _records(store: StoreReads, sweep_id: int) -> list[dict[str, Any]]:
    from orchestrator.core.machines.node_score import score_nodes  # numpy

    scores = score_nodes(store.node_runs(sweep_id))
    checks, faults = store.node_checks(sweep_id), store.node_faults(sweep_id)
    benched = {bench.node: bench for bench in store.benches(sweep_id) if bench.until is None}
    records = []
    for node in sorted({*scores, *checks, *faults, *benched}):
        score, check, bench = scores.get(node), checks.get(node), benched.get(node)
        record = {
            "node": node,
            "num_measurements": score.num_runs if score is not None else 0,
            "slower": score.slower if score is not None else None,
            "standard_error": score.standard_error if score is not None else None,
            "is_slow": score.is_slow if score is not None else None,
            "twins": score.twins if score is not None else (),
            "num_faults": faults.get(node, 0),
            "is_fit": check.is_fit if check is not None else None,
            "failed": check.failed if check is not None else None,
            "looked_at": check.at if check is not None else None,
            "benched_since": bench.since if bench is not None else None,
            "bench_reason": bench.reason if bench is not None else None,
            "bench_evidence": bench.evidence if bench is not None else None,
        }
        records.append(record)
    return records


def _row(one: Mapping[str, Any]) -> TableRow:
    error = one["standard_error"]
    is_known = error is not None and error != float("inf")
    return [
        one["node"],
        f"{one['num_measurements']:,}",
        f"{one['slower']:+.1%}" if is_known else show.UNKNOWN,
        f"± {error:.1%}" if is_known else "",
        f"{one['num_faults']:,}",
        _state(one),
    ]


def _state(one: Mapping[str, Any]) -> StyledText:
    if one["bench_reason"] is not None:
        from orchestrator.core.machines.node_score import evidence_in_words  # numpy

        why = evidence_in_words(one["bench_evidence"] or {})
        return StyledText(f"benched, {one['bench_reason']}{f': {why}' if why else ''}", "red")
    if one["is_fit"] is False:
        return StyledText(f"not fit: {one['failed']}", "red")
    if one["twins"] and one["slower"] is not None and one["slower"] > PLAINLY_SLOWER:
        twins = ", ".join(one["twins"])
        text = f"always ran with {twins}: it cannot be told which of them is slow"
        return StyledText(text, "yellow")
    return StyledText("used")
