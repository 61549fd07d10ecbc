"""Draws the results of `benchmarks.search_efficiency`: launches against the best so far.

python -m benchmarks.search_picture cold.json warm.json blind.json --out docs/search.svg

Each method is a curve, each result a panel.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

# Curves differ by dashes as well as by colour.
STYLES = {
    "auto": ("#0072b2", "-"),
    "heuristic": ("#d55e00", "-."),
    "gp": ("#009e73", "--"),
    "tpe": ("#cc79a7", ":"),
    "random": ("#666666", (0, (1, 3))),
}
TITLES = {
    "cold": "cold: nothing in the store",
    "warm": "warm: the other tables in the store",
    "blind": "blind: no names, no physics",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results", type=Path, nargs="+", help="JSON files that benchmarks.search_efficiency wrote"
    )
    parser.add_argument("--out", type=Path, required=True, help="SVG or PNG")
    parser.add_argument("--launches", type=int, default=60, help="length of the x axis")
    arguments = parser.parse_args()
    # Text stays text in the SVG, and the same numbers give the same file.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "search", "font.size": 9})
    figure, panels = plt.subplots(
        1,
        len(arguments.results),
        figsize=(4.2 * len(arguments.results), 3.4),
        sharey=True,
        squeeze=False,
    )
    for panel, path in zip(panels[0], arguments.results, strict=True):
        draw(panel, json.loads(path.read_text(encoding="utf-8")), arguments.launches)
    panels[0][0].set_ylabel("best tokens/s/GPU so far, of the table's best")
    panels[0][-1].legend(loc="lower right", frameon=False)
    figure.tight_layout()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(
        arguments.out, metadata={"Date": None} if arguments.out.suffix == ".svg" else None
    )


def draw(panel: plt.Axes, result: dict[str, object], num_launches: int) -> None:
    summary = result["summary"]
    assert isinstance(summary, dict)
    for method, (color, dashes) in STYLES.items():
        if method in summary:
            shares = summary[method]["best_after"][:num_launches]
            panel.plot(
                range(1, len(shares) + 1),
                shares,
                label=method,
                color=color,
                linestyle=dashes,
                linewidth=1.8,
            )
    panel.axhline(0.95, color="#999999", linewidth=0.6)
    panel.set_xscale("log")
    panel.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    panel.set_xlim(1, num_launches)
    panel.set_ylim(0, 1.01)
    panel.set_xlabel("launches")
    panel.set_title(TITLES.get(str(result["mode"]), str(result["mode"])), fontsize=9)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
