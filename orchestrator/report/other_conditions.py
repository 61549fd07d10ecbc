"""Layouts measured with other code, software or devices than now: they are shown apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.report import quantities as show
from orchestrator.report.trial_line import layout_text

if TYPE_CHECKING:
    from db.read.rows import CellRow, TrialRow
    from orchestrator.core.trial.fingerprint import Fingerprint

# Per cell: every commit of the measured code is a fingerprint.
MAX_OTHERS_SHOWN = 5
NOT_COMPARABLE = (
    "Measured under other conditions (code, software or device), not comparable with the above"
)


@dataclass(frozen=True, kw_only=True)
class OtherConditions:
    """The fastest layout of each cell and fingerprint that is not current."""

    trials: Sequence[TrialRow]
    # By trial id: what has changed from its fingerprint to the current one.
    changed: Mapping[int, str]

    def of_cell(self, cell_id: int) -> list[TrialRow]:
        """Those of one cell, the fastest first."""
        return [trial for trial in self.trials if trial.cell_id == cell_id]

    def lines(self, cell_id: int) -> list[str]:
        """A line for each of a cell, as the head of a report has them."""
        of_cell = self.of_cell(cell_id)
        lines = [self._line(trial) for trial in of_cell[:MAX_OTHERS_SHOWN]]
        if len(of_cell) > len(lines):
            lines.append(f"Under other conditions: {len(of_cell) - len(lines)} more layouts")
        return lines

    def _line(self, trial: TrialRow) -> str:
        changed = self.changed[trial.id]
        return (
            f"{NOT_COMPARABLE}: trial {trial.id},"
            f" {show.tokens_rate(trial.tokens_per_second_per_gpu)} tokens/s/GPU,"
            f" {layout_text(trial)}, fingerprint {show.short_digest(trial.fingerprint_digest)}"
            + (f"; changed since: {changed}" if changed else "")
        )


def fastest_of_others(trials: Iterable[TrialRow]) -> list[TrialRow]:
    """Return the fastest of each cell and fingerprint that is not current, as v_best has them."""
    found: dict[tuple[int, str], TrialRow] = {}
    for trial in trials:
        if not trial.is_comparable or trial.is_current_fingerprint is not False:
            continue
        key = (trial.cell_id, trial.fingerprint_digest or "")
        if key not in found or _order(trial) < _order(found[key]):
            found[key] = trial
    return sorted(found.values(), key=lambda one: (one.cell_id, *_order(one)))


def _order(trial: TrialRow) -> tuple[float, int]:
    return -(trial.tokens_per_second_per_gpu or 0.0), trial.id


def with_changes(
    trials: Sequence[TrialRow], cells: Iterable[CellRow], fingerprints: Iterable[Fingerprint]
) -> OtherConditions:
    """Add to such trials what has changed since."""
    from orchestrator.core.trial.fingerprint import changes  # pydantic, 0.05 s

    known = {one.digest: one for one in fingerprints} if trials else {}
    current = {cell.id: cell.fingerprint_digest for cell in cells}
    changed = {}
    for trial in trials:
        before = known.get(trial.fingerprint_digest or "")
        now = known.get(current[trial.cell_id] or "")
        changed[trial.id] = ""
        if before is not None and now is not None:
            changed[trial.id] = changes(before, now)
    return OtherConditions(trials=trials, changed=changed)
