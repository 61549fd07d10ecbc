"""The Pareto front as `sweep best --pareto` has it, among all measured layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.core.sweepfile.objective import LayoutNumbers, Objective
from orchestrator.core.trial.peak_memory import taken_peak
from orchestrator.report import quantities as show
from orchestrator.report.fronts import Valued, objective_titles
from orchestrator.report.pictures.picture import (
    COLORS,
    GIB,
    GREY,
    Picture,
    PictureAxis,
    Trace,
)
from orchestrator.report.sweep_rows import SweepRows

if TYPE_CHECKING:
    from db.read.rows import TrialDetail
    from orchestrator.report.fronts import ShownPoint

# Pixels of a panel, and between two panels, for the title of the upper one's axis.
PANEL_HEIGHT, GAP = 420, 70
_HOVER = "trial %{customdata}: %{text}<extra></extra>"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A measured layout by its numbers and memory, and whether it is on the front."""

    trial_id: int
    # Only layouts of one problem are compared: a model, a sequence length and a batch.
    problem: str
    numbers: LayoutNumbers
    num_gpus: int
    memory_bytes: int | None  # None: it was not read
    is_on_front: bool = False
    # Not on the front, but dominated by less than noise.
    may_be_on_front: bool = False
    # Tokens/s/GPU with the 95 % interval by which layouts were compared; None: speed was not.
    compared: Valued | None = None
    # Half of the 95 % interval of its run alone, over its speed; None: not known.
    of_run: float | None = None

    @property
    def speed_text(self) -> str:
        """The speed with its interval: by which it was compared, else of its run alone."""
        speed = f"{show.tokens_rate(self.speed.value)} tokens/s/GPU"
        if self.compared is not None:
            return show.with_confidence(speed, self.compared.relative_confidence)
        if self.of_run is None:
            return speed
        return f"{show.with_confidence(speed, self.of_run)} in its run"

    @property
    def speed(self) -> Valued:
        """Tokens/s/GPU as they were compared, else as they were measured."""
        if self.compared is not None:
            return self.compared
        measured = self.numbers.value(Objective.TOKENS_PER_SECOND_PER_GPU)
        assert measured is not None, f"trial {self.trial_id} is a candidate without a speed"
        return _exact(measured)

    @property
    def memory(self) -> Valued | None:
        """GiB taken of the device, without an interval."""
        return None if self.memory_bytes is None else _exact(self.memory_bytes / GIB)

    @property
    def energy(self) -> Valued | None:
        """Joules per token, with the relative interval of the speed."""
        joules, speed = self.numbers.value(Objective.JOULES_PER_TOKEN), self.speed
        if joules is None:
            return None
        of_all = joules * speed.value
        return Valued(value=joules, low=of_all / speed.high, high=of_all / speed.low)

    @property
    def cost(self) -> Valued | None:
        """US dollars for a billion tokens, with the relative interval of the speed."""
        speed = self.speed
        value, low, high = map(self._cost_at, (speed.value, speed.high, speed.low))
        if value is None or low is None or high is None:
            return None
        return Valued(value=value, low=low, high=high)

    def _cost_at(self, tokens_per_second_per_gpu: float) -> float | None:
        at_speed = replace(self.numbers, tokens_per_second_per_gpu=tokens_per_second_per_gpu)
        return at_speed.value(Objective.DOLLARS_PER_BILLION_TOKENS)

    @property
    def total_speed(self) -> Valued:
        """Tokens per second of all GPUs."""
        num, speed = self.num_gpus, self.speed
        return Valued(value=num * speed.value, low=num * speed.low, high=num * speed.high)


def _exact(value: float) -> Valued:
    """Return a value without an interval."""
    return Valued(value=value, low=value, high=value)


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """Two of the objectives, one against the other."""

    x: Callable[[Candidate], Valued | None]
    y: Callable[[Candidate], Valued | None]
    x_title: str
    y_title: str
    # A sentence that says why the panel is absent, if no layout has both values.
    why_absent: str = ""

    def has(self, one: Candidate) -> bool:
        """Return whether both values of a layout are known."""
        return self.x(one) is not None and self.y(one) is not None


