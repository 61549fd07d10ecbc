"""The contents of a sweep's live page, as plain values, and the difference of two readings.

Pure functions. A page that knows a version gets the lines that changed since, any other all lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from orchestrator.report import quantities as show
from orchestrator.report.pages.summary import plain_line
from orchestrator.report.top_head import head_lines
from orchestrator.report.top_screen import COLUMNS, SORTS, ScreenLine, TableName, Tone, table

if TYPE_CHECKING:
    from orchestrator.report.live_sweep import LiveRows
    from orchestrator.report.sweep_status import PhaseAndStep

# Lines of a table of the page. A filter finds the others.
MOST_LINES = 100
# Longer texts are cut: a failure may quote much output. The page of the trial has all of it.
MOST_CHARACTERS = 300


class PageSection(StrEnum):
    """The tables of the page, in their order."""

    CELLS = "cells"
    RUNNING = "running"
    NODES = "nodes"
    FAILURES = "failures"
    QUEUE = "queue"
    TRIALS = "trials"


TITLES: Mapping[PageSection, str] = {
    PageSection.CELLS: "Best so far",
    PageSection.RUNNING: "Running",
    PageSection.NODES: "Nodes",
    PageSection.FAILURES: "Failures",
    PageSection.QUEUE: "Queue",
    PageSection.TRIALS: "Trials",
}
NODE_COLUMNS = ("node", "trials", "gangs")
# The text in place of a table without lines.
EMPTY: Mapping[PageSection, str] = {
    PageSection.CELLS: "The sweep has no cells yet.",
    PageSection.RUNNING: "Nothing runs now.",
    PageSection.NODES: "No node has a gang now.",
    PageSection.FAILURES: "Nothing has failed.",
    PageSection.QUEUE: "No trial waits.",
    PageSection.TRIALS: "There is no trial yet.",
}


@dataclass(frozen=True, kw_only=True)
class ShownTable:
    """The lines of one table, and how many more there are."""

    lines: Sequence[ScreenLine]
    num_matching: int

    @property
    def remark(self) -> str:
        """The remark below the table."""
        hidden = self.num_matching - len(self.lines)
        if not hidden:
            return show.counted(self.num_matching, "line") if self.lines else ""
        return f"{len(self.lines):,} of {self.num_matching:,} lines"


@dataclass(frozen=True, kw_only=True)
class PageState:
    """The contents of the page at one time."""

    version: int
    head: Sequence[tuple[str, Tone]] = ()
    tables: Mapping[PageSection, ShownTable]
    # Why the store does not answer; the rest is what it said last.
    trouble: str | None = None

    def has_same_content(self, other: PageState) -> bool:
        """Return whether both states look the same on the page."""
        return (self.head, self.tables, self.trouble) == (other.head, other.tables, other.trouble)


def columns(section: PageSection) -> Sequence[str]:
    """The titles of a table."""
    return NODE_COLUMNS if section is PageSection.NODES else COLUMNS[TableName(section)]


def sorts(section: PageSection) -> Sequence[str]:
    """The orders that a table has, the first by default."""
    return ("node",) if section is PageSection.NODES else SORTS[TableName(section)]


def page_state(
    version: int,
    rows: LiveRows | None,
    *,
    now: datetime,
    progress: Mapping[int, PhaseAndStep],
    trouble: str | None = None,
) -> PageState:
    """Make the page of some rows; None: the store was never read."""
    if rows is None:
        nothing = {section: ShownTable(lines=(), num_matching=0) for section in PageSection}
        return PageState(version=version, tables=nothing, trouble=_cut(trouble))
    return PageState(
        version=version,
        head=[(plain_line(text), tone) for text, tone in head_lines(rows, now)],
        tables={
            section: shown_table(section, rows, now=now, progress=progress)
            for section in PageSection
        },
        trouble=_cut(trouble),
    )


def shown_table(
    section: PageSection,
    rows: LiveRows,
    *,
    now: datetime,
    progress: Mapping[int, PhaseAndStep],
    sort: str | None = None,
    matching: str = "",
) -> ShownTable:
    """One table, in an order of `sorts`, with the lines that contain a text."""
    if section is PageSection.NODES:
        lines = _node_lines(rows)
        return ShownTable(lines=lines[:MOST_LINES], num_matching=len(lines))
    found = table(
        TableName(section),
        rows,
        now=now,
        progress=progress,
        sort=sort,
        matching=matching,
        most=MOST_LINES,
    )
    return ShownTable(lines=[_plain(line) for line in found.lines], num_matching=found.num_matching)


def _node_lines(rows: LiveRows) -> list[ScreenLine]:
    """A line for each node that has part of a gang."""
    gangs: dict[str, list[tuple[int, str]]] = {}
    for one in rows.status.running:
        nodes = show.counted(len(one.nodes), "node")
        text = f"trial {one.trial_id}: {show.counted(one.num_gpus, 'GPU')} on {nodes}"
        for node in one.nodes:
            gangs.setdefault(node, []).append((one.trial_id, text))
    return [
        _plain(
            ScreenLine(
                key=f"node {node}",
                texts=(
                    node,
                    ", ".join(str(trial_id) for trial_id, _ in parts),
                    "; ".join(text for _, text in parts),
                ),
                tone=Tone.BUSY,
            )
        )
        for node, parts in sorted(gangs.items())
    ]


def _plain(line: ScreenLine) -> ScreenLine:
    """The line without control characters, which a browser may act upon, and with short texts."""
    return ScreenLine(
        key=plain_line(line.key),
        texts=tuple(plain_line(text)[:MOST_CHARACTERS] for text in line.texts),
        tone=line.tone,
        trial_id=line.trial_id,
    )


def _cut(text: str | None) -> str | None:
    return None if text is None else plain_line(text)[:MOST_CHARACTERS]


def whole(state: PageState) -> dict[str, Any]:
    """All of a state, for a page that knows no earlier one."""
    return {
        "version": state.version,
        "head": [[text, tone.value] for text, tone in state.head],
        "trouble": state.trouble,
        "tables": {section.value: whole_table(one) for section, one in state.tables.items()},
    }


def whole_table(one: ShownTable) -> dict[str, Any]:
    """All of a table: its lines by key, their order, and the words below it."""
    return {
        "order": [line.key for line in one.lines],
        "lines": {line.key: _values(line) for line in one.lines},
        "remark": one.remark,
    }


def changes(before: PageState, now: PageState) -> dict[str, Any]:
    """Return the difference from an earlier state, for a page that shows that one."""
    found: dict[str, Any] = {"version": now.version, "after": before.version}
    if now.head != before.head:
        found["head"] = [[text, tone.value] for text, tone in now.head]
    if now.trouble != before.trouble:
        found["trouble"] = now.trouble
    tables = {
        section.value: difference
        for section, one in now.tables.items()
        if (difference := _difference(before.tables[section], one))
    }
    return found | ({"tables": tables} if tables else {})


def _difference(before: ShownTable, now: ShownTable) -> dict[str, Any]:
    old = {line.key: line for line in before.lines}
    changed = {line.key: _values(line) for line in now.lines if old.get(line.key) != line}
    order = [line.key for line in now.lines]
    found: dict[str, Any] = {"lines": changed} if changed else {}
    if order != [line.key for line in before.lines]:
        found["order"] = order
    if now.remark != before.remark:
        found["remark"] = now.remark
    return found


def _values(line: ScreenLine) -> list[Any]:
    return [line.tone.value, line.trial_id, list(line.texts)]
