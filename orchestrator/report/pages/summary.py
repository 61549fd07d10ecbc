"""A report as Markdown, for a pull request: the best layouts, and the words of pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence

from orchestrator.report.pages.headline import CellHeadline, headlines
from orchestrator.report.pictures.all_pictures import pictures
from orchestrator.report.sweep_rows import SweepRows

# What Markdown or HTML within it would read as markup.
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~!])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]+")


def markdown(sweeps: Sequence[SweepRows]) -> str:
    """Return the best layouts of each cell as tables, and what the pictures say."""
    lines = [f"# {escaped(', '.join(sweep.name for sweep in sweeps))}", ""]
    for cell in headlines(sweeps):
        lines += _cell(cell)
    said = [one for one in pictures(sweeps) if one.figure is not None]
    if said:
        lines += ["## In pictures", ""]
        lines += [f"- **{one.title}**: {escaped(one.caption)}" for one in said]
    return "\n".join(lines)


def _cell(cell: CellHeadline) -> list[str]:
    lines = [f"## {escaped(cell.title)}", "", escaped(cell.verdict), ""]
    if cell.rows:
        aligned = ["---:"] * (len(cell.titles) - 1) + ["---"]
        lines += [f"| {' | '.join(cell.titles)} |", f"| {' | '.join(aligned)} |"]
        for row in cell.rows:
            texts = [str(row.trial_id), *map(escaped, row.texts)]
            lines.append(f"| {' | '.join(texts)} |")
        lines.append("")
    remarks = [*cell.remarks, *cell.limits]
    lines += [f"- {escaped(line)}" for line in remarks]
    if cell.command:
        lines += ["", f"    {plain_line(cell.command)}"]
    return [*lines, ""]


def plain_line(text: str) -> str:
    """The text on one line, without control characters."""
    return _CONTROL.sub(" ", text)


def escaped(text: str) -> str:
    """Escape a text, so that Markdown shows it as it is."""
    return _MARKUP.sub(r"\\\1", plain_line(text)).replace("\\<", "&lt;").replace("\\>", "&gt;")
