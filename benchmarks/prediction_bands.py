"""Counts how many measured runs lie inside the bands that are predicted for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.prediction_problem import Calibrations, Problem, stage_of
from orchestrator.core.physics.memory import Stage
from orchestrator.core.physics.trainer import USABLE_SHARE
from orchestrator.core.problem.arrays import Floats
from orchestrator.core.search.expectation import LIKELY


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Rows below, within and above their bands; by design a tenth, four fifths and a tenth."""

    below: int = 0
    within: int = 0
    above: int = 0

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(
            below=self.below + other.below,
            within=self.within + other.within,
            above=self.above + other.above,
        )

    @property
    def rows(self) -> int:
        return self.below + self.within + self.above

    @property
    def as_json(self) -> dict[str, float]:
        share = {"share_within": round(self.within / self.rows, 3)} if self.rows else {}
        return {
            "rows": self.rows,
            "below": self.below,
            "within": self.within,
            "above": self.above,
        } | share

    @classmethod
    def of(cls, ratios: Floats, band: tuple[Floats, Floats]) -> Coverage:
        """Count ratios of measured over predicted values; nan means not measured."""
        low, high = band
        known = np.isfinite(ratios)
        below, above = int((ratios < low)[known].sum()), int((ratios > high)[known].sum())
        return cls(below=below, within=int(known.sum()) - below - above, above=above)


def score_bands(pairs: Sequence[tuple[Problem, Calibrations]]) -> dict[str, Coverage]:
    """Coverage of step times and of peaks (of the stage that the source read)."""
    times, peaks = Coverage(), Coverage()
    for problem, calibrations in pairs:
        timed = problem.predict(calibrations[problem.trainers[0]], Stage.FULLEST)
        times += Coverage.of(problem.seconds / timed.step_seconds, timed.step_band())
        for trainer in set(problem.trainers):
            rows = np.array([other == trainer for other in problem.trainers])
            filled = problem.predict(calibrations[trainer], stage_of(problem.runs[0]))
            peaks += Coverage.of(
                np.where(rows, problem.peaks, np.nan) / filled.memory_bytes, filled.memory_band()
            )
    return {"step_time": times, "memory": peaks}


def bands_of_all(results: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """The bands of several files together, for each way of calibrating."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for result in results:
        for way, scored in result.items():
            bands = scored.get("bands") if isinstance(scored, Mapping) else None
            for part, counts in bands.items() if isinstance(bands, Mapping) else ():
                total = found.setdefault(way, {}).setdefault(part, {})
                for name, value in counts.items():
                    total[name] = round(total.get(name, 0) + value, 1)
    for parts in found.values():
        for total in parts.values():
            if "share_within" in total:
                total["share_within"] = round(total["within"] / total["rows"], 3)
    return dict(found)


def score_fitting(pairs: Sequence[tuple[Problem, Calibrations]]) -> dict[str, float]:
    """Sum the probabilities to fit over tables with out-of-memories, and count rows that ran."""
    expected, at_least, at_most, ran, rows = 0.0, 0, 0, 0, 0
    for problem, calibrations in pairs:
        if not problem.ran_out.any():
            continue
        for trainer in set(problem.trainers):
            mine = (problem.ran | problem.ran_out) & np.array(
                [other == trainer for other in problem.trainers]
            )
            predicted = problem.predict(calibrations[trainer], Stage.FULLEST)
            chances = predicted.probability_of_fitting(
                problem.hardware.memory_bytes * USABLE_SHARE
            )[mine]
            expected += float(chances.sum())
            at_least += int((chances >= LIKELY).sum())
            at_most += int((chances > 1.0 - LIKELY).sum())
            ran += int(problem.ran[mine].sum())
            rows += int(mine.sum())
    return {
        "rows": rows,
        "ran": ran,
        "expected": round(expected, 1),
        "at_least": at_least,
        "at_most": at_most,
    }
