"""Measures how well memory and step time are predicted on tables of measured runs; prints JSON.

python -m benchmarks.prediction --tables DIR [--table ID ...] [--ways WAY ...] [--out FILE.json]

DIR holds CSV files with the columns of core/pretend/run_table.py. The trainer of a row is taken
from the table's own words (fp32 accumulation, FSDP, version of the code), never from its name.
Each way of calibrating is scored on the same rows:

- `uncalibrated`: priors alone.
- `leave_one_table_out`, `leave_one_model_out`: constants fitted to all other tables (of other
  models) of the same hardware and trainer, if there is one. A table of the same model, GPUs,
  sequence length and batch under another id does not count.
- `after_5_trials`: fitted to 5 random rows of the table (seeds 0 to 4; the rest is scored), on
  top of `leave_one_table_out` if there is one, else of the priors (`after_5_trials_alone`: always
  of the priors).

Memory, over rows that ran and report a peak (of the stage that the source read): `ratio_p10`,
`ratio_median`, `ratio_p90` of predicted over measured; `within_15_percent`: share of rows with a
ratio of 0.85 to 1.15; separately for one pipeline stage (`pp1`) and several (`pp2+`).

Out of memory, over rows that ran or ran out. The score is the predicted peak of the fullest stage
over the device's memory. `auc`: the probability that a row that ran out scores above one that
ran; `precision` and `recall` of predicting out-of-memory for scores above 1;
`recall_at_95_precision`: the best recall of any threshold with a precision of at least 0.95;
`best_rejected`: the tables whose fastest row scores above 1; `best_rejected_at_95_precision`:
above that threshold.

Step time, for tables with at least 5 rows that ran, then the mean over tables. `log_error`: the
median of |log(predicted / measured)|; `bias`: the same with sign; `spearman`: the rank
correlation; `regret_1`, `_3`, `_5`: by which share of the best tokens/s/GPU the best of the 1, 3,
5 rows predicted fastest falls short, among rows that ran; `first_within_5_percent`: the number of
rows in that order until one is within 5 %.

Bands, over rows that ran: how many are `below`, `within` and `above` the band that `sweep plan`
shows for step time and peak; four of five should be within. `all_files`: over the rows of all
files together; for tables with out-of-memories also how many rows were `expected` to fit (the sum
of their probabilities), how many were likely to (`at_least`) or not unlikely (`at_most`), and how
many `ran`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import describe_machine, parser_of, write_result
from benchmarks.table_folder import add_table_arguments, read_tables
from orchestrator.core.physics.calibration import Calibration, Predicted
from orchestrator.core.physics.calibration_fit import calibrate
from orchestrator.core.physics.memory import Stage
from orchestrator.core.physics.observation import Observation
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.pretend.run_table import MeasuredRun, RunStatus
from orchestrator.core.problem.hardware import Hardware, from_label
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.search.expectation import LIKELY
from orchestrator.core.search.proposer import USABLE_SHARE

Floats = NDArray[np.float64]
# Trainers share the constants of time; each has its own constants of memory.
Calibrations = Mapping[Trainer, Calibration]

SEEDS = 5
TRIALS = 5
FEWEST_ROWS = 5  # step times of a smaller table are not ranked


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One cell of one table: its runs as arrays and as observations for a calibration."""

    table_id: str
    runs: tuple[MeasuredRun, ...]

    @cached_property
    def hardware(self) -> Hardware:
        return from_label(self.runs[0].hardware, memory_bytes=self.runs[0].memory_bytes)

    @cached_property
    def trainers(self) -> list[Trainer]:
        """The trainer of each run: a table may hold runs of two versions of a program."""
        return [run.trainer for run in self.runs]

    @cached_property
    def table(self) -> LayoutTable:
        return LayoutTable.of(run.layout for run in self.runs if run.layout is not None)

    @cached_property
    def seconds(self) -> Floats:
        return np.array(
            [
                run.step_seconds if run.status is RunStatus.OK and run.step_seconds else np.nan
                for run in self.runs
            ]
        )

    @cached_property
    def peaks(self) -> Floats:
        return np.array(
            [
                run.peak_memory_bytes
                if run.status is RunStatus.OK and run.peak_memory_bytes
                else np.nan
                for run in self.runs
            ]
        )

    @cached_property
    def ran(self) -> NDArray[np.bool_]:
        return np.array([run.status is RunStatus.OK for run in self.runs])

    @cached_property
    def ran_out(self) -> NDArray[np.bool_]:
        return np.array([run.status is RunStatus.OOM for run in self.runs])

    def memory_bytes(self, calibrations: Calibrations, stage: Stage = Stage.FULLEST) -> Floats:
        found = np.full(len(self.runs), np.nan)
        for trainer in set(self.trainers):
            rows = np.array([other == trainer for other in self.trainers])
            found[rows] = self._predict(calibrations[trainer], stage).memory_bytes[rows]
        return found

    def log_seconds(self, calibrations: Calibrations) -> Floats:
        return self._predict(calibrations[self.trainers[0]], Stage.FULLEST).log_step_seconds

    def _predict(self, calibration: Calibration, stage: Stage) -> Predicted:
        cell = self.runs[0].cell
        assert cell is not None
        return calibration.predict(
            self.table, cell, self.hardware, gpus_per_node=self.runs[0].gpus_per_node, stage=stage
        )

    def observations(self, rows: Iterable[int] | None = None) -> list[tuple[Trainer, Observation]]:
        """Observations from some rows (None: all), each with its trainer."""
        chosen = self.runs if rows is None else [self.runs[row] for row in rows]
        return [
            (run.trainer, found)
            for run in chosen
            if (found := observation(run, self.hardware)) is not None
        ]


