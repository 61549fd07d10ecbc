"""Every layout of one cell: what is predicted of it, what was measured, and how a search fares.

The predictions are made before calibration, and after: then the constants are fitted to every
second measured layout, and judged by the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.gpu.attempt import Attempt
from benchmarks.gpu.attempt_record import is_measured
from benchmarks.gpu.session import Session
from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.physics.calibration_fit import calibrate
from orchestrator.core.physics.observation import Observation
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware, from_driver_name, from_label
from orchestrator.core.search.outcome import Failed, Measured, OutOfMemory
from orchestrator.core.search.planner import Candidates, plan_cell, rank_space, trainer_of
from orchestrator.core.search.space import CellSpace
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.sweepfile.search_section import Search, Strategy
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import FailureKind

# A search has found the best layout when it has measured one this near.
NEAR = 0.01
SEEDS = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Truth:
    """A cell with its layouts as attempts, in the order of their measurement."""

    session: Session
    spec: SweepSpec
    cell: Cell
    hardware: Hardware
    space: CellSpace
    attempts: Sequence[Attempt]

    @classmethod
    def of(
        cls, session: Session, sizes: Mapping[str, Any], axes: Mapping[str, Any], **attempt: Any
    ) -> Truth:
        """The cell of `sizes` with all values of `axes`; the likely fastest layouts come first."""
        spec = SweepSpec.model_validate(
            {
                "name": session.name,
                "gpus": 1,
                "gpus_per_node": 1,
                "device": "cpu" if session.rehearse else "auto",
                "precision": session.precision,
                **sizes,
                "axes": dict(axes),
            }
        )
        (cell,) = spec.cells()
        hardware = hardware_of(session)
        plan = plan_cell(spec, cell, hardware=hardware, gpus_per_node=1, device=session.device)
        table = plan.candidates.table
        attempts = [
            Attempt(
                model=cell.model,
                sequence_length=cell.sequence_length,
                layout=table.layout(int(row)),
                options={},
                **attempt,
            )
            for row in plan.candidates.order
        ]
        return cls(
            session=session,
            spec=spec,
            cell=cell,
            hardware=hardware,
            space=plan.space,
            attempts=attempts,
        )

    def measure(self) -> None:
        for attempt in self.attempts:
            self.session.measure(attempt)

    def summary(self) -> dict[str, Any]:
        """Predicted and measured for each layout, and how far predictions are off."""
        before, after = self._candidates(None), self._candidates(self._fitted())
        rows = [self._row(attempt, before, after) for attempt in self._recorded()]
        fitted_to = {attempt.layout.key for attempt in self._fit()}
        judged = [row for row in rows if row["layout"] not in fitted_to]
        measured = [row for row in rows if row["tokens_per_second"] is not None]
        best = max(measured, key=lambda row: float(row["tokens_per_second"]), default=None)
        products = self.session.product_flops()
        return {
            "model": self.cell.model.name,
            "device": self.hardware.name,
            "num_layouts": len(self.attempts),
            "num_recorded": len(rows),
            "best": best,
            "product_flops": products,
            # FLOPs, recomputed ones included, over those of bare matrix products on this device.
            "best_over_products": best["flops"] / products
            if best is not None and best["flops"] is not None and products is not None
            else None,
            "before_calibration": errors(rows, "before"),
            "after_calibration": errors(judged, "after"),
            "rows": rows,
        }

    def searches(self) -> dict[str, Any] | None:
        """How many launches `auto` needs in this table; None: it is not complete, or no Optuna."""
        try:
            import optuna  # noqa: F401
        except ImportError:
            return None
        if len(self._recorded()) < len(self.attempts):
            return None
        launches = [self._launches(seed) for seed in range(SEEDS)]
        return {"within": NEAR, "launches": launches, "median": statistics.median(launches)}

    def _launches(self, seed: int) -> int:
        """Launches until a layout within NEAR of the best was measured."""
        # Its samplers import Optuna, which may be missing where GPUs are.
        from orchestrator.search.searcher import Searcher

        records = {attempt.layout: self._record(attempt) for attempt in self.attempts}
        best = max(r["tokens_per_second"] for r in records.values() if is_measured(r))
        searcher = Searcher(
            self._candidates(None),
            cell=self.cell,
            search=Search(strategy=Strategy.AUTO, seed=seed),
            objective=Objective.TOKENS_PER_SECOND_PER_GPU,
        )
        num = 0
        while (proposal := searcher.ask()) is not None:
            num += 1
            record = records[proposal.layout]
            if is_measured(record):
                if record["tokens_per_second"] >= (1 - NEAR) * best:
                    return num
                peak = record["told"]["peak_memory_allocated_bytes"]
                seconds = record["step_seconds_median"]
                outcome = Measured.of_step(seconds, peak_memory_bytes=peak)
                searcher.tell(proposal.layout, outcome)
            elif record["outcome"] == FailureKind.OOM_GPU:
                searcher.tell(proposal.layout, OutOfMemory())
            else:
                searcher.tell(proposal.layout, Failed())
        return num

    def _record(self, attempt: Attempt) -> dict[str, Any]:
        return self.session.records[attempt.key]

    def _recorded(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.key in self.session.records]

    def _fit(self) -> list[Attempt]:
        """The attempts whose results constants are fitted to."""
        return self._recorded()[::2]

    def _candidates(self, calibration: Calibration | None) -> Candidates:
        return rank_space(
            self.spec,
            self.space,
            hardware=self.hardware,
            gpus_per_node=1,
            device=self.session.device,
            calibration=calibration,
        )

    def _fitted(self) -> Calibration:
        # As in a sweep: of workload llama the formulas are known to count what ranks need.
        trainer = trainer_of(self.spec, device=self.session.device)
        prior = Calibration.prior(trainer, is_known=self.spec.knows_memory is not None)
        return calibrate(map(self._observation, self._fit()), prior, model=self.cell.model)

    def _observation(self, attempt: Attempt) -> Observation:
        record = self._record(attempt)
        return Observation(
            cell=self.cell,
            layout=attempt.layout,
            hardware=self.hardware,
            gpus_per_node=1,
            step_seconds=record.get("step_seconds_median"),
            peak_memory_bytes=record.get("told", {}).get("peak_memory_allocated_bytes"),
            out_of_memory=record["outcome"] == FailureKind.OOM_GPU,
            # As in a sweep: each layout with its own options.
            trainer=trainer_of(self.spec, attempt.layout.options, device=self.session.device),
        )

    def _row(self, attempt: Attempt, before: Candidates, after: Candidates) -> dict[str, Any]:
        record, told = self._record(attempt), self._record(attempt).get("told", {})
        row: dict[str, Any] = {
            "layout": attempt.layout.key,
            "outcome": record["outcome"],
            "tokens_per_second": record.get("tokens_per_second"),
            "mfu": record.get("mfu"),
            "hfu": record.get("hfu"),
            "flops": record["hfu"] * told["peak_flops"] if record.get("hfu") else None,
            "step_seconds": record.get("step_seconds_median"),
            "memory_bytes": told.get("peak_memory_allocated_bytes"),
            "device_used_bytes": told.get("device_used_bytes"),
            "limit_bytes": self.hardware.memory_bytes,
        }
        for name, candidates in (("before", before), ("after", after)):
            place = candidates.table.row_of[attempt.layout]
            row[f"step_seconds_{name}"] = float(candidates.step_seconds[place])
            row[f"memory_bytes_{name}"] = float(candidates.memory_bytes[place])
        return row


def errors(rows: Sequence[Mapping[str, Any]], when: str) -> dict[str, Any]:
    """How far the predictions of these rows are off, relative to what was measured."""
    oom = [row for row in rows if row["outcome"] == FailureKind.OOM_GPU]
    found: dict[str, Any] = {
        "num_rows": len(rows),
        "num_out_of_memory": len(oom),
        # Predicted to fit, and it ran out of memory.
        "false_fits": sum(row[f"memory_bytes_{when}"] <= row["limit_bytes"] for row in oom),
        "false_fits_below_92_percent": sum(
            row[f"memory_bytes_{when}"] <= 0.92 * row["limit_bytes"] for row in oom
        ),
        "false_refusals": sum(
            row[f"memory_bytes_{when}"] > row["limit_bytes"]
            for row in rows
            if row["tokens_per_second"] is not None
        ),
        "order_kept": order_kept(rows, when),
    }
    for predicted, measured in (
        ("step_seconds", "step_seconds"),
        ("memory_bytes", "memory_bytes"),
        ("memory_bytes", "device_used_bytes"),
    ):
        off = [abs(row[f"{predicted}_{when}"] / row[measured] - 1) for row in rows if row[measured]]
        found[f"{predicted}_against_{measured}"] = (
            {"median": float(np.median(off)), "p90": float(np.quantile(off, 0.9))} if off else None
        )
    return found


def order_kept(rows: Sequence[Mapping[str, Any]], when: str) -> float | None:
    """The share of neighbours in predicted speed that were measured in this order."""
    timed = sorted(
        (row for row in rows if row["step_seconds"] is not None),
        key=lambda row: float(row[f"step_seconds_{when}"]),
    )
    pairs = [a["step_seconds"] <= b["step_seconds"] for a, b in pairwise(timed)]
    return statistics.fmean(pairs) if pairs else None


def hardware_of(session: Session) -> Hardware:
    """The data sheet of the GPU; for others, and a rehearsal's CPU, a likely one with its memory.

    A result that is complete names its GPU, so it can be evaluated where there is none.
    """
    if session.rehearse:
        return from_label("rehearsal", memory_bytes=8e9)
    gpu = session.known_gpu()
    return from_driver_name(gpu.name) or from_label(gpu.name, memory_bytes=gpu.total_bytes)
