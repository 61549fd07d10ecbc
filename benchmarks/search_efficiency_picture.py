"""Draw what benchmarks.search_efficiency measured: launches against the best share so far, a line for each method, as SVG.

python -m benchmarks.search_efficiency_picture RESULT.json PICTURE.svg
"""

from __future__ import annotations

import argparse
import json
from math import log
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 120, 40, 52
LOWEST = 0.4  # share of the best at the lower edge
# Told apart without colour too: every line has its name at its end.
COLOURS = {"auto": "#0b6e4f", "tpe": "#b5651d", "gp": "#7b4fa3", "random": "#7a7a7a", "heuristic": "#1f5fa8"}
NAMES = {"auto": "auto", "tpe": "Optuna TPE", "gp": "Optuna GP", "random": "random", "heuristic": "rule of thumb"}


def picture(result: dict[str, object]) -> str:
    """The SVG text. Raises KeyError when the result is of another benchmark."""
    summary = result["summary"]
    assert isinstance(summary, dict)
    curves = {method: found["best_after"] for method, found in summary.items()}
    most = max(map(len, curves.values()))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(_title(result, summary))}</text>',
    ]
    for share in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0):
        y = _y(share)
        dash = ' stroke-dasharray="5 3"' if share == 0.95 else ""
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"{dash}/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for launches in (n for n in (1, 2, 3, 5, 10, 20, 50, 100) if n <= most):
        x = _x(launches, most)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{launches}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">launches, failed ones included</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">best tokens/s/GPU so far</text>')
    for method, curve in curves.items():
        points = " ".join(f"{_x(n, most):.1f},{_y(share):.1f}" for n, share in enumerate(curve, 1) if share >= LOWEST)
        colour = COLOURS[method]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for at, method in enumerate(sorted(curves, key=lambda name: -sum(curves[name]))):
        y = TOP + 14 + 18 * at
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{y}" fill="{COLOURS[method]}">{escape(NAMES[method])}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(result: dict[str, object], summary: dict[str, dict[str, object]]) -> str:
    problems = next(iter(summary.values()))["problems"]
    return f"Share of the best layout's speed after so many launches: mean over {problems} tables of measured runs, {result['mode']}"


def _x(launches: int, most: int) -> float:
    return LEFT + (WIDTH - RIGHT - LEFT) * log(launches) / log(most)


def _y(share: float) -> float:
    return TOP + (HEIGHT - BOTTOM - TOP) * (1 - (share - LOWEST) / (1 - LOWEST))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    arguments.picture.write_text(picture(json.loads(arguments.result.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
