"""The calculators of a sweep's cells, calibrated by the store as `sweep plan` is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.cli.store.defaults import existing_store
from orchestrator.cli.sweep_file import Planning, planning, stored_spec
from orchestrator.core.errors import UsageInvalid
from orchestrator.report.pages.calculator_document import calculation, choice_rows

if TYPE_CHECKING:
    from orchestrator.core.problem.cell import Cell
    from orchestrator.core.search.calculator import Calculator

# A page that is opened later is calibrated by what was measured since.
FRESH_SECONDS = 10.0
# Kept at once: a cell may have a million layouts.
MOST_CELLS = 8


@dataclass(kw_only=True, eq=False)
class Calculators:
    """Reads the store when a page is opened, and answers for its layouts."""

    db: str | None
    sweep: str
    clock: Callable[[], float] = time.monotonic
    _known: Planning | None = None
    _read_at: float = 0.0
    _cells: dict[Cell, Calculator] = field(default_factory=dict)

    def page(self, key: str | None, given: Mapping[str, str]) -> dict[str, Any]:
        """Return what the page of a cell shows at first; without a key, of the first cell.

        Raises UsageInvalid if there is no such cell, or if a value is none.
        """
        if self._known is None or self.clock() - self._read_at > FRESH_SECONDS:
            self._known = self._read()
        calculator = self._calculator(self._known, key)
        return {
            "based_on": self._known.based_on,
            "cells": [cell.key for cell in self._known.spec.cells()],
            "cell": calculator.cell.key,
            "axes": choice_rows(calculator, calculator.layout(given.items())),
        }

    def result(self, key: str | None, given: Mapping[str, str]) -> dict[str, Any]:
        """Return the prediction of a layout, or the rule that it breaks. Raises as `page`."""
        if self._known is None:
            self._known = self._read()
        calculator = self._calculator(self._known, key)
        found = calculator.explain(calculator.layout(given.items()))
        return calculation(found, why_no_times=self._known.why_no_times)

    def _read(self) -> Planning:
        with existing_store(self.db) as store:
            row = store.sweep_named(self.sweep)
            found = planning(stored_spec(row), store)
        self._cells.clear()
        self._read_at = self.clock()
        return found

    def _calculator(self, known: Planning, key: str | None) -> Calculator:
        cells = {cell.key: cell for cell in known.spec.cells()}
        if key is not None and key not in cells:
            raise UsageInvalid(f"sweep {self.sweep} has no cell {key!r}")
        cell = cells[key] if key is not None else next(iter(cells.values()))
        if cell not in self._cells:
            while len(self._cells) >= MOST_CELLS:
                del self._cells[next(iter(self._cells))]
            self._cells[cell] = known.calculator(cell)
        return self._cells[cell]