def problem_key(run: MeasuredRun) -> tuple[object, ...]:
    """A key that is equal for the same problem, whatever its table or model is called."""
    return (
        run.model.digest if run.model is not None else run.model_name,
        run.num_gpus,
        run.sequence_length,
        run.global_batch_size,
    )


def stage_of(run: MeasuredRun) -> Stage:
    return (
        Stage.FIRST
        if "rank0" in run.peak_memory_kind or "rank 0" in run.peak_memory_kind
        else Stage.FULLEST
    )


def observation(run: MeasuredRun, hardware: Hardware) -> Observation | None:
    """The observation from a run; None for a crash or a row without a layout."""
    if run.cell is None or run.layout is None or run.status not in (RunStatus.OK, RunStatus.OOM):
        return None
    ok = run.status is RunStatus.OK
    return Observation(
        cell=run.cell,
        layout=run.layout,
        hardware=hardware,
        gpus_per_node=run.gpus_per_node,
        step_seconds=run.step_seconds if ok else None,
        peak_memory_bytes=run.peak_memory_bytes if ok else None,
        out_of_memory=not ok,
        stage=stage_of(run),
    )


def read_problems(folder: Path, table_ids: Sequence[str] | None) -> list[Problem]:
    """The cells whose model and layouts are known, of all tables in a folder.

    Rows that are not marked for replay are used only if the table has no others.
    """
    found = []
    for table_id, cells in read_tables(folder):
        if table_ids is None or table_id in table_ids:
            replayed = any(run.replay for cell in cells for run in cell)
            found += [
                problem
                for cell in cells
                if (problem := _problem(cell, replayed=replayed)) is not None
            ]
    return found


def _problem(cell: list[MeasuredRun], *, replayed: bool) -> Problem | None:
    runs = tuple(
        run
        for run in cell
        if run.cell is not None and run.layout is not None and run.replay == replayed
    )
    # Adapters train few weights, and are not covered by the formulas.
    full = tuple(run for run in runs if run.word("peft") in ("", "full", "full-ft"))
    return Problem(table_id=cell.table_id, runs=full) if full else None


Calibrator = Callable[[Problem], Calibrations | None]


def priors(trainers: Iterable[Trainer]) -> Calibrations:
    return {trainer: Calibration.prior(trainer, is_known=is_named(trainer)) for trainer in trainers}


