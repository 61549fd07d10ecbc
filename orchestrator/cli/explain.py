"""The command `explain`: why one layout is illegal, does not fit or is slow, and what would help.

Starts and writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import CellOption, Db, File, Json
from orchestrator.cli.sweep_file import Planning, load, planning, store_if_any
from orchestrator.cli.terminal.output import (
    Column,
    note,
    numbers,
    write_json,
    write_line,
    write_table,
)
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.peak_memory import needed_bytes
from orchestrator.report import explanation_text as say
from orchestrator.report import quantities as show_as

if TYPE_CHECKING:
    from db.read.rows import TrialRow
    from db.store_reads import StoreReads
    from orchestrator.core.problem.cell import Cell
    from orchestrator.core.problem.layout import Layout
    from orchestrator.core.search.explanation import Explanation, LayoutChange
    from orchestrator.core.sweepfile.spec import SweepSpec

# Layouts that a mistyped one is compared with.
MAX_KEYS = 4096
# Sweeps that are searched for the layout's trial.
MAX_SWEEPS = 32
BAR_CHARACTERS = 24  # for the whole of a sum


def explain(
    file: File,
    layout: Annotated[
        list[str],
        typer.Argument(
            metavar="LAYOUT...",
            help="A layout as tables print it. Or some of its fields, dp=8 mbs=2 recompute=full"
            " zero=1: then the layout predicted fastest with them. Keys of the sweep file may be"
            " added: gpus=8",
        ),
    ],
    cell: CellOption = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Explain one layout: is it legal, does it fit, how fast is it?

    Also shows which small change would help, and what the store knows of the layout.

    Examples:
      sweep explain sweeps/8b.yaml dp8_tp1_pp1_cp1_mbs2_ga64_full_z1_bf16
      sweep explain sweeps/8b.yaml mbs=8 recompute=none zero=1 gpus=8
      sweep explain sweeps/8b.yaml 'dp8 mbs2 ga64 full z1 bf16' --json
    """
    from orchestrator.core.search.explanation import explain as explain_layout
    from orchestrator.core.search.layout_wish import complete, is_field
    from orchestrator.core.sweepfile.spec import SweepSpec

    def is_override(word: str) -> bool:
        if "=" not in word or " " in word or is_field(word, ()):
            return False
        return word.partition("=")[0].partition(".")[0] in SweepSpec.model_fields

    spec = load(file, [word for word in layout if is_override(word)])
    words = [word for word in layout if not is_override(word)]
    with store_if_any(db) as store:
        known = planning(spec, store)
        wish = wish_of(known, words)
        selected = select_cell(spec, wish, cell)
        planned = known.plan(selected)
        meant = complete(wish, planned.candidates, selected)
        explanation = explain_layout(
            planned,
            meant,
            illegal=planned.space.reason(meant),
            calibration=known.calibration(selected, meant.options),
            hardware=known.knowledge.hardware,
            gpus_per_node=known.gpus_per_node,
        )
        found = _stored(store, spec, selected, meant) if store is not None else None
    trial, sweep = found or (None, None)
    if as_json:
        write_json("explain", _record(known, explanation, trial, sweep))
    else:
        _print(known, explanation, trial)


def wish_of(known: Planning, words: Sequence[str]) -> Mapping[str, Any]:
    """The fields of a layout that words name."""
    from orchestrator.core.search.layout_wish import parse_wish

    options = known.spec.axes.options
    try:
        return parse_wish(words, options=options)
    except UsageInvalid:
        # With the layouts of a cell, the message names what was meant.
        candidates = known.plan(known.spec.cells()[0]).candidates
        keys = [candidates.table.layout(int(row)).key for row in candidates.order[:MAX_KEYS]]
        return parse_wish(words, options=options, keys=keys)


def select_cell(spec: SweepSpec, wish: Mapping[str, Any], text: str | None) -> Cell:
    """The cell that the text names, else the first that the layout's sizes fit, else the first."""
    cells: Sequence[Cell] = spec.cells()
    if text is not None:
        named = [cell for cell in cells if cell.key == text]
        named = named or [cell for cell in cells if text in cell.key]
        if not named:
            names = ", ".join(cell.key for cell in cells[:12])
            raise UsageInvalid(f"--cell {text}: no cell's name contains it; there are: {names}")
        cells = named
    kinds = ("data", "tensor", "pipeline", "context")
    sizes = [wish.get(f"{kind}_parallel_size") for kind in kinds]
    batch = [sizes[0], wish.get("micro_batch_size"), wish.get("grad_accum_steps")]
    fitting = [
        cell
        for cell in cells
        if _multiply_out(sizes, cell.num_gpus) and _multiply_out(batch, cell.global_batch_size)
    ]
    selected = (fitting or cells)[0]
    if len(cells) > 1:
        others = ", ".join(cell.key for cell in cells if cell != selected)
        note(f"cell {selected.key}; --cell selects another: {others[:300]}")
    return selected


def _multiply_out(sizes: Sequence[int | None], product: int) -> bool:
    """True if the sizes can have this product; an unknown size may be anything."""
    known = [size for size in sizes if size is not None]
    found = math.prod(known)
    return found == product if len(known) == len(sizes) else product % found == 0


