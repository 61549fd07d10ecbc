"""The command `explain`: why a layout is not legal, does or does not fit, where its step goes, and what would help. Starts and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.output import (
    Column,
    DbOption,
    JsonOption,
    examples,
    note,
    write_json,
    write_line,
    write_table,
)
from orchestrator.cli.sweep_file import File, Planning, load, planning, store_if_any
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report import quantities as show_as

if TYPE_CHECKING:
    from db.read.rows import TrialRow
    from db.store import Store
    from orchestrator.core.problem.cell import Cell
    from orchestrator.core.problem.layout import Layout
    from orchestrator.core.search.explanation import Explanation, LayoutChange
    from orchestrator.core.sweepfile.spec import SweepSpec

MAX_KEYS = 4096  # among which what was meant is looked for
BAR_CHARACTERS = 24  # of all of a sum
SHORT = {
    "data_parallel_size": "dp",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "context_parallel_size": "cp",
    "micro_batch_size": "mbs",
    "grad_accum_steps": "ga",
    "zero_stage": "zero",
}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(
        epilog=examples(
            "sweep explain sweeps/8b.yaml dp8_tp1_pp1_cp1_mbs2_ga64_full_z1_bf16",
            "sweep explain sweeps/8b.yaml mbs=8 recompute=none zero=1 gpus=8",
            "sweep explain sweeps/8b.yaml 'dp8 mbs2 ga64 full z1 bf16' --json",
        )
    )(explain)


def explain(
    file: File,
    layout: Annotated[
        list[str],
        typer.Argument(
            metavar="LAYOUT...",
            help="A layout as tables print it, or some fields of it: dp=8 mbs=2 recompute=full zero=1; the best predicted one with these"
            " is taken. Keys of the sweep file may stand beside it: gpus=8",
            show_default=False,
        ),
    ],
    cell: Annotated[
        str | None,
        typer.Option(
            "--cell",
            metavar="TEXT",
            help="A part of the cell's name, where there are several.",
            show_default=False,
        ),
    ] = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say of one layout why it is legal, fits, and is as fast.

    And which small change would help, and what the store knows of it.
    """
    from orchestrator.core.search.layout_wish import is_field
    from orchestrator.core.sweepfile.spec import SweepSpec

    def is_override(word: str) -> bool:
        name = word.partition("=")[0].partition(".")[0]
        return (
            "=" in word
            and " " not in word
            and name in SweepSpec.model_fields
            and not is_field(word, ())
        )

    spec = load(file, [word for word in layout if is_override(word)])
    words = [word for word in layout if not is_override(word)]
    with store_if_any(db) as store:
        known = planning(spec, store)
        wish = _wish(known, words)
        chosen = _chosen_cell(spec, wish, cell)
        meant, explanation = _explained(known, chosen, wish)
        trial, sweep = _stored(store, spec, chosen, meant) if store is not None else (None, None)
    record = _record(known, explanation, trial, sweep)
    if as_json:
        write_json("explain", record)
    else:
        _print(known, explanation, trial)


def _wish(known: Planning, words: Sequence[str]) -> Mapping[str, Any]:
    from orchestrator.core.search.layout_wish import parse_wish

    options = known.spec.axes.options
    try:
        return parse_wish(words, options=options)
    except UsageInvalid:  # of a mistyped key, the layouts of a cell say what was meant
        candidates = known.plan(known.spec.cells()[0]).candidates
        keys = [candidates.table.layout(int(row)).key for row in candidates.order[:MAX_KEYS]]
        return parse_wish(words, options=options, keys=keys)


def _chosen_cell(spec: SweepSpec, wish: Mapping[str, Any], text: str | None) -> Cell:
    """The cell that the text names, else the first one that the layout's sizes multiply out to, else the first."""
    cells = spec.cells()
    if text is not None:
        named = tuple(cell for cell in cells if text in cell.key)
        if not named:
            raise UsageInvalid(
                f"--cell {text}: no cell's name contains it; there are: {', '.join(cell.key for cell in cells[:12])}"
            )
        cells = named
    sizes = [
        wish.get(f"{name}_parallel_size") for name in ("data", "tensor", "pipeline", "context")
    ]
    batch = [
        wish.get(name) for name in ("data_parallel_size", "micro_batch_size", "grad_accum_steps")
    ]
    fitting = [
        cell
        for cell in cells
        if _agree(sizes, cell.num_gpus) and _agree(batch, cell.global_batch_size)
    ]
    chosen = (fitting or cells)[0]
    if len(cells) > 1:
        others = ", ".join(cell.key for cell in cells if cell != chosen)
        note(f"cell {chosen.key}; --cell chooses another: {others[:300]}")
    return chosen


