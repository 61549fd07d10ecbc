"""The matplotlib twin of a picture, for papers: the same values in an SVG or PNG file.

It draws what figures of `pictures/` use of plotly's format: points, lines, stacked areas, bars,
boxes and a heat map, with their axes, legends, lines and labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from html import unescape
from itertools import count
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import UsageInvalid
from orchestrator.report.extras import how_to_install
from orchestrator.report.pictures.picture import GREY, Figure, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as PaperFigure

WIDTH_INCHES, PIXELS_PER_INCH = 9.0, 96.0
# Plotly's diameters are pixels, matplotlib's sizes are areas in points.
POINTS_PER_PIXEL = 0.75
# Labels of the x axis that are longer than this, all together, are turned.
MOST_LABEL_LETTERS = 90
_MARKERS = {
    "circle": "o",
    "circle-open": "o",
    "x": "x",
    "x-thin": "x",
    "cross-thin": "+",
    "line-ew": "_",
    "line-ns": "|",
}
_DASHES = {"dash": "--", "dot": ":", "solid": "-"}
_MISSING = f"pictures as files need matplotlib, {how_to_install('report')}"


def paper_figure(figure: Figure, *, title: str = "") -> PaperFigure:
    """Draw a picture's figure with matplotlib. Raises UsageInvalid if it is not installed."""
    try:
        from matplotlib.figure import Figure as PaperFigure
    except ImportError:
        raise UsageInvalid(_MISSING) from None
    layout = figure["layout"]
    height = max(layout.get("height", 420) / PIXELS_PER_INCH * 0.8, 2.2)
    paper = PaperFigure(figsize=(WIDTH_INCHES, height), layout="constrained")
    keys = sorted({str(trace.get("xaxis", "x")) for trace in figure["data"]})
    for number, key in enumerate(keys, 1):
        axes = paper.add_subplot(1, len(keys), number)
        traces = [trace for trace in figure["data"] if trace.get("xaxis", "x") == key]
        _Drawing(axes, layout, key.removeprefix("x")).draw(traces)
    if title:
        paper.suptitle(title, fontsize=11)
    handles, labels = [], []
    for axes in paper.axes:
        some_handles, some_labels = axes.get_legend_handles_labels()
        handles += some_handles
        labels += some_labels
    if handles:
        place: Any = "outside lower center"
        paper.legend(handles, labels, loc=place, ncols=3, fontsize=7, frameon=False)
    return paper


