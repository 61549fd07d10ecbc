"""A picture: a title, the question that it answers, and a figure in plotly's format.

A figure is plain values, which a page draws with plotly.js and `sweep plot` with matplotlib.
A picture without data gives the reason, and what would fill it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Any

Figure = dict[str, Any]
Trace = dict[str, Any]

GIB = float(1 << 30)
FEW_DECADES = 3

# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY, YELLOW = "#CC79A7", "#56B4E9", "#8A8F98", "#F0E442"
COLORS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, GREY)
# Brighter is more. Its colours also differ in lightness, so it can be printed in grey.
SCALE = "Viridis"
# `customdata` of a mark is the number of its trial: pages add the layout, and open its page. A mark
# of several trials has a list of them and a text of its own, and leads to them in the table.
HOVER_TRIAL = "trial %{customdata}<extra></extra>"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure with its words. Without a figure, `why_empty` says why and what would fill it."""

    name: str  # of `sweep plot NAME`
    title: str
    question: str
    figure: Figure | None = None
    caption: str = ""
    why_empty: str = ""

    @property
    def num_marks(self) -> int:
        """The number of values that the figure draws."""
        return 0 if self.figure is None else sum(map(num_marks, self.figure["data"]))

    @property
    def trial_ids(self) -> list[int]:
        """The trials whose pages the marks lead to, each once, in the order of the figure."""
        traces = () if self.figure is None else self.figure["data"]
        rows = (row for trace in traces for row in trace.get("customdata") or ())
        ids = (one for row in rows for one in (row if isinstance(row, list | tuple) else (row,)))
        return [one for one in dict.fromkeys(ids) if isinstance(one, int)]


@dataclass(frozen=True, kw_only=True)
class PictureAxis:
    """An axis: its title with the unit, and its scale."""

    title: str
    is_log: bool = False
    ticks: Sequence[float] = ()
    texts: Sequence[str] = ()
    # Values that are names, in this order.
    names: Sequence[str] = ()
    from_zero: bool = False
    range: tuple[float, float] | None = None

    def layout(self) -> dict[str, Any]:
        """The axis in plotly's format."""
        found: dict[str, Any] = {"title": {"text": self.title}}
        if self.is_log:
            found["type"] = "log"
        if self.ticks:
            found["tickvals"] = list(self.ticks)
            found["ticktext"] = list(self.texts) or [f"{tick:g}" for tick in self.ticks]
        if self.names:
            found |= {"type": "category", "categoryorder": "array"}
            found["categoryarray"] = list(self.names)
            found["range"] = [-0.6, len(self.names) - 0.4]
        if self.from_zero:
            found["rangemode"] = "tozero"
        if self.range is not None:
            found["range"] = list(self.range)
        return found


def marked_up(text: str) -> str:
    """Return a text that plotly shows as it is: it reads markup, and entities but `&quot;`."""
    return escape(text, quote=False)


def figure(
    traces: Sequence[Trace], *, x: PictureAxis, y: PictureAxis, height: int = 420, **layout: Any
) -> Figure:
    """A figure of traces. Colours of text, grid and background are the page's."""
    return {
        "data": list(traces),
        "layout": {"xaxis": x.layout(), "yaxis": y.layout(), "height": height, **layout},
    }


def gpu_ticks(numbers: Iterable[int]) -> dict[str, Any]:
    """The ticks of an axis of GPUs: the numbers that occur."""
    ticks = sorted(set(numbers))
    return {"ticks": ticks, "texts": [f"{tick:,}" for tick in ticks]}


def log_ticks(values: Iterable[float]) -> dict[str, Any]:
    """The ticks of a logarithmic axis: 1, 2 and 5 of each decade, or decades alone if many."""
    known = [value for value in values if value > 0]
    if not known:
        return {}
    low, high = floor(log10(min(known))), ceil(log10(max(known)))
    steps = (1, 2, 5) if high - low <= FEW_DECADES else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    near = [tick for tick in ticks if min(known) / 2 <= tick <= max(known) * 2]
    return {"ticks": near, "texts": [f"{tick:,.10g}" for tick in near]}


def num_marks(trace: Mapping[str, Any]) -> int:
    """The number of values of a trace that are drawn."""
    if trace["type"] == "heatmap":
        return sum(value is not None for row in trace["z"] for value in row)
    return sum(value is not None for value in trace["y"])


def line_at(value: float, text: str, *, axis: str = "y") -> tuple[dict[str, Any], dict[str, Any]]:
    """A dashed line across the figure at a value, and its label."""
    other = "x" if axis == "y" else "y"
    shape = {
        "type": "line",
        f"{axis}0": value,
        f"{axis}1": value,
        f"{axis}ref": axis,
        f"{other}ref": "paper",
        f"{other}0": 0,
        f"{other}1": 1,
        "line": {"color": VERMILION, "width": 1.5, "dash": "dash"},
    }
    label = {
        "text": text,
        "showarrow": False,
        axis: value,
        other: 1 if axis == "y" else 0.98,
        f"{axis}ref": axis,
        f"{other}ref": "paper",
        "xanchor": "right",
        "yanchor": "bottom" if axis == "y" else "top",
        "font": {"color": VERMILION},
    }
    return shape, label
