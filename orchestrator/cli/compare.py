"""The command `compare`: the layouts that two sweeps measured, and which differ beyond noise."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import Db, FormatOption, Json, complete_names
from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.cli.terminal.output import (
    Column,
    Format,
    StyledText,
    TableRow,
    numbers,
    output_format,
    write_json,
    write_line,
    write_rows,
    write_table,
)
from orchestrator.core.errors import UsageInvalid
from orchestrator.report import quantities as show
from orchestrator.report.trial_line import short

if TYPE_CHECKING:
    from orchestrator.report.comparison import Comparison, LayoutDifference, Speed

_STYLES = {"faster": "green", "slower": "red", "noise": "dim"}
_NUMBERS = ("before", "after", "difference")
Before = Annotated[str, typer.Argument(metavar="A", help="A sweep.", autocompletion=complete_names)]
After = Annotated[
    str | None,
    typer.Argument(
        metavar="B",
        help="Another sweep. Without it, the last two fingerprints of A are compared.",
        autocompletion=complete_names,
    ),
]


def compare(
    before: Before,
    after: After = None,
    format: FormatOption = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Compare the layouts of two sweeps.

    Or of one sweep, before and after the last change of its code or software: with the last two
    fingerprints it was measured with. `sweep sql @changed before=DIGEST after=DIGEST` takes any
    other two; `sweep sql 'select distinct fingerprint_digest from attempt'` lists them. A
    difference whose 95 % intervals overlap is noise.

    Examples:
      sweep compare 8b-nccl2.28 8b-nccl2.29
      sweep compare 8b            what the last change of code or software did
      sweep compare 8b-old 8b-new --format md
    """
    from orchestrator.report.comparison import of_fingerprints, of_sweeps
    from orchestrator.report.sweep_rows import read_rows  # numpy, SQLAlchemy

    format = output_format(format, as_json=as_json)
    with existing_store(db) as store:
        first = read_rows(store, select_sweep(store, before))
        second = None if after is None else read_rows(store, select_sweep(store, after))
    found = of_fingerprints(first) if second is None else of_sweeps(first, second)
    if found is None:
        raise UsageInvalid(
            f"sweep {first.name} was measured with one fingerprint of code and software; name a"
            f" second sweep: sweep compare {first.name} OTHER"
        )
    match format:
        case Format.JSON:
            write_json("compare", _record(found))
        case Format.TABLE:
            _print(found)
        case Format.CSV | Format.MD:
            names = ["cell", *_NUMBERS, "change", "layout"]
            write_rows(format, names, ([*_texts(one), one.layout] for one in found.layouts))


def _record(found: Comparison) -> dict[str, object]:
    return {
        "before": found.before,
        "after": found.after,
        "changed": found.changed,
        "layouts": [
            {**asdict(one), "ratio": one.ratio, "change": one.change} for one in found.layouts
        ],
        "num_only_before": found.num_only_before,
        "num_only_after": found.num_only_after,
    }


def _texts(one: LayoutDifference) -> list[str]:
    before, after, difference = _speed(one.before), _speed(one.after), f"{one.ratio - 1:+.1%}"
    return [one.cell, before, after, difference, one.change.value]


def _speed(one: Speed) -> str:
    relative = (one.high - one.low) / 2 / one.value
    return show.with_confidence(show.tokens_rate(one.value), relative)


def _print(found: Comparison) -> None:
    from orchestrator.report.comparison import INTERVALS  # numpy

    for cell in dict.fromkeys(one.cell for one in found.layouts):
        write_line(f"{cell}, tokens/s/GPU", style="bold")
        rows: list[TableRow] = []
        for one in found.layouts:
            if one.cell == cell:
                _, *texts, change = _texts(one)
                rows.append([*texts, StyledText(change, _STYLES[change]), short(one.layout)])
        write_table([*numbers(*_NUMBERS), Column(), Column("layout", wrap=True)], rows)
    write_line(found.text())
    if found.layouts:
        write_line(INTERVALS, style="dim")
    if found.changed:
        write_line(f"changed: {found.changed}", style="dim")
