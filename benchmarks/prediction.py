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
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.machine import describe_machine, parser_of, write_result
from benchmarks.prediction_bands import bands_of_all, score_bands, score_fitting
from benchmarks.prediction_problem import (
    Calibrations,
    Problem,
    problem_key,
    read_problems,
    stage_of,
)
from benchmarks.table_folder import add_table_arguments
from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.physics.calibration_fit import calibrate
from orchestrator.core.physics.observation import Observation
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.arrays import Floats, Mask
from orchestrator.core.problem.model_shape import ModelShape

SEEDS = 5
TRIALS = 5
# Step times of a smaller table are not ranked.
FEWEST_ROWS = 5


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


def calibrated(
    rows: Sequence[tuple[Trainer, Observation]], begun: Calibrations, model: ModelShape | None
) -> Calibrations:
    """Fit constants of time to all rows, and constants of memory to each trainer's own rows.

    `model`: whose rows will be predicted.
    """
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
        memory = calibrate(own, start, model=model)
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
            str(problem.runs[0].model),
            *map(str, trainers),
            *sorted(f"{other.table_id}/{other.runs[0].line}" for other in others),
        )
        if key not in self._known:
            self._known[key] = calibrated(
                [row for other in others for row in other.observations()],
                priors(trainers),
                problem.runs[0].model,
            )
        return self._known[key]


def score_memory(
    problems: Sequence[Problem], calibrations: Sequence[tuple[Calibrations, Mask]]
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


def _classified(score: Floats, truth: Mask, best: Mapping[str, float]) -> dict[str, object]:
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
    problem: Problem, calibration: Calibrations, scored: Mask
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
                    calibrated(problem.observations(rows), widened, problem.runs[0].model),
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
    tables_out = partial(fits.to_relatives, same_model=True)
    models_out = partial(fits.to_relatives, same_model=False)

    def alone(problem: Problem) -> Calibrations:
        return priors(dict.fromkeys(problem.trainers))

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
