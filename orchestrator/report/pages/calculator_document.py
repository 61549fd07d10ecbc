"""The page of the calculator: its choices, and the prediction of one layout, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.report import explanation_text as say
from orchestrator.report import quantities as show
from orchestrator.report.pictures.picture import COLORS

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.core.problem.layout import Layout
    from orchestrator.core.search.calculator import Calculator
    from orchestrator.core.search.explanation import Explanation, LayoutChange

# The entry for the value that follows from the other axes.
FOLLOWS = ""
# A step has one part more than there are colours.
_COLORS = (*COLORS, "#7F7F00")


def choice_rows(calculator: Calculator, layout: Layout) -> list[dict[str, Any]]:
    """Return the controls of the page, with the values of a layout chosen.

    A value that is no choice yet becomes one.
    """
    from orchestrator.core.problem.layout import SHORT_NAMES
    from orchestrator.core.search.calculator import texts_of

    short = {name: short for short, name in SHORT_NAMES.items()}
    chosen, following = texts_of(layout), calculator.following(layout)
    rows = []
    for one in calculator.choices:
        value = chosen[one.name]
        values = list(one.values)
        if value not in values:
            values = sorted([*values, value], key=int) if one.is_number else [*values, value]
        if one.may_follow:
            values = [FOLLOWS, *values]
            value = FOLLOWS if one.name in following else value
        words = one.name.replace("_", " ")
        rows.append(
            {
                "name": one.name,
                "words": f"{words} ({short[one.name]})" if one.name in short else words,
                "is_number": one.is_number,
                "values": values,
                "in_file": [text for text in values if text in one.in_file],
                "place": values.index(value),
            }
        )
    return rows


def calculation(found: Explanation, *, why_no_times: str) -> dict[str, Any]:
    """Return what the page shows of one layout: bars, tables and sentences, or the refusal."""
    from orchestrator.core.search.calculator import texts_of

    shown: dict[str, Any] = {
        "layout": found.layout.key,
        "short": found.layout.short,
        "fields": texts_of(found.layout),
        "refusal": found.illegal,
        "memory": None,
        "step": None,
        "numbers": [],
    }
    if found.illegal is not None:
        nearest = [
            _change(one, f"{one.layout.short} ({say.differences(one)})") for one in found.nearest
        ]
        title = "The nearest legal layouts of the sweep file" if nearest else say.NOTHING_LEGAL
        return shown | {
            "sentences": [f"Not legal: {found.illegal}."],
            "changes": [{"title": title, "layouts": nearest}],
        }
    return shown | {
        "sentences": [
            f"{say.memory_sentence(found)}.",
            f"{say.step_sentence(found, why_no_times=why_no_times)}.",
        ],
        "memory": _memory(found),
        "step": _step(found),
        "numbers": _numbers(found),
        "changes": _changes(found),
    }


def _memory(found: Explanation) -> dict[str, Any]:
    limit = found.memory_limit_bytes
    return {
        "parts": _parts(found.memory_by_part, show.memory),
        "total": found.memory_bytes,
        "band": say.memory_band(found),
        "limit": limit,
        "limit_text": None if limit is None else f"limit {show.memory(limit)}",
        "fits": found.fits,
    }


def _step(found: Explanation) -> dict[str, Any] | None:
    if found.seconds_by_part is None:
        return None
    return {
        "parts": _parts(found.seconds_by_part, show.step_time),
        "total": found.step_seconds,
        "band": say.step_band(found),
    }


def _parts(parts: Mapping[str, float], text: Callable[[float], str]) -> list[dict[str, Any]]:
    """Return the parts that are not zero, each with a colour of its own."""
    total = sum(parts.values())
    return [
        {
            "name": name.replace("_", " "),
            "value": value,
            "text": text(value),
            "share": show.percent(value / total),
            "color": _COLORS[place],
        }
        for place, (name, value) in enumerate(parts.items())
        if value > 0
    ]


def _numbers(found: Explanation) -> list[tuple[str, str, str]]:
    """Return the rows of the table: what it is, the prediction, four of five within."""
    rate = found.tokens_per_second_per_gpu
    num_gpus = found.cell.num_gpus
    memory, step = say.memory_band(found), say.step_band(found)
    rates = None
    if step is not None:
        rates = tuple(found.cell.tokens_per_second_per_gpu(seconds) for seconds in step[::-1])
    chance = found.probability_of_fitting
    return [
        ("peak memory", show.memory(found.memory_bytes), _between(memory, show.memory)),
        ("memory limit", show.memory(found.memory_limit_bytes), ""),
        ("probability of fitting", show.UNKNOWN if chance is None else f"{chance:.0%}", ""),
        ("step time", show.step_time(found.step_seconds), _between(step, show.step_time)),
        ("tokens/s/GPU", show.tokens_rate(rate), _between(rates, show.tokens_rate)),
        (
            f"tokens/s on {show.counted(num_gpus, 'GPU')}",
            show.tokens_rate(None if rate is None else rate * num_gpus),
            "",
        ),
        ("MFU", show.percent(found.mfu), ""),
    ]


def _between(band: Sequence[float] | None, text: Callable[[float], str]) -> str:
    return "" if band is None else f"{text(band[0])} to {text(band[1])}"


def _changes(found: Explanation) -> list[dict[str, Any]]:
    groups = []
    if found.to_fit is not None:
        change = _change(found.to_fit, say.fitting_sentence(found, found.to_fit))
        groups.append({"title": "What fits", "layouts": [change]})
    elif not found.fits:
        groups.append({"title": say.NOTHING_FITS, "layouts": []})
    if found.seconds_by_part is not None:
        faster = [_change(one, say.faster_sentence(found, one)) for one in found.faster]
        title = "Predicted faster, with one change" if faster else say.NOTHING_FASTER
        groups.append({"title": title, "layouts": faster})
    return groups


def _change(change: LayoutChange, text: str) -> dict[str, Any]:
    from orchestrator.core.search.calculator import texts_of

    return {"text": text, "fields": texts_of(change.layout)}