def is_named(trainer: Trainer) -> bool:
    """True if the table names its trainer, and not only attributes that any trainer may have."""
    unnamed = replace(
        Trainer(),
        eager_attention=trainer.eager_attention,
        sequence_parallel=trainer.sequence_parallel,
        logit_bytes=trainer.logit_bytes,
    )
    return unnamed != trainer


def calibrated(rows: Sequence[tuple[Trainer, Observation]], begun: Calibrations) -> Calibrations:
    """Fit constants of time to all rows, and constants of memory to each trainer's own rows."""
    times = [
        replace(row, peak_memory_bytes=None, out_of_memory=False)
        for _, row in rows
        if not row.thrashes
    ]
    first = next(iter(begun.values()))
    timed = calibrate(times, first)
    found = {}
    for name, start in begun.items():
        own = [replace(row, step_seconds=None) for trainer, row in rows if trainer == name]
        memory = calibrate(own, start)
        found[name] = replace(
            memory,
            log_constants=timed.log_constants,
            step_covariance=timed.step_covariance,
            step_residual_sd=timed.step_residual_sd,
            cell_offsets=timed.cell_offsets,
            residuals=timed.residuals,
            errors=timed.errors,
        )
    return found


def relatives(problem: Problem, problems: Sequence[Problem], *, same_model: bool) -> list[Problem]:
    """Tables of the same hardware and trainer, without this one and other names for its cell."""
    return [
        other
        for other in problems
        if other.table_id != problem.table_id
        and problem_key(other.runs[0]) != problem_key(problem.runs[0])
        and other.hardware.name == problem.hardware.name
        and bool(set(other.trainers) & set(problem.trainers))
        and (same_model or other.runs[0].model != problem.runs[0].model)
    ]


class Fits:
    """Calibrations to groups of tables, each computed once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._problems = problems
        self._known: dict[tuple[str, ...], Calibrations] = {}

    def to_relatives(self, problem: Problem, *, same_model: bool) -> Calibrations | None:
        others = relatives(problem, self._problems, same_model=same_model)
        if not others:
            return None
        trainers = sorted(set(problem.trainers), key=str)
        key = (
            *map(str, trainers),
            *sorted(f"{other.table_id}/{other.runs[0].line}" for other in others),
        )
        if key not in self._known:
            self._known[key] = calibrated(
                [row for other in others for row in other.observations()], priors(trainers)
            )
        return self._known[key]


def score_memory(
    problems: Sequence[Problem], calibrations: Sequence[tuple[Calibrations, NDArray[np.bool_]]]
) -> dict[str, object]:
    """Score predicted memory. `calibrations` has each problem's calibration and rows to score."""
    ratios: dict[str, list[Floats]] = {"all": [], "pp1": [], "pp2+": []}
    scores, truths, best = [], [], {}
    for problem, (calibration, scored) in zip(problems, calibrations, strict=True):
        measured = problem.peaks
        known = np.isfinite(measured) & scored
        if known.any():
            ratio = problem.memory_bytes(calibration, stage_of(problem.runs[0])) / measured
            pipelined = problem.table.pipeline_parallel_size > 1
            for name, rows in (
                ("all", known),
                ("pp1", known & ~pipelined),
                ("pp2+", known & pipelined),
            ):
                ratios[name].append(ratio[rows])
        if problem.ran_out.any() or known.any():
            fullest = problem.memory_bytes(calibration) / problem.hardware.memory_bytes
            rows = (problem.ran | problem.ran_out) & scored
            scores.append(fullest[rows])
            truths.append(problem.ran_out[rows])
            if np.isfinite(problem.seconds).any():
                fastest = int(np.nanargmin(problem.seconds))
                best[f"{problem.table_id}/{problem.runs[0].num_gpus}"] = float(fullest[fastest])
    found: dict[str, object] = {
        name: _ratios(np.concatenate(values))
        for name, values in ratios.items()
        if sum(map(len, values))
    }
    if scores:
        found["out_of_memory"] = _classified(np.concatenate(scores), np.concatenate(truths), best)
    return found


def _ratios(ratio: Floats) -> dict[str, object]:
    p10, median, p90 = np.quantile(ratio, [0.1, 0.5, 0.9])
    return {
        "rows": len(ratio),
        "ratio_p10": round(float(p10), 3),
        "ratio_median": round(float(median), 3),
        "ratio_p90": round(float(p90), 3),
        "within_15_percent": round(float((np.abs(ratio - 1) <= 0.15).mean()), 3),
    }