_PANELS = (
    _Panel(
        x=lambda one: one.memory,
        y=lambda one: one.speed,
        x_title="memory taken of the device, worst rank (GiB)",
        y_title="tokens/s/GPU",
    ),
    _Panel(
        x=lambda one: one.energy,
        y=lambda one: one.speed,
        x_title="energy of a token (J)",
        y_title="tokens/s/GPU",
        why_absent="Energy is not shown: no GPU reported its power.",
    ),
    _Panel(
        x=lambda one: one.total_speed,
        y=lambda one: one.cost,
        x_title="tokens/s of all GPUs",
        y_title="$ for 1e9 tokens",
        why_absent="Dollars are not shown: no price of a GPU-hour is known (price_per_gpu_hour).",
    ),
)


def candidates(sweeps: Sequence[SweepRows]) -> tuple[Candidate, ...]:
    """Return the measured layouts whose memory, energy or price is known."""
    points = {
        point.trial.id: point
        for sweep in sweeps
        for front in sweep.fronts
        for point in front.points
    }
    found = [
        one
        for sweep in sweeps
        for detail in sweep.trials
        if (one := _candidate(sweep, detail, points.get(detail.trial.id))) is not None
    ]
    return tuple(one for one in found if any(panel.has(one) for panel in _PANELS))


def _candidate(sweep: SweepRows, detail: TrialDetail, point: ShownPoint | None) -> Candidate | None:
    from orchestrator.sweep.trial_numbers import numbers_of  # needs SQLAlchemy

    trial, cell = detail.trial, detail.cell.cell
    if not trial.is_ranked or trial.tokens_per_second_per_gpu is None:
        return None
    price = sweep.sessions[-1].price_per_gpu_hour if sweep.sessions else None
    return Candidate(
        trial_id=trial.id,
        problem=f"{cell.model.name}, sequence {cell.sequence_length:,},"
        f" batch {cell.global_batch_size:,}",
        numbers=numbers_of(trial, price_per_gpu_hour=price),
        num_gpus=cell.num_gpus,
        memory_bytes=taken_peak(trial),
        is_on_front=point is not None and point.is_on_front,
        may_be_on_front=point is not None and not point.is_on_front,
        compared=None if point is None else _speed(point, detail),
        of_run=trial.relative_confidence,
    )


