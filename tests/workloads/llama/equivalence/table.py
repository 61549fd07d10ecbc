"""The committed results of all combinations, and their table in docs/proven-layouts.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.workloads.llama.equivalence.combination import Combination
from tests.workloads.llama.equivalence.gang import Results

RESULTS = Path(__file__).with_name("results.json")


def to_json(
    results: Mapping[int, tuple[Sequence[Combination], Results]], *, seconds: float
) -> dict[str, Any]:
    """Return what is kept of a run: of the combinations of each number of ranks."""
    return {
        "seconds": round(seconds),
        "cpu_seconds": round(sum(found.cpu_seconds for _, found in results.values())),
        "combinations": [
            {
                "ranks": num_ranks,
                "layout": combination.name,
                **{name: float(f"{x:.1e}") for name, x in asdict(distance).items()},
            }
            for num_ranks, (combinations, found) in results.items()
            for combination, distance in zip(combinations, found.distances, strict=True)
        ],
    }


def text_of(kept: Mapping[str, Any]) -> str:
    """The same as lines to read on a terminal."""
    rows = kept["combinations"]
    width = max(len(row["layout"]) for row in rows)
    title = f"ranks  {'layout':{width}}     loss     norm  weights"
    return "\n".join(
        [
            title,
            *(
                f"{row['ranks']:5}  {row['layout']:{width}}  {row['loss']:7.1e}"
                f"  {row['gradient_norm']:7.1e}  {row['weights']:7.1e}"
                for row in rows
            ),
            f"{len(rows)} combinations in {kept['seconds']} s, {kept['cpu_seconds']} of a core",
        ]
    )


def write(kept: Mapping[str, Any]) -> None:
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
