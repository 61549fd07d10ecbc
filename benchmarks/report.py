"""Measures a report of as many trials as the Ultra-Scale Playbook has: its time and its size.

python -m benchmarks.report --out benchmarks/results/report_cpu-2core_DATE.json

A simulated sweep of sweeps/playbook.yaml fills the store; `sweep report` is timed as a process. If
a Chromium is installed, it opens the pages, and the time of each picture is taken.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import PROJECT, describe_machine, parser_of, write_result
from tests.report.pages.chromium import chromium

SWEEP = Path(sys.executable).parent / "sweep"
# Launches in each of the 28 cells: 4,116, twelve more than the playbook's 4,104.
LAUNCHES_PER_CELL = 147
REPORTS = 3
# The exit code of a sweep with a cell in which nothing fits: 70B on 8 GPUs.
NOTHING_FITS = 4


def simulate(environment: dict[str, str], launches: int) -> float:
    """Fill the store; return the seconds that it took."""
    begin = time.monotonic()
    done = subprocess.run(
        [
            SWEEP,
            "run",
            PROJECT / "sweeps" / "playbook.yaml",
            "--simulate",
            "--quiet",
            "search.strategy=random",
            f"search.max_trials={launches}",
        ],
        env=environment,
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if done.returncode not in (0, NOTHING_FITS):
        raise SystemExit(f"sweep run --simulate ended with {done.returncode}")
    return time.monotonic() - begin


def report(environment: dict[str, str], folder: Path) -> tuple[float, dict[str, Any]]:
    """Write the report once; return its seconds and what the command said."""
    begin = time.monotonic()
    done = subprocess.run(
        [SWEEP, "report", "playbook-simulated", "-o", folder, "--json"],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
    )
    return time.monotonic() - begin, json.loads(done.stdout)


def cpu_seconds() -> float:
    """The CPU time of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def drawn(index: Path) -> dict[str, float] | None:
    """Return the milliseconds that each picture takes; None: there is no Chromium."""
    with chromium() as browser:
        if browser is None:
            return None
        browser.get(index.as_uri())
        return {name: browser.draw(name) for name in browser.pictures()}


def measure(launches: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {
            **os.environ,
            "SWEEP_DB": f"sqlite:///{folder}/sweep.sqlite",
            "SWEEP_HOME": f"{folder}/home",
        }
        simulating = simulate(environment, launches)
        used = cpu_seconds()
        runs = [report(environment, folder / "report") for _ in range(REPORTS)]
        used = cpu_seconds() - used
        seconds, told = [each for each, _ in runs], runs[-1][1]
        return {
            "num_trials": told["num_trials"],
            "simulated_in_seconds": round(simulating, 1),
            "report_seconds": [round(each, 2) for each in seconds],
            "median_report_seconds": round(statistics.median(seconds), 2),
            # A busy machine does not change it much.
            "cpu_seconds": round(used / REPORTS, 2),
            "report_bytes": told["num_bytes"],
            "num_marks": {name: one["num_marks"] for name, one in told["pictures"].items()},
            "milliseconds_to_draw": drawn(folder / "report" / "index.html"),
        }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--launches", type=int, default=LAUNCHES_PER_CELL, help="in each cell")
    arguments = parser.parse_args()
    machine = describe_machine()
    result = measure(arguments.launches)
    print(json.dumps(result, indent=1))
    write_result(arguments.out, benchmark="report", machine=machine, result=result)


if __name__ == "__main__":
    main()
