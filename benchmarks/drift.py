"""Counts how often a wrong layout is called the winner on machines that drift.

python -m benchmarks.drift [--seeds 200] [--drifts none,slow_start,...] [--rules now,earlier]
    [--parallel 2] [--max-trials N] [--out FILE.json]

Prints a table and writes JSON. Each run is a whole `run_sweep` over one cell of 32 layouts on the
simulated scheduler, with its own store; its drift is drawn from the seed. True step times are those
of workload synthetic without drift and noise. `wrong`: a layout more than 3 % slower than the truly
best one was called the winner. Rule `earlier` takes plain medians: no anchors, no physics, only the
fastest layouts are repeated, and the median of its runs represents a layout.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from math import exp, log, sqrt
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.machine import describe_machine, parser_of, write_result
from db.store import Store
from orchestrator.cluster.simulated import SimulatedScheduler, simulated
from orchestrator.core.pretend.synthetic import step_seconds
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.search_section import Confirm
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.purpose import REPEATS, Purpose
from orchestrator.core.trial.run import Run
from orchestrator.core.trial.winner import Verdict, median_run
from orchestrator.sweep import stored_confirmation
from orchestrator.sweep.confirmation import Confirmation, Repeat
from orchestrator.sweep.run import run_sweep

# A winner may be slower than the truly best layout by this share.
WRONG = 0.03
DEVICE = "h100-sxm"
NUM_NODES = 4  # for drift slow_node

WRITE_EVERY = 60  # runs
SHOWN = (
    "runs",
    "named",
    "wrong",
    "tied_without_a_good_one",
    "first_off_over_3_percent",
    "repeats_mean",
    "repeats_most",
)

Entry = dict[str, Any]


def _slow_start(random: Random) -> list[Entry]:
    return [
        {"kind": "slow_start", "size": random.uniform(0.2, 0.8), "seconds": random.uniform(70, 900)}
    ]


def _levels(levels: Sequence[float], at: Sequence[float]) -> list[Entry]:
    """Slow down by each factor in turn, from these seconds on. No factor is below 1."""
    steps = [
        {"kind": "step", "size": after / before - 1, "seconds": when}
        for (before, after), when in zip(pairwise(levels), at, strict=True)
    ]
    return [{"kind": "slow_start", "size": levels[0] - 1, "seconds": 1e9}, *steps]


def _step(random: Random) -> list[Entry]:
    levels = [1.0, 1 + random.uniform(0.1, 0.6)]
    random.shuffle(levels)
    return _levels(levels, [random.uniform(150, 2200)])


def _three_steps(random: Random) -> list[Entry]:
    return _levels(
        [1 + random.uniform(0.0, 0.6) for _ in range(4)],
        sorted(random.uniform(150, 2200) for _ in range(3)),
    )


def _wave(random: Random) -> list[Entry]:
    return [
        {"kind": "wave", "size": random.uniform(0.1, 0.5), "seconds": random.uniform(300, 3000)}
    ]


def _slow_node(random: Random) -> list[Entry]:
    return [
        {
            "kind": "slow_node",
            "size": random.uniform(0.1, 0.5),
            "node": f"node-{random.randrange(NUM_NODES)}",
        }
    ]


DRIFTS: Mapping[str, Callable[[Random], list[Entry]]] = {
    "none": lambda _: [],
    "slow_start": _slow_start,
    "step": _step,
    "three_steps": _three_steps,
    "wave": _wave,
    "slow_node": _slow_node,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    drift: str
    rule: str
    seed: int
    max_trials: int | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    drift: str
    rule: str
    seed: int
    named: bool
    # The share by which the winner is slower than the truly best layout.
    off: float | None
    num_tied: int
    # A layout within WRONG of the truly best.
    among_tied: bool
    # The same for the first of the tied layouts.
    first_off: float
    launches: int
    repeats: int


def sweep(case: Case) -> SweepSpec:
    drift = DRIFTS[case.drift](Random(f"{case.drift}/{case.seed}"))
    return simulated(
        SweepSpec.model_validate(
            {
                "name": "drift",
                "model": "llama-3.2-1b",
                "gpus": 8,
                "gpus_per_node": 8,
                "device": DEVICE,
                "sequence_length": 4096,
                "global_batch_size": 128,
                "workload": {"name": "synthetic", "options": {"drift": drift} if drift else {}},
                "axes": {
                    "tensor_parallel_size": [1, 2],
                    "micro_batch_size": [1, 2, 4, 8],
                    "zero_stage": [1],
                    "recompute": ["none", "selective_attention", "selective_ops", "full"],
                },
                "search": {
                    "seed": case.seed,
                    **({"max_trials": case.max_trials} if case.max_trials else {}),
                },
            }
        )
    )


def run_case(case: Case) -> Outcome:
    spec = sweep(case)
    if case.rule == "earlier":
        stored_confirmation.Confirmation = EarlierConfirmation  # type: ignore[misc]
    num_nodes = NUM_NODES if case.drift == "slow_node" else 1
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "sweep.sqlite")
            file.write_bytes(_empty_store())
            with Store.open(f"sqlite:///{file}") as store:
                scheduler = SimulatedScheduler(spec, num_nodes=num_nodes)
                result = run_sweep(
                    spec,
                    store=store,
                    open_scheduler=lambda: scheduler,
                    code=Fingerprint(orchestrator_version="benchmark"),
                    hardware=lambda _: DEVICES[DEVICE],
                    clock=scheduler.clock,
                )
                trials = store.trials(result.sweep_id)
                details = [store.trial(trial.id) for trial in trials if trial.num_attempts > 1]
    finally:
        stored_confirmation.Confirmation = Confirmation  # type: ignore[misc]
    ((_, tied),) = result.tied.items()
    truth = _truth(
        spec, [trial.layout for trial in trials if trial.step_seconds_median is not None]
    )
    best = min(truth.values())
    offs = [truth[layout] / best - 1 for layout in tied]
    return Outcome(
        drift=case.drift,
        rule=case.rule,
        seed=case.seed,
        named=len(tied) == 1,
        off=offs[0] if len(tied) == 1 else None,
        num_tied=len(tied),
        among_tied=min(offs) <= WRONG,
        first_off=offs[0],
        launches=sum(trial.num_attempts for trial in trials),
        repeats=sum(
            attempt.purpose in REPEATS for detail in details for attempt in detail.attempts
        ),
    )


def _truth(spec: SweepSpec, layouts: Sequence[Layout]) -> dict[Layout, float]:
    (cell,) = spec.cells()
    return {
        layout: step_seconds(cell.model, layout, cell.sequence_length, DEVICES[DEVICE])
        for layout in layouts
    }


@cache
def _empty_store() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Store.open(f"sqlite:///{folder}/sweep.sqlite").close()
        return Path(folder, "sweep.sqlite").read_bytes()


class EarlierConfirmation(Confirmation):
    """Repeats the fastest layouts, back to back, and takes plain medians."""

    change = None

    def next_check(
        self, confirm: Confirm, *, anchor_every: int, num_left: int = 0
    ) -> Repeat | None:
        return None

    def next_repeat(self, confirm: Confirm, *, anchor_every: int) -> Repeat | None:
        runs = {
            key: [*some, median_run(some)] if key in self.repeating else some
            for key, some in self.runs.of_trial.items()
        }
        found = _earlier_next(runs, confirm) if runs else None
        if found is None or found in self.repeating:
            return None
        return Repeat(
            trial_id=found,
            layout=self.runs.layout_of(found),
            purpose=Purpose.CONFIRMATION,
            why="earlier",
        )

    def ended_early_that_could_win(self) -> dict[int, frozenset[str]]:
        return {}

    def verdict(self) -> Verdict | None:
        tied, _ = _earlier_tied(self.runs.of_trial)
        return Verdict(
            best=tied[0],
            tied=tied,
            order=tied,
            intervals={},
            run_sd=0.0,
            spread=None,
            num_repeats=0,
            change=None,
            repeat=None,
            margin=None,
            runs_to_decide=None,
        )


def _earlier_tied(runs: Mapping[int, Sequence[Run]]) -> tuple[list[int], float]:
    centres = {key: log(median_run(some).step_seconds) for key, some in runs.items()}
    total, degrees = 4.0 * 0.01**2, 4.0
    for some in runs.values():
        logs = [log(run.step_seconds) for run in some]
        mean = sum(logs) / len(logs)
        total += sum((x - mean) ** 2 for x in logs)
        degrees += len(logs) - 1
    half = {
        key: 1.96 * sqrt((_earlier_steps(some) + total / degrees) / len(some))
        for key, some in runs.items()
    }
    order = sorted(runs, key=lambda key: (centres[key], key))
    return [
        key for key in order if centres[key] - half[key] <= centres[order[0]] + half[order[0]]
    ], exp(total / degrees)


def _earlier_steps(some: Sequence[Run]) -> float:
    known = [
        0.02 if run.relative_confidence is None else run.relative_confidence / 1.96 for run in some
    ]
    return sum(sd**2 for sd in known) / len(known)


def _earlier_next(runs: Mapping[int, Sequence[Run]], confirm: Confirm) -> int | None:
    tied, _ = _earlier_tied(runs)
    staying = confirm.contenders
    for round_of in range(1, confirm.repeats + 1):
        still = tied[: max(1, staying)]
        if len(still) == 1 and len(tied) == 1 and len(runs[tied[0]]) > 1:
            return None
        behind = [key for key in still if len(runs[key]) <= round_of]
        if behind:
            return min(behind, key=lambda key: (len(runs[key]), still.index(key)))
        staying = min(confirm.contenders, max(2, (staying + 1) // 2))
    return None


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    offs = [one.off for one in outcomes if one.off is not None]
    return {
        "runs": len(outcomes),
        "named": len(offs),
        "wrong": sum(off > WRONG for off in offs),
        "worst_winner_off": round(max(offs, default=0.0), 4),
        "tied": len(outcomes) - len(offs),
        "tied_without_a_good_one": sum(not one.among_tied for one in outcomes),
        "first_off_over_3_percent": sum(one.first_off > WRONG for one in outcomes),
        "launches_mean": round(statistics.mean(one.launches for one in outcomes), 2),
        "repeats_mean": round(statistics.mean(one.repeats for one in outcomes), 2),
        "repeats_most": max(one.repeats for one in outcomes),
        "wrong_seeds": [one.seed for one in outcomes if one.off is not None and one.off > WRONG],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--drifts", default=",".join(DRIFTS))
    parser.add_argument("--rules", default="now,earlier")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--join",
        type=Path,
        nargs="*",
        default=[],
        help="results of other seeds of this benchmark, to add to this one",
    )
    parser.add_argument("--max-trials", type=int, help="default: all layouts are measured")
    arguments = parser.parse_args()
    machine = describe_machine()
    drifts, rules = arguments.drifts.split(","), arguments.rules.split(",")
    cases = [
        Case(drift=drift, rule=rule, seed=seed, max_trials=arguments.max_trials)
        for rule in rules
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        for drift in drifts
    ]
    found: dict[tuple[str, str], list[Outcome]] = {
        (drift, rule): [] for drift in drifts for rule in rules
    }
    for path in arguments.join:
        for one in json.loads(path.read_text(encoding="utf-8"))["outcomes"]:
            found.setdefault((one["drift"], one["rule"]), []).append(Outcome(**one))
    write = partial(_write, arguments.out, machine, arguments.max_trials)
    with ProcessPoolExecutor(max_workers=arguments.parallel) as pool:
        for number, outcome in enumerate(pool.map(run_case, cases), 1):
            found[outcome.drift, outcome.rule].append(outcome)
            # It takes long: keep what is done if somebody ends it.
            if number % WRITE_EVERY == 0:
                write(found)
    write(found)
    print("| drift | rule |", " | ".join(SHOWN), "|")
    for (drift, rule), outcomes in found.items():
        numbers = summary(outcomes)
        print(
            f"| {drift} | {rule} |",
            " | ".join(str(numbers[name]) for name in SHOWN),
            "|",
            numbers["wrong_seeds"][:12],
        )


def _write(
    path: Path | None,
    machine: Mapping[str, Any],
    max_trials: int | None,
    found: Mapping[tuple[str, str], Sequence[Outcome]],
) -> None:
    done = {key: outcomes for key, outcomes in found.items() if outcomes}
    drifts: dict[str, dict[str, Any]] = {}
    for (drift, rule), outcomes in done.items():
        drifts.setdefault(drift, {})[rule] = summary(outcomes)
    rows = [asdict(one) for outcomes in done.values() for one in outcomes]
    result = {"max_trials": max_trials, "wrong_beyond": WRONG, "drifts": drifts, "outcomes": rows}
    write_result(path, benchmark="drift", machine=machine, result=result)


if __name__ == "__main__":
    main()