def _speed(point: ShownPoint, detail: TrialDetail) -> Valued | None:
    if (speed := point.values.get(Objective.TOKENS_PER_SECOND_PER_GPU)) is not None:
        return speed
    if (seconds := point.values.get(Objective.STEP_SECONDS)) is None:
        return None
    ends = (seconds.value, seconds.high, seconds.low)
    value, low, high = map(detail.cell.cell.tokens_per_second_per_gpu, ends)
    return Valued(value=value, low=low, high=high)


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw a panel for each pair of objectives: the front in colours, the other layouts grey."""
    found = candidates(sweeps)
    panels = [panel for panel in _PANELS if any(map(panel.has, found))]
    blank = Picture(
        name="pareto",
        title="The Pareto front: speed, memory, energy, dollars",
        question="What is the cheap runner-up with headroom?",
    )
    if not found:
        return replace(
            blank,
            why_empty="No measured trial has a known peak of memory, power or price; a program of"
            " workload command reports its peak of memory: docs/workloads.md.",
        )
    traces: list[Trace] = []
    layout: dict[str, Any] = {}
    height = PANEL_HEIGHT * len(panels) + GAP * (len(panels) - 1)
    for number, panel in enumerate(panels):
        suffix = "" if number == 0 else str(number + 1)
        shown = [one for one in found if panel.has(one)]
        named = {trace["name"] for trace in traces}
        traces += [
            trace
            | {"legendgroup": trace["name"], "showlegend": trace["name"] not in named}
            | {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
            for trace in _traces(panel, shown, [one.problem for one in found])
        ]
        # The first panel is the uppermost.
        top = 1 - number * (PANEL_HEIGHT + GAP) / height
        axes = (("x", panel.x_title, "y"), ("y", panel.y_title, "x"))
        for letter, title, other in axes:
            axis = PictureAxis(title=title, from_zero=True).layout()
            layout[f"{letter}axis{suffix}"] = axis | {"anchor": f"{other}{suffix}"}
        layout[f"yaxis{suffix}"]["domain"] = [max(top - PANEL_HEIGHT / height, 0.0), top]
    return replace(
        blank,
        caption=_caption(sweeps, found, panels),
        figure={"data": traces, "layout": layout | {"height": height}},
    )


def _traces(panel: _Panel, shown: Sequence[Candidate], problems: Sequence[str]) -> list[Trace]:
    dominated = [one for one in shown if not one.is_on_front and not one.may_be_on_front]
    possible = [one for one in shown if one.may_be_on_front]
    traces = [
        _trace(panel, dominated, "dominated by another", GREY, opacity=0.35),
        _trace(panel, possible, "could be on the front", GREY, symbol="circle-open"),
    ]
    for number, problem in enumerate(dict.fromkeys(problems)):
        some = [one for one in shown if one.is_on_front and one.problem == problem]
        some.sort(key=lambda one: _value(panel.x(one)))
        traces.append(_trace(panel, some, problem, COLORS[number % len(COLORS)]))
    return [trace for trace in traces if trace["x"]]


def _value(valued: Valued | None) -> float:
    assert valued is not None, "a panel shows what it has"
    return valued.value


def _caption(
    sweeps: Sequence[SweepRows], found: Sequence[Candidate], panels: Sequence[_Panel]
) -> str:
    objectives = dict.fromkeys(
        objective for sweep in sweeps for front in sweep.fronts for objective in front.objectives
    )
    goals = ", ".join(objective_titles(objective)[0] for objective in objectives)
    num_front = sum(one.is_on_front for one in found)
    num_possible = sum(one.may_be_on_front for one in found)
    text = f"On the front by {goals}: {num_front:,} of {show.counted(len(found), 'layout')}"
    if num_possible:
        verb = "is" if num_possible == 1 else "are"
        text += f"; {num_possible:,} more {verb} dominated by less than noise"
    text = (
        f"{text}. Lines are 95 % intervals. Larger points use more GPUs. Only layouts of one"
        " sweep and one problem are compared, as by `sweep best --pareto`."
    )
    if len(panels) > 1:
        text += " Each part shows the same layouts by two of these numbers."
    absent = [panel.why_absent for panel in _PANELS if panel.why_absent and panel not in panels]
    return " ".join([text, *absent])


def _trace(
    panel: _Panel,
    some: Sequence[Candidate],
    name: str,
    color: str,
    *,
    symbol: str = "circle",
    opacity: float = 0.9,
) -> Trace:
    numbers = sorted({one.num_gpus for one in some})
    xs = [valued for one in some if (valued := panel.x(one)) is not None]
    ys = [valued for one in some if (valued := panel.y(one)) is not None]
    trace: Trace = {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [one.value for one in xs],
        "y": [one.value for one in ys],
        "customdata": [one.trial_id for one in some],
        "text": [one.speed_text for one in some],
        "hovertemplate": _HOVER,
        "marker": {
            "color": color,
            "symbol": symbol,
            "size": [min(7 + 2 * numbers.index(one.num_gpus), 21) for one in some],
            "opacity": opacity,
        },
    }
    for letter, values in (("x", xs), ("y", ys)):
        if any(one.high > one.low for one in values):
            trace[f"error_{letter}"] = _intervals(values, color)
    return trace


def _intervals(values: Sequence[Valued], color: str) -> dict[str, object]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [one.high - one.value for one in values],
        "arrayminus": [one.value - one.low for one in values],
        "color": color,
        "thickness": 1,
    }