def _agree(sizes: Sequence[int | None], product: int) -> bool:
    known = [size for size in sizes if size is not None]
    found = 1
    for size in known:
        found *= size
    return found == product if len(known) == len(sizes) else product % found == 0


def _explained(known: Planning, cell: Cell, wish: Mapping[str, Any]) -> tuple[Layout, Explanation]:
    from orchestrator.core.search.explanation import explain as explained
    from orchestrator.core.search.layout_wish import complete

    planned = known.plan(cell)
    layout = complete(wish, planned.candidates, cell)
    calibration = known.calibration(cell, layout.options)
    return layout, explained(
        planned,
        layout,
        calibration=calibration,
        hardware=known.learned.hardware,
        gpus_per_node=known.gpus_per_node,
    )


def _stored(
    store: Store, spec: SweepSpec, cell: Cell, layout: Layout
) -> tuple[TrialRow | None, str | None]:
    """The trial of the layout in this sweep, else in another one that has the cell: where it was measured, if anywhere."""
    sweeps = sorted(store.sweeps(), key=lambda row: row.name != spec.name)
    for sweep in sweeps[:32]:
        if sweep.conditions.get("workload") != spec.workload.name:
            continue
        for row in store.cells(sweep.id):
            if row.cell == cell:
                trial = next(
                    (trial for trial in store.trials(sweep.id, row.id) if trial.layout == layout),
                    None,
                )
                if trial is not None:
                    return trial, sweep.name
    return None, None


def _record(
    known: Planning, found: Explanation, trial: TrialRow | None, sweep: str | None
) -> dict[str, Any]:
    return {
        "name": known.spec.name,
        "cell": found.cell.key,
        "layout": found.layout.key,
        "short": found.layout.short,
        "says": known.based_on,
        "is_legal": found.illegal is None,
        "illegal": found.illegal,
        "nearest": [_change_record(change) for change in found.nearest],
        "fits": found.fits if found.memory_limit_bytes is not None else None,
        "memory_bytes": found.memory_bytes,
        "memory_limit_bytes": found.memory_limit_bytes,
        "memory_relative_sd": found.memory_relative_sd,
        "probability_of_fitting": found.probability_of_fitting,
        "memory_bytes_by_part": dict(found.memory_by_part),
        "to_fit": _change_record(found.to_fit) if found.to_fit is not None else None,
        "step_seconds": found.step_seconds,
        "step_seconds_band": _step_band(found),
        "step_seconds_by_part": dict(found.seconds_by_part)
        if found.seconds_by_part is not None
        else None,
        "tokens_per_second_per_gpu": found.tokens_per_second_per_gpu,
        "faster": [_change_record(change) for change in found.faster],
        "trial": None
        if trial is None
        else {
            "trial_id": trial.id,
            "sweep": sweep,
            "state": trial.state,
            "tokens_per_second_per_gpu": trial.tokens_per_second_per_gpu,
            "step_seconds_median": trial.step_seconds_median,
            "peak_memory_bytes": _peak(trial),
            "condemned_by": trial.condemned_by,
            "failure": trial.failure_message,
        },
    }


def _change_record(change: LayoutChange) -> dict[str, Any]:
    return {
        "layout": change.layout.key,
        "short": change.layout.short,
        "differs": {
            name: [str(here), str(there)] for name, (here, there) in change.differs.items()
        },
        "step_seconds": change.step_seconds,
        "memory_bytes": change.memory_bytes,
        "fits": change.fits,
    }


def _print(known: Planning, found: Explanation, trial: TrialRow | None) -> None:
    write_line(f"{found.layout.key}", style="bold")
    write_line(f"  {found.layout.short}, in {found.cell.key}")
    write_line(f"  predictions: {known.based_on}")
    if found.illegal is not None:
        write_line("")
        write_line(f"Not legal: {found.illegal}.", style="red")
        write_line(
            "  The nearest legal layouts:"
            if found.nearest
            else "  No layout of this cell is legal."
        )
        for change in found.nearest:
            write_line(f"    {change.layout.short}  ({_differs(change)})")
        _print_trial(trial)
        return
    _print_memory(found)
    _print_step(known, found)
    _print_trial(trial)