def _classified(
    score: Floats, truth: NDArray[np.bool_], best: Mapping[str, float]
) -> dict[str, object]:
    if not truth.any() or truth.all():
        return {"rows": len(score), "ran_out": int(truth.sum())}
    order = np.argsort(-score, kind="stable")
    hits = np.cumsum(truth[order])
    precision, recall = hits / np.arange(1, len(order) + 1), hits / truth.sum()
    fine = np.flatnonzero(precision >= 0.95)
    threshold = float(score[order][fine[-1]]) if len(fine) else float("inf")
    above = score > 1
    ranks = np.argsort(np.argsort(score, kind="stable"), kind="stable") + 1.0
    pairs = truth.sum() * (~truth).sum()
    return {
        "rows": len(score),
        "ran_out": int(truth.sum()),
        "auc": round(float((ranks[truth].sum() - truth.sum() * (truth.sum() + 1) / 2) / pairs), 4),
        "precision": round(float(truth[above].mean()), 3) if above.any() else None,
        "recall": round(float(above[truth].mean()), 3),
        "recall_at_95_precision": round(float(recall[fine[-1]]), 3) if len(fine) else 0.0,
        "threshold_at_95_precision": round(threshold, 3),
        "best_rejected": sorted(name for name, share in best.items() if share > 1),
        "best_rejected_at_95_precision": sorted(
            name for name, share in best.items() if share >= threshold
        ),
    }


def score_times(
    problem: Problem, calibration: Calibrations, scored: NDArray[np.bool_]
) -> dict[str, float] | None:
    rows = np.flatnonzero(np.isfinite(problem.seconds) & scored)
    if len(rows) < FEWEST_ROWS:
        return None
    predicted, measured = problem.log_seconds(calibration)[rows], problem.seconds[rows]
    error = predicted - np.log(measured)
    order = np.argsort(predicted, kind="stable")
    speed = measured.min() / measured[order]  # 1: the best
    return {
        "rows": len(rows),
        "log_error": float(np.median(np.abs(error))),
        "bias": float(np.median(error)),
        "spearman": _spearman(predicted, measured),
        **{f"regret_{n}": float(1 - speed[:n].max()) for n in (1, 3, 5)},
        "first_within_5_percent": float(np.argmax(speed >= 0.95) + 1),
    }


def _spearman(a: Floats, b: Floats) -> float:
    first, second = (np.argsort(np.argsort(values)).astype(np.float64) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1]) if min(first.std(), second.std()) > 0 else 0.0


