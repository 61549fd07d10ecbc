"""Checks whether the search of sweeps/quickstart.yaml finds the true best of its space.

Every layout is measured, the fastest repeatedly; then the search is run.

python -m benchmarks.quickstart_truth --out benchmarks/results/quickstart-truth_cpu-2core_DATE.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import PROJECT, describe_machine, parser_of, write_result

SWEEP_FILE = PROJECT / "sweeps" / "quickstart.yaml"
# Every layout, and the fastest of each cell again, so that the best is not a single lucky run.
TRUTH = ("search.strategy=exhaustive", "search.max_trials=1000")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="searches to run")
    parser.add_argument(
        "--contenders",
        type=int,
        default=10,
        help="per cell, measured again after all layouts were measured",
    )
    parser.add_argument("--repeats", type=int, default=5, help="per contender at most")
    arguments = parser.parse_args()
    machine = describe_machine()
    truth = measured(
        (
            *TRUTH,
            f"search.confirm.contenders={arguments.contenders}",
            f"search.confirm.repeats={arguments.repeats}",
        )
    )
    searches = [measured((f"search.seed={seed}",)) for seed in range(arguments.seeds)]
    result = {
        "truth": {cell: summary(rows) for cell, rows in truth.items()},
        "searches": [compare(truth, found) for found in searches],
    }
    print(json.dumps(result, indent=1))
    write_result(arguments.out, benchmark="quickstart_truth", machine=machine, result=result)


def measured(overrides: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Run the sweep with its own store, and return the trials of each cell, the fastest first."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "SWEEP_HOME": folder,
            "SWEEP_DB": f"sqlite:///{folder}/sweep.sqlite",
        }
        program = [str(Path(sys.executable).with_name("sweep"))]
        subprocess.run(
            [*program, "run", str(SWEEP_FILE), *overrides, "--quiet"],
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        listed = subprocess.run(
            [*program, "trials", "--json"],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        best = subprocess.run(
            [*program, "best", "--json", "--top", "16"],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
    tied = {row["trial_id"] for row in json.loads(best.stdout)["best"] if row["is_tied"]}
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(listed.stdout)["trials"]:
        if row["state"] == "measured":
            cells.setdefault(row["cell"], []).append({**row, "is_tied": row["trial_id"] in tied})
    return {
        cell: sorted(rows, key=lambda row: row["step_seconds_median"])
        for cell, rows in cells.items()
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    best = rows[0]
    return {
        "num_layouts": len(rows),
        "best": best["layout"],
        "tokens_per_second_per_gpu": best["tokens_per_second_per_gpu"],
        "num_measurements_of_best": best["num_measurements"],
        "tied": [row["layout"] for row in rows if row["is_tied"]],
        "slowest_over_best": rows[-1]["step_seconds_median"] / best["step_seconds_median"],
    }


def compare(
    truth: Mapping[str, Sequence[Mapping[str, Any]]],
    found: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """Judge a search by the exhaustive runs of its layouts.

    Its own runs are not compared: on a shared machine speed changes within minutes.
    """
    result = {}
    for cell, rows in found.items():
        of_layout = {row["layout"]: row for row in truth[cell]}
        chosen, best = of_layout[rows[0]["layout"]], truth[cell][0]
        # The search names one layout, or several that are tied.
        named = [row["layout"] for row in rows if row["is_tied"]] or [rows[0]["layout"]]
        result[cell] = {
            "launched": len(rows),
            "share_launched": len(rows) / len(truth[cell]),
            "chosen": chosen["layout"],
            "is_true_best": chosen["layout"] == best["layout"],
            "is_tied_with_true_best": bool(chosen["is_tied"]),
            "true_best_was_launched": best["layout"] in {row["layout"] for row in rows},
            "num_said_to_be_best": len(named),
            "true_best_is_among_them": best["layout"] in named,
            "tokens_per_second_of_true_best": chosen["tokens_per_second_per_gpu"]
            / best["tokens_per_second_per_gpu"],
        }
    return result


if __name__ == "__main__":
    main()