def _stored(
    store: StoreReads, spec: SweepSpec, cell: Cell, layout: Layout
) -> tuple[TrialRow, str] | None:
    """The layout's trial and its sweep: in this sweep, else in another that has the cell."""
    sweeps = sorted(store.sweeps(), key=lambda row: row.name != spec.name)
    for sweep in sweeps[:MAX_SWEEPS]:
        if sweep.conditions.get("workload") != spec.workload.name:
            continue
        for row in store.cells(sweep.id):
            for trial in store.trials(sweep.id, row.id) if row.cell == cell else ():
                if trial.layout == layout:
                    return trial, sweep.name
    return None


def _record(
    known: Planning, found: Explanation, trial: TrialRow | None, sweep: str | None
) -> dict[str, Any]:
    seconds = found.seconds_by_part
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
        "memory_bytes_band": say.memory_band(found),
        "memory_relative_sd": found.memory_relative_sd,
        "probability_of_fitting": found.probability_of_fitting,
        "memory_bytes_by_part": dict(found.memory_by_part),
        "to_fit": _change_record(found.to_fit) if found.to_fit is not None else None,
        "step_seconds": found.step_seconds,
        "step_seconds_band": say.step_band(found),
        "step_seconds_by_part": dict(seconds) if seconds is not None else None,
        "tokens_per_second_per_gpu": found.tokens_per_second_per_gpu,
        "mfu": found.mfu,
        "faster": [_change_record(change) for change in found.faster],
        "trial": None
        if trial is None
        else {
            "trial_id": trial.id,
            "sweep": sweep,
            "state": trial.state,
            "tokens_per_second_per_gpu": trial.tokens_per_second_per_gpu,
            "step_seconds_median": trial.step_seconds_median,
            "peak_memory_bytes": needed_bytes(trial),
            "condemned_by": trial.condemned_by,
            "failure": trial.failure_message,
        },
    }


def _change_record(change: LayoutChange) -> dict[str, Any]:
    differs = {name: [str(here), str(there)] for name, (here, there) in change.differs.items()}
    return {
        "layout": change.layout.key,
        "short": change.layout.short,
        "differs": differs,
        "step_seconds": change.step_seconds,
        "memory_bytes": change.memory_bytes,
        "fits": change.fits,
    }


def _print(known: Planning, found: Explanation, trial: TrialRow | None) -> None:
    write_line(f"{found.layout.key}", style="bold")
    write_line(f"  {found.layout.short}, in {found.cell.key}")
    write_line(f"  predictions: {known.based_on}")
    write_line("")
    if found.illegal is not None:
        write_line(f"Not legal: {found.illegal}.", style="red")
        nearest = "  The nearest legal layouts:"
        write_line(nearest if found.nearest else f"  {say.NOTHING_LEGAL}")
        for change in found.nearest:
            write_line(f"    {change.layout.short}  ({say.differences(change)})")
    else:
        _print_memory(found)
        write_line("")
        _print_step(known, found)
    write_line("")
    print_trial(found, trial)


def _print_memory(found: Explanation) -> None:
    write_line(say.memory_sentence(found), style="bold")
    _print_parts(found.memory_by_part, show_as.memory)
    if found.to_fit is not None:
        write_line(f"  {say.fitting_sentence(found, found.to_fit)}")
    elif not found.fits:
        write_line(f"  {say.NOTHING_FITS}")


def _print_step(known: Planning, found: Explanation) -> None:
    sentence = say.step_sentence(found, why_no_times=known.why_no_times)
    write_line(sentence, style="bold")
    if found.seconds_by_part is None:
        return
    _print_parts(found.seconds_by_part, show_as.step_time)
    if not found.faster:
        write_line(f"  {say.NOTHING_FASTER}")
        return
    write_line("  Predicted faster, with one change:")
    for change in found.faster:
        write_line(f"    {say.faster_sentence(found, change)}")


def _print_parts(parts: Mapping[str, float], text: Callable[[float], str]) -> None:
    """Print the parts that are not zero with their shares, the largest first."""
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
    write_table([Column(), *numbers("", ""), Column()], rows, header=False)


def print_trial(found: Explanation, trial: TrialRow | None) -> None:
    """Say what the store knows of the layout that was explained."""
    if trial is None:
        write_line("In the store: nothing, it was not tried.")
        return
    text = trial.failure_message or trial.why or ""
    if trial.state is TrialState.MEASURED:
        rate = show_as.tokens_rate(trial.tokens_per_second_per_gpu)
        peak = show_as.memory_of(needed_bytes(trial), trial.device_memory_bytes)
        seconds = trial.step_seconds_median
        step = show_as.step_time(seconds)
        if seconds is not None:
            step += say.against_band(found, seconds)
        text = f"{rate} tokens/s/GPU, step {step}, peak {peak}"
        if trial.implausible:
            text += f". These numbers cannot be true: {trial.implausible}"
    elif trial.state is TrialState.PRUNED:
        text = trial.why or ""
        if trial.condemned_by:
            text = (
                f"it needs at least as much memory as trial {trial.condemned_by}, which ran out of"
                " it"
            )
    write_line(f"In the store: trial {trial.id}, {trial.state.replace('_', ' ')}: {text}")
