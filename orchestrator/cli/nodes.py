"""The commands about the nodes of a sweep: `nodes` shows how they do, `bench` and `unbench` say which of them are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.defaults import SweepArgument, chosen_sweep, existing_store
from orchestrator.cli.output import (
    Column,
    DbOption,
    JsonOption,
    StyledText,
    examples,
    write_json,
    write_line,
    write_table,
)
from orchestrator.report import quantities as show

if TYPE_CHECKING:
    from db.read.rows import BenchRow, NodeCheckRow
    from db.store import Store
    from orchestrator.core.machines.node_score import NodeScore

NodeArgument = Annotated[
    str, typer.Argument(metavar="NODE", help="The node's name, as `sweep nodes` shows it.")
]
SweepOption = Annotated[
    str | None, typer.Option("--sweep", help="The sweep. Default: the newest.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(epilog=examples("sweep nodes", "sweep nodes 8b --json"))(nodes)
    app.command(
        epilog=examples(
            "sweep bench gpu-17",
            "sweep bench gpu-17 --again     what it measured is measured again",
        )
    )(bench)
    app.command(epilog=examples("sweep unbench gpu-17"))(unbench)


def nodes(sweep: SweepArgument = None, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Show the nodes of a sweep.

    Trials, how much slower each is than the others with what the layouts explain taken out, faults, and which are benched and why.
    """
    with existing_store(db) as store:
        row = chosen_sweep(store, sweep)
        found = _records(store, row.id)
    if as_json:
        write_json("nodes", {"sweep": row.name, "nodes": found})
    elif not found:
        write_line(f"No trial of sweep {row.name} was placed on a node yet.")
    else:
        _print(found)


def bench(
    node: NodeArgument,
    sweep: SweepOption = None,
    again: Annotated[
        bool, typer.Option("--again", help="Have what was measured there measured again.")
    ] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Place no further trial on a node.

    A running sweep sees it within 5 s; what runs there now may finish.
    """
    from db.types import BenchReason

    with existing_store(db, to_read=False) as store:
        row = chosen_sweep(store, sweep)
        is_new = store.bench(row.id, node, reason=BenchReason.ASKED, is_remeasured=again)
    if as_json:
        write_json("bench", {"sweep": row.name, "node": node, "benched": is_new})
        return
    then = "; what it measured is measured again" if again else ""
    write_line(
        f"Node {node} is benched in sweep {row.name}{then}."
        if is_new
        else f"Node {node} was benched before: nothing was changed."
    )


def unbench(
    node: NodeArgument, sweep: SweepOption = None, db: DbOption = None, as_json: JsonOption = False
) -> None:
    """Let trials be placed on a node again."""
    with existing_store(db, to_read=False) as store:
        row = chosen_sweep(store, sweep)
        was = store.unbench(row.id, node)
    if as_json:
        write_json("unbench", {"sweep": row.name, "node": node, "unbenched": was})
        return
    write_line(
        f"Node {node} may be used in sweep {row.name} again."
        if was
        else f"Node {node} is not benched in sweep {row.name}."
    )


def _records(store: Store, sweep_id: int) -> list[dict[str, Any]]:
    from orchestrator.core.machines.node_score import score_nodes  # numpy

    scores = score_nodes(store.node_runs(sweep_id))
    checks, faults = store.node_checks(sweep_id), store.node_faults(sweep_id)
    benched = {bench.node: bench for bench in store.benches(sweep_id) if bench.until is None}
    names = sorted({*scores, *checks, *faults, *benched})
    return [
        _record(name, scores.get(name), faults.get(name, 0), checks.get(name), benched.get(name))
        for name in names
    ]


def _record(
    node: str,
    score: NodeScore | None,
    num_faults: int,
    check: NodeCheckRow | None,
    benched: BenchRow | None,
) -> dict[str, Any]:
    return {
        "node": node,
        "num_measurements": score.num_runs if score is not None else 0,
        "slower": score.slower if score is not None else None,
        "standard_error": score.standard_error if score is not None else None,
        "is_slow": score.is_slow if score is not None else None,
        "twins": score.twins if score is not None else (),
        "num_faults": num_faults,
        "is_fit": check.is_fit if check is not None else None,
        "failed": check.failed if check is not None else None,
        "looked_at": check.at if check is not None else None,
        "benched_since": benched.since if benched is not None else None,
        "bench_reason": benched.reason if benched is not None else None,
        "bench_evidence": benched.evidence if benched is not None else None,
    }


def _print(found: list[dict[str, Any]]) -> None:
    columns = [
        Column(title="node"),
        Column(title="measured", right=True),
        Column(title="slower by", right=True),
        Column(title="", style="dim"),
        Column(title="faults", right=True),
        Column(title="", wrap=True),
    ]
    write_table(columns, [_row(one) for one in found])


def _row(one: Mapping[str, Any]) -> list[str | StyledText]:
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
        return StyledText(
            text=f"benched, {one['bench_reason']}{f': {why}' if why else ''}", style="red"
        )
    if one["is_fit"] is False:
        return StyledText(text=f"not fit: {one['failed']}", style="red")
    if one["twins"] and one["slower"] is not None and one["slower"] > 0.05:
        return StyledText(
            text=f"always ran with {', '.join(one['twins'])}: nobody can tell which of them it is",
            style="yellow",
        )
    return StyledText(text="used")
