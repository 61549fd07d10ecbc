"""The calculators of a sweep's cells, calibrated by the store as `sweep plan` is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.cli.defaults import existing_store
from orchestrator.cli.sweep_file import Planning, planning
from orchestrator.core.errors import UsageInvalid

if TYPE_CHECKING:
    from orchestrator.core.problem.cell import Cell
    from orchestrator.core.search.calculator import Calculator
    from orchestrator.core.search.explanation import Explanation
    from orchestrator.core.sweepfile.spec import SweepSpec

# A page that is opened later is calibrated by what was measured since.
FRESH_SECONDS = 10.0
MOST_CELLS = 8  # that are kept at once: a cell may have a million layouts


@dataclass(frozen=True, kw_only=True)
class ChosenCell:
    """One cell of the sweep with its calculator, and the names of all cells."""

    known: Planning
    calculator: Calculator
    keys: tuple[str, ...]


@dataclass(kw_only=True, eq=False)
class Calculators:
    """Reads the store when a page is opened, and answers for its layouts. For any thread."""

    db: str | None
    sweep: str
    clock: Callable[[], float] = time.monotonic
    _known: Planning | None = None
    _read_at: float = 0.0
    _cells: dict[Cell, Calculator] = field(default_factory=dict)
    # Fits and tables are made once, by whoever asks first.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def page(
        self, key: str | None, given: dict[str, str]
    ) -> tuple[ChosenCell, list[dict[str, Any]]]:
        """Return a cell, the first without a key, and the controls of its page.

        Raises UsageInvalid if there is no such cell, or if a value is none.
        """
        from orchestrator.report.pages.calculator_document import choice_rows

        with self._lock:
            if self._known is None or self.clock() - self._read_at > FRESH_SECONDS:
                self._read()
            found = self._cell(key)
            layout = found.calculator.layout(given.items())
            return found, choice_rows(found.calculator, layout)

    def explain(self, key: str | None, given: dict[str, str]) -> tuple[Planning, Explanation]:
        """Return the prediction of a layout, or the rule that it breaks. Raises as `page`."""
        with self._lock:
            if self._known is None:
                self._read()
            found = self._cell(key)
            layout = found.calculator.layout(given.items())
            return found.known, found.calculator.explain(layout)

    def _read(self) -> None:
        with existing_store(self.db) as store:
            row = store.sweep_named(self.sweep)
            self._known = planning(_spec(row.spec_json, self.sweep), store)
        self._cells.clear()
        self._read_at = self.clock()

    def _cell(self, key: str | None) -> ChosenCell:
        assert self._known is not None
        cells = {cell.key: cell for cell in self._known.spec.cells()}
        if key is not None and key not in cells:
            raise UsageInvalid(f"sweep {self.sweep} has no cell {key!r}")
        cell = cells[key] if key is not None else next(iter(cells.values()))
        if cell not in self._cells:
            while len(self._cells) >= MOST_CELLS:
                del self._cells[next(iter(self._cells))]
            self._cells[cell] = self._known.calculator(cell)
        return ChosenCell(known=self._known, calculator=self._cells[cell], keys=tuple(cells))


def _spec(text: str, name: str) -> SweepSpec:
    """The sweep's file under the name that the sweep has now."""
    from pydantic import ValidationError

    from orchestrator.core.sweepfile.spec import SweepSpec

    try:
        return SweepSpec.model_validate_json(text).model_copy(update={"name": name})
    except ValidationError:
        raise UsageInvalid(
            f"the file of sweep {name} is of another version of this program: run the sweep again"
        ) from None