def mean_of(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    if not scores:
        return {"tables": 0}
    return {"tables": len(scores)} | {
        name: round(float(np.mean([score[name] for score in scores])), 4)
        for name in scores[0]
        if name != "rows"
    }


def score(problems: Sequence[Problem], calibrator: Calibrator) -> dict[str, object]:
    """Score one way of calibrating, over the tables that it can calibrate."""
    pairs = [(problem, found) for problem in problems if (found := calibrator(problem)) is not None]
    if not pairs:
        return {"tables": 0}
    everything = [
        (calibration, np.ones(len(problem.runs), dtype=np.bool_)) for problem, calibration in pairs
    ]
    bands = score_bands(pairs)
    times = {
        _name(problem): scored
        for problem, calibration in pairs
        if (scored := score_times(problem, calibration, np.ones(len(problem.runs), dtype=np.bool_)))
    }
    return {
        "bands": {name: found.as_json for name, found in bands.items()}
        | {"fits": score_fitting(pairs)},
        "memory": score_memory([problem for problem, _ in pairs], everything),
        "step_time": mean_of(list(times.values())),
        "step_time_by_table": {
            name: {key: round(value, 3) for key, value in found.items()}
            for name, found in times.items()
        },
    }


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
        timed = problem._predict(calibrations[problem.trainers[0]], Stage.FULLEST)
        times += Coverage.of(problem.seconds / timed.step_seconds, timed.step_band())
        for trainer in set(problem.trainers):
            rows = np.array([other == trainer for other in problem.trainers])
            filled = problem._predict(calibrations[trainer], stage_of(problem.runs[0]))
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
            predicted = problem._predict(calibrations[trainer], Stage.FULLEST)
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


def score_after_trials(problems: Sequence[Problem], start: Calibrator) -> dict[str, object]:
    """Fit to random trials of each table, and score its other rows; means over seeds."""
    chosen = [problem for problem in problems if len(problem.runs) >= 2 * TRIALS]
    memory, times = [], []
    for seed in range(SEEDS):
        calibrations = []
        for problem in chosen:
            rows = np.random.default_rng(seed).choice(len(problem.runs), TRIALS, replace=False)
            begun = start(problem) or priors(dict.fromkeys(problem.trainers))
            widened = {name: calibration.widened() for name, calibration in begun.items()}
            calibrations.append(
                (
                    calibrated(problem.observations(rows), widened),
                    ~np.isin(np.arange(len(problem.runs)), rows),
                )
            )
        if chosen:
            memory.append(score_memory(chosen, calibrations))
        times += [
            found
            for problem, (calibration, scored) in zip(chosen, calibrations, strict=True)
            if (found := score_times(problem, calibration, scored)) is not None
        ]
    return {"memory": _mean_memory(memory), "step_time": mean_of(times)}


def _mean_memory(seeds: Sequence[Mapping[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for part in dict.fromkeys(name for seed in seeds for name in seed):
        values = [seed[part] for seed in seeds if isinstance(seed.get(part), Mapping)]
        numbers = [
            {k: v for k, v in value.items() if isinstance(v, (int, float))}
            for value in values
            if isinstance(value, Mapping)
        ]
        found[part] = {
            k: round(float(np.mean([n[k] for n in numbers if k in n])), 4) for k in numbers[0]
        }
    return found


def _name(problem: Problem) -> str:
    run = problem.runs[0]
    return f"{problem.table_id}/{run.num_gpus}gpu_gb{run.global_batch_size}"


WAYS = (
    "uncalibrated",
    "leave_one_table_out",
    "leave_one_model_out",
    "after_5_trials",
    "after_5_trials_alone",
)


def measure(problems: Sequence[Problem], ways: Sequence[str] = WAYS) -> dict[str, object]:
    fits = Fits(problems)
    alone: Calibrator = lambda problem: priors(dict.fromkeys(problem.trainers))  # noqa: E731
    tables_out: Calibrator = lambda problem: fits.to_relatives(problem, same_model=True)  # noqa: E731
    models_out: Calibrator = lambda problem: fits.to_relatives(problem, same_model=False)  # noqa: E731
    scores: dict[str, Callable[[], dict[str, object]]] = {
        "uncalibrated": lambda: score(problems, alone),
        "leave_one_table_out": lambda: score(problems, tables_out),
        "leave_one_model_out": lambda: score(problems, models_out),
        "after_5_trials": lambda: score_after_trials(problems, tables_out),
        "after_5_trials_alone": lambda: score_after_trials(problems, lambda _: None),
    }
    return {way: scores[way]() for way in ways}


def main() -> None:
    parser = parser_of(__doc__)
    add_table_arguments(parser, names="these tables")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=WAYS,
        metavar="WAY",
        help=f"of calibrating: {', '.join(WAYS)}",
    )
    arguments = parser.parse_args()
    machine = describe_machine()
    problems = read_problems(arguments.tables, arguments.table)
    if not problems:
        parser.error(f"no table whose model and layouts are known in {arguments.tables}")
    by_source: dict[str, list[Problem]] = {}
    for problem in problems:
        by_source.setdefault(problem.table_id.split("_")[0], []).append(problem)
    result: dict[str, object] = {
        source: measure(found, arguments.ways) for source, found in by_source.items()
    }
    result["all_files"] = bands_of_all([one for one in result.values() if isinstance(one, Mapping)])
    print(json.dumps(result, indent=1))
    write_result(arguments.out, benchmark="prediction", machine=machine, result=result)


if __name__ == "__main__":
    main()