class _Drawing:
    """One pair of axes, and how values are placed on it."""

    def __init__(self, axes: Axes, layout: Mapping[str, Any], suffix: str) -> None:
        self.axes, self.layout = axes, layout
        self.x: Mapping[str, Any] = layout.get(f"xaxis{suffix}", {})
        self.y: Mapping[str, Any] = layout.get(f"yaxis{suffix}", {})

    def draw(self, traces: Sequence[Trace]) -> None:
        """Draw all traces with axes, legend, lines and labels."""
        for axis, of_x in ((self.x, True), (self.y, False)):
            self._set_axis(axis, of_x=of_x)
        stacked: dict[Any, float] = {}
        area: list[float] = []
        for trace in traces:
            if trace["type"] == "bar":
                self._bars(trace, stacked)
            elif trace["type"] == "heatmap":
                self._heat_map(trace)
            elif trace["type"] == "box":
                self._boxes(trace)
            elif "stackgroup" in trace:
                area = self._area(trace, area)
            else:
                self._points(trace)
        self._lines_and_labels()
        # Only now: limits that are set keep an axis from growing with what is drawn.
        self._set_limits(self.x, self.axes.set_xlim)
        self._set_limits(self.y, self.axes.set_ylim)

    def _set_axis(self, axis: Mapping[str, Any], *, of_x: bool) -> None:
        axes = self.axes
        set_label, set_scale, set_ticks = (
            (axes.set_xlabel, axes.set_xscale, axes.set_xticks)
            if of_x
            else (axes.set_ylabel, axes.set_yscale, axes.set_yticks)
        )
        set_label(axis.get("title", {}).get("text", ""), fontsize=9)
        axes.tick_params(labelsize=8)
        if axis.get("type") == "log":
            set_scale("log")
        if axis.get("tickvals"):
            set_ticks(axis["tickvals"], axis["ticktext"])
            (axes.xaxis if of_x else axes.yaxis).set_minor_locator(_no_ticks())
        names = axis.get("categoryarray")
        if names:
            set_ticks(range(len(names)), [name.replace("$", r"\$") for name in names])
            if of_x and sum(map(len, names)) > MOST_LABEL_LETTERS:
                axes.tick_params(axis="x", labelrotation=90)
        axes.grid(visible=True, color="#E6E9ED", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)

    def _set_limits(self, axis: Mapping[str, Any], set_limits: Callable[..., Any]) -> None:
        if axis.get("range"):
            set_limits(*axis["range"])
        elif axis.get("rangemode") == "tozero" and axis.get("type") != "log":
            set_limits(0)

    def _place(self, values: Sequence[Any], axis: Mapping[str, Any]) -> list[Any]:
        """Values as positions: names by their place, None as a gap."""
        names = axis.get("categoryarray")
        if not names:
            return [float("nan") if value is None else value for value in values]
        places = dict(zip(names, count()))
        return [places.get(value, float("nan")) for value in values]

    def _points(self, trace: Trace) -> None:
        xs, ys = self._place(trace["x"], self.x), self._place(trace["y"], self.y)
        line, marker = trace.get("line", {}), trace.get("marker", {})
        name = _words(trace.get("name", "")) if trace.get("showlegend", True) else None
        for of_x in (True, False):
            error = trace.get("error_x" if of_x else "error_y")
            if error is not None:
                lengths = [error["arrayminus"], error["array"]]
                self.axes.errorbar(
                    xs,
                    ys,
                    xerr=lengths if of_x else None,
                    yerr=None if of_x else lengths,
                    fmt="none",
                    ecolor=error["color"],
                    elinewidth=0.8,
                )
        if "lines" in trace["mode"]:
            drawstyle = "steps-post" if line.get("shape") == "hv" else "default"
            self.axes.plot(
                xs,
                ys,
                color=line.get("color", GREY),
                linestyle=_DASHES[line.get("dash", "solid")],
                linewidth=line.get("width", 1.5) * POINTS_PER_PIXEL,
                alpha=trace.get("opacity", 1.0),
                label=name,
                drawstyle=drawstyle,
            )
            name = None
        if "markers" in trace["mode"]:
            self._markers(xs, ys, marker, name)

    def _markers(
        self, xs: list[Any], ys: list[Any], marker: Mapping[str, Any], name: str | None
    ) -> None:
        size = marker.get("size", 6)
        diameters = size if isinstance(size, list) else [size] * len(xs)
        symbol, color = marker.get("symbol", "circle"), marker.get("color", GREY)
        is_open = symbol.endswith("-open")
        colors: dict[str, Any] = {"c": color}
        if isinstance(color, list):
            values = [float("nan") if value is None else value for value in color]
            colors = {"c": values, "cmap": str(marker.get("colorscale", "Viridis")).lower()}
        elif is_open:
            colors = {"facecolors": "none", "edgecolors": color}
        found = self.axes.scatter(
            xs,
            ys,
            s=[(each * POINTS_PER_PIXEL) ** 2 for each in diameters],
            marker=_MARKERS[symbol],
            alpha=marker.get("opacity", 1.0),
            linewidths=0.8,
            label=name,
            **colors,
        )
        if isinstance(color, list):
            self._color_bar(found, marker.get("colorbar", {}))

    def _color_bar(self, found: Any, bar: Mapping[str, Any]) -> None:
        paper = self.axes.figure
        made = paper.colorbar(found, ax=self.axes, shrink=0.8, pad=0.02)
        made.set_label(bar.get("title", {}).get("text", ""), fontsize=8)
        made.ax.tick_params(labelsize=7)
        if bar.get("tickformat") == ".0%":
            made.ax.yaxis.set_major_formatter(_percent())

    def _bars(self, trace: Trace, stacked: dict[Any, float]) -> None:
        is_flat = trace.get("orientation") == "h"
        long, names = ("x", "y") if is_flat else ("y", "x")
        places = self._place(trace[names], self.y if is_flat else self.x)
        lengths, bases = list(trace[long]), trace.get("base")
        if self.x.get("type") == "date":
            bases = [_moment(base) for base in bases or ()]
            lengths = [timedelta(milliseconds=length) for length in lengths]
        elif bases is None:
            bases = [stacked.get(place, 0.0) for place in places]
            for place, length in zip(places, lengths, strict=True):
                stacked[place] = stacked.get(place, 0.0) + (length or 0.0)
        group = trace.get("offsetgroup")
        offset = {"predicted": -0.2, "measured": 0.2}.get(str(group), 0.0)
        thickness = 0.38 if group else 0.75
        moved = [place + offset for place in places]
        name = _words(trace["name"]) if trace.get("showlegend", True) else None
        style: dict[str, Any] = {
            "color": trace["marker"]["color"],
            "alpha": trace["marker"].get("opacity", 1.0),
            "label": name,
        }
        if is_flat:
            self.axes.barh(moved, lengths, height=thickness, left=bases, align="center", **style)
        else:
            self.axes.bar(moved, lengths, width=thickness, bottom=bases, align="center", **style)
        texts = () if trace.get("textposition") == "none" else trace.get("text", ())
        for place, length, text in zip(moved, lengths, texts, strict=False):
            self.axes.text(length, place, f" {_words(text)}", fontsize=7, va="center")

    def _boxes(self, trace: Trace) -> None:
        """Boxes of quartiles with whiskers, as plotly draws them."""
        values: dict[str, list[float]] = {}
        for name, value in zip(trace["x"], trace["y"], strict=True):
            values.setdefault(name, []).append(value)
        color = trace["line"]["color"]
        line = {"color": color, "linewidth": 1.0}
        self.axes.boxplot(
            list(values.values()),
            positions=self._place(list(values), self.x),
            widths=0.6,
            manage_ticks=False,
            boxprops=line,
            whiskerprops=line,
            capprops=line,
            medianprops=line | {"linewidth": 2.0},
            flierprops={"marker": ".", "markersize": 3, "markeredgecolor": color},
        )

    def _area(self, trace: Trace, below: list[float]) -> list[float]:
        lows = below or [0.0] * len(trace["y"])
        highs = [low + value for low, value in zip(lows, trace["y"], strict=True)]
        color, name = trace["fillcolor"], _words(trace["name"])
        self.axes.fill_between(trace["x"], lows, highs, color=color, label=name, linewidth=0)
        return highs

    def _heat_map(self, trace: Trace) -> None:
        # The first name of a category axis is at its lower end.
        order = [trace["y"].index(name) for name in self.y["categoryarray"]]
        values = [
            [float("nan") if value is None else value for value in trace["z"][row]] for row in order
        ]
        found = self.axes.imshow(values, aspect="auto", cmap="viridis", origin="lower")
        self.axes.grid(visible=False)
        self._color_bar(found, trace["colorbar"])

    def _lines_and_labels(self) -> None:
        for shape in self.layout.get("shapes", ()):
            if shape["type"] == "rect":
                self.axes.axvspan(shape["x0"], shape["x1"], color="#808080", alpha=0.15, zorder=0)
            elif shape.get("yref") == "y":
                self.axes.axhline(shape["y0"], color=shape["line"]["color"], ls="--", lw=1)
            elif "xref" not in shape or shape["xref"] == "x":
                self.axes.axvline(shape["x0"], color=shape["line"]["color"], lw=0.7)
        for label in self.layout.get("annotations", ()):
            in_axes = [label.get(f"{letter}ref", letter) == "paper" for letter in "xy"]
            x, y = (
                label[letter] if is_share else self._place([label[letter]], axis)[0]
                for letter, is_share, axis in zip("xy", in_axes, (self.x, self.y), strict=True)
            )
            box = {"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 1.5}
            self.axes.text(
                x,
                y,
                _words(label["text"]),
                transform=self._transform(*in_axes),
                fontsize=6,
                in_layout=False,
                ha={"right": "right", "left": "left"}.get(label.get("xanchor", ""), "center"),
                va={"bottom": "bottom", "top": "top"}.get(label.get("yanchor", ""), "center"),
                color=label.get("font", {}).get("color", "black"),
                bbox=box if label.get("bgcolor") else None,
            )

    def _transform(self, x_is_share: bool, y_is_share: bool) -> Any:
        if x_is_share and y_is_share:
            return self.axes.transAxes
        if x_is_share:
            return self.axes.get_yaxis_transform()
        return self.axes.get_xaxis_transform() if y_is_share else self.axes.transData


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=0)


def _moment(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=UTC)


def _words(text: str) -> str:
    """A label without plotly's markup. Dollar signs would begin mathematics."""
    lines = re.sub(r"<br>", "\n", text)
    return unescape(re.sub(r"</?[bi]>", "", lines)).replace("$", r"\$")