def _print_memory(found: Explanation) -> None:
    limit, total = found.memory_limit_bytes, found.memory_bytes
    write_line("")
    if limit is None:
        write_line(
            f"Memory: {show_as.memory(total)} predicted; no limit is known (name a device: device=h100-sxm)",
            style="bold",
        )
    else:
        verdict = (
            f"fits with {show_as.memory(limit - total)} to spare"
            if found.fits
            else f"{show_as.memory(total - limit)} too much"
        )
        chance = (
            f" (chance to fit {found.probability_of_fitting:.0%})"
            if found.probability_of_fitting is not None
            else ""
        )
        write_line(
            f"Memory: {show_as.memory_of(total, limit)} predicted: {verdict}{chance}", style="bold"
        )
    _print_parts(found.memory_by_part, show_as.memory)
    if found.to_fit is not None:
        write_line(
            f"  To fit: {_differs(found.to_fit)}, {show_as.memory_of(found.to_fit.memory_bytes, limit)}{_speed(found, found.to_fit)}."
        )
    elif not found.fits:
        write_line("  No layout of this cell is predicted to fit.")


def _step_band(found: Explanation) -> tuple[float, float] | None:
    """Seconds between which four of five measurements should lie."""
    if found.step_band is None or found.step_seconds is None:
        return None
    low, high = found.step_band
    return found.step_seconds * low, found.step_seconds * high


def _print_step(known: Planning, found: Explanation) -> None:
    write_line("")
    if found.seconds_by_part is None or found.step_seconds is None:
        write_line(f"Step: no time is predicted: {known.why_no_times}", style="bold")
        return
    band = _step_band(found)
    sure = (
        f" ({show_as.step_time(band[0])} to {show_as.step_time(band[1])} in four of five cases)"
        if band is not None
        else ""
    )
    tokens = show_as.tokens_rate(found.tokens_per_second_per_gpu)
    write_line(
        f"Step: {show_as.step_time(found.step_seconds)}{sure} predicted, {tokens} tokens/s/GPU",
        style="bold",
    )
    _print_parts(found.seconds_by_part, show_as.step_time)
    if not found.faster:
        write_line("  No single change that fits is predicted to be faster.")
        return
    write_line("  Predicted faster, with one change:")
    for change in found.faster:
        write_line(
            f"    {_differs(change)}: {show_as.step_time(change.step_seconds)}{_speed(found, change)}"
        )


def _print_parts(parts: Mapping[str, float], text: Any) -> None:
    """Parts with their share, the largest first; those that are nothing left out."""
    total = sum(parts.values()) or 1.0
    rows = [
        [
            f"    {name.replace('_', ' ')}",
            text(size),
            f"{size / total:.1%}",
            "#" * round(BAR_CHARACTERS * size / total),
        ]
        for name, size in sorted(parts.items(), key=lambda item: -item[1])
        if size > 0
    ]
    write_table(
        [
            Column(title=""),
            Column(title="", right=True),
            Column(title="", right=True),
            Column(title=""),
        ],
        rows,
        header=False,
    )


def _print_trial(trial: TrialRow | None) -> None:
    write_line("")
    if trial is None:
        write_line("In the store: nothing, it was not tried.")
        return
    match trial.state:
        case TrialState.MEASURED:
            said = f"{show_as.tokens_rate(trial.tokens_per_second_per_gpu)} tokens/s/GPU, step {show_as.step_time(trial.step_seconds_median)},"
            said += f" peak {show_as.memory_of(_peak(trial), trial.device_memory_bytes)}"
        case TrialState.PRUNED:
            said = (
                f"it needs at least as much memory as trial {trial.condemned_by}, which ran out of it"
                if trial.condemned_by
                else trial.why or ""
            )
        case _:
            said = trial.failure_message or trial.why or ""
    write_line(f"In the store: trial {trial.id}, {trial.state.replace('_', ' ')}: {said}")


def _peak(trial: TrialRow) -> int | None:
    return (
        trial.peak_memory_reserved_bytes
        if trial.peak_memory_reserved_bytes is not None
        else trial.peak_memory_allocated_bytes
    )


def _differs(change: LayoutChange) -> str:
    """`mbs 8 -> 4, ga 4 -> 8`."""

    def text(value: object) -> str:
        return (
            " ".join(f"{name}={said}" for name, said in value) or "none"
            if isinstance(value, tuple)
            else str(value)
        )

    return ", ".join(
        f"{SHORT.get(name, name)} {text(here)} -> {text(there)}"
        for name, (here, there) in change.differs.items()
    )


def _speed(found: Explanation, change: LayoutChange) -> str:
    if found.step_seconds is None or change.step_seconds is None:
        return ""
    gain = found.step_seconds / change.step_seconds - 1
    return f", {gain:.1%} faster" if gain >= 0 else f", {-gain:.1%} slower"
