"""Measures when `search.bound` ends a search, and how good its best layout is then.

python -m benchmarks.search_bound --tables DIR [--table PATTERN ...]
    [--bounds 0.01,0.005,0.002,0.001] [--out FILE.json]

Tables, problems and modes are those of benchmarks.search_efficiency. Reported per mode and bound:
launches (mean and most); the best found as a share of the table's best (mean and least); and the
number of problems in which that is within 1 and within 5 %.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from benchmarks.machine import describe_machine, parser_of, write_result
from benchmarks.search_drivers import Driver, driver_of
from benchmarks.search_problem import Problem, calibration_of, read_problems
from benchmarks.table_folder import add_table_arguments
from orchestrator.sweep.cell_search import FEWEST_TO_BOUND

MODES = ("cold", "warm", "blind")


def main() -> None:
    parser = parser_of(__doc__)
    add_table_arguments(parser, names="tables of these ids or patterns")
    parser.add_argument("--bounds", default="0.01,0.005,0.002,0.001")
    arguments = parser.parse_args()
    machine = describe_machine()
    bounds = [float(text) for text in arguments.bounds.split(",")]
    problems = [
        problem.shuffled(0)
        for problem in read_problems(arguments.tables, arguments.table)
        if problem.speeds.max()
    ]
    if not problems:
        parser.error(f"no table with something to search in {arguments.tables}")
    found = {}
    for mode in MODES:
        ends = [ends_of(problem, _driver(problem, problems, mode), bounds) for problem in problems]
        found[mode] = {str(bound): summary([end[bound] for end in ends]) for bound in bounds}
    print(json.dumps(found, indent=1))
    write_result(
        arguments.out,
        benchmark="search_bound",
        machine=machine,
        result={"problems": len(problems), "modes": found},
    )


def ends_of(
    problem: Problem, driver: Driver, bounds: Sequence[float]
) -> dict[float, tuple[int, float]]:
    """Launches until each bound is reached, and the best by then as a share of the table's."""
    ends: dict[float, tuple[int, float]] = {}
    best, launches = 0.0, 0
    while len(ends) < len(bounds) and (row := driver.ask()) is not None:
        driver.tell(row, problem.runs[row])
        launches += 1
        best = max(best, float(problem.speeds[row] / problem.speeds.max()))
        gain = driver.expected_gain() if launches >= FEWEST_TO_BOUND else None
        if gain is not None:
            for bound in bounds:
                if gain < bound:
                    ends.setdefault(bound, (launches, best))
    return {bound: ends.get(bound, (launches, best)) for bound in bounds}


def summary(ends: Sequence[tuple[int, float]]) -> Mapping[str, float]:
    launches, shares = [end[0] for end in ends], [end[1] for end in ends]
    return {
        "launches_mean": round(sum(launches) / len(ends), 2),
        "launches_most": max(launches),
        "share_mean": round(sum(shares) / len(ends), 4),
        "share_least": round(min(shares), 4),
        "within_1_percent": sum(share >= 0.99 for share in shares),
        "within_5_percent": sum(share >= 0.95 for share in shares),
    }


def _driver(problem: Problem, problems: Sequence[Problem], mode: str) -> Driver:
    calibration = calibration_of(problem, problems) if mode == "warm" else None
    return driver_of(problem, "auto", 0, mode=mode, calibration=calibration)


if __name__ == "__main__":
    main()
