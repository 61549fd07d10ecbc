"""What is advised where several layouts could be the fastest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.core.sweepfile.search_section import Confirm
from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.core.trial.winner import Margin
from orchestrator.report import tie_advice
from orchestrator.report.ranking import Compared, Ranking
from orchestrator.sweep.progress import StopReason
from tests.cli.cli_store import BUSY


def tied_in(
    *,
    repeats: int = 2,
    contenders: int = 3,
    num: int = 2,
    workload: str = "llama",
    name: str = "a",
    spread: float | None = 0.03,
    load: MachineLoad = NO_LOAD,
    runs_to_decide: int | None = None,
    stop_reason: str | None = None,
    compared: Mapping[int, Compared] | None = None,
    layouts: Sequence[Layout] | None = None,
) -> str:
    """What is advised of so many tied trials, 1 % apart; the last has the simplest layout.

    `layouts`: those of the trials instead.
    """
    confirm = {"repeats": repeats, "contenders": contenders}
    simulated = name.endswith("-simulated")
    sweep: Any = SimpleNamespace(
        spec_json=json.dumps({"search": {"confirm": confirm}}),
        conditions={"workload": workload},
        is_simulated=simulated,
    )
    if layouts is None:
        several = Layout(grad_accum_steps=2, recompute=Recompute.parse("full"))
        layouts = [*[several] * (num - 1), Layout(micro_batch_size=2)]
    rows: Any = [
        SimpleNamespace(id=place, layout=layout, load=load)
        for place, layout in enumerate(layouts, 1)
    ]
    ranking = Ranking(
        leading=rows,
        tied=[row.id for row in rows],
        text="",
        drift=None,
        margin=Margin(runner_up=2, value=0.01, low=-0.01, high=0.03),
        spread=spread,
        runs_to_decide=runs_to_decide,
        compared=compared or {},
    )
    return tie_advice.tie_advice(sweep, ranking, stop_reason)


def test_the_simplest_is_not_advised_where_it_was_clearly_slower() -> None:
    seconds = {1: 1.0, 2: 1.04, 3: 1.9}  # the third is the simplest
    compared = {
        key: Compared(step_seconds=each, tokens_per_second_per_gpu=None, relative_confidence=1.0)
        for key, each in seconds.items()
    }
    advice = tied_in(num=3, compared=compared)
    assert advice.endswith("or take trial 1, the fastest so far")
    assert tied_in(num=2, compared=compared).endswith("or take trial 2, the simplest of them")
    alone = tied_in(num=2, compared={1: compared[1], 2: compared[3]})
    assert alone.endswith("or take trial 1, the fastest so far")
    full = Layout(grad_accum_steps=2, recompute=Recompute.parse("full"))
    of_near = tied_in(num=3, compared=compared, layouts=[full, Layout(), Layout()])
    assert of_near.endswith("or take trial 2, the simplest of those nearly as fast as trial 1")


@pytest.mark.parametrize(
    ("first", "second", "simplest"),
    [("full", "none", 2), ("full", "selective", 2), ("selective", "full", 1), ("none", "full", 1)],
)
def test_of_as_many_techniques_the_layout_that_recomputes_less_is_simpler(
    first: str, second: str, simplest: int
) -> None:
    """No recomputation has a technique more here: micro-batches of half the size."""
    layouts = [
        Layout(grad_accum_steps=1 + (mode == "none"), recompute=Recompute.parse(mode))
        for mode in (first, second)
    ]
    assert tied_in(layouts=layouts).endswith(f"take trial {simplest}, the simplest of them")


@pytest.mark.parametrize(
    ("reason", "key"),
    [
        (StopReason.GPU_HOURS, "search.max_gpu_hours"),
        (StopReason.COST, "search.max_cost"),
        (StopReason.WALL_TIME, None),  # each call has a new one
        (StopReason.PLATEAU, None),
    ],
)
def test_a_budget_that_is_spent_has_to_be_raised_for_repeats(
    reason: StopReason, key: str | None
) -> None:
    advice = tied_in(stop_reason=reason.value)
    assert "search.confirm.repeats=4" in advice
    assert ("is spent" in advice) == (key is not None)
    assert key is None or f"{key} is spent, so raise it, too)" in advice


def test_of_tied_layouts_it_is_said_what_decides_and_which_is_the_simplest() -> None:
    advice = tied_in()
    assert "sweep run FILE search.confirm.repeats=4)" in advice
    assert "quieter machine" in advice
    assert advice.endswith("; or take trial 2, the simplest of them")


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ({"repeats": 0}, "FILE search.confirm.repeats=2)"),
        ({"repeats": 20}, "FILE search.confirm.repeats=32)"),
        ({"num": 5}, "FILE search.confirm.repeats=4 search.confirm.contenders=5)"),
        ({"repeats": 32, "num": 5}, "FILE search.confirm.contenders=5)"),
        ({"name": "a-simulated"}, "FILE --simulate search.confirm.repeats=4)"),
    ],
)
def test_the_keys_to_set_follow_from_those_of_the_file(file: dict[str, Any], keys: str) -> None:
    advice = tied_in(**file)
    assert keys in advice
    assert ("quieter" in advice) is ("name" not in file)


@pytest.mark.parametrize(
    ("measured", "is_advised"),
    [
        ({"spread": 0.0004}, False),
        ({"spread": None}, False),
        ({"spread": 0.0004, "load": BUSY}, True),
        ({"spread": 0.0004, "repeats": 32, "contenders": 64}, False),
    ],
    ids=["narrower than the difference", "unknown", "disturbed", "no more repeats"],
)
def test_a_quieter_machine_is_advised_only_against_noise(
    measured: dict[str, Any], is_advised: bool
) -> None:
    assert ("quieter" in tied_in(**measured)) is is_advised


def test_the_repeats_that_are_advised_may_show_the_difference() -> None:
    advice = tied_in(runs_to_decide=13)
    assert (
        "search.confirm.repeats=12; about 13 runs of each of the first two may be enough)" in advice
    )
    enough = tied_in(runs_to_decide=3)
    assert "search.confirm.repeats=4;" in enough, "the other layouts have fewer runs"
    assert enough.count("at most 5 runs of each, and about 3 of each of the first two may") == 1
    equal = tied_in(runs_to_decide=2000, spread=0.0004)
    assert equal.startswith("More than 1,000 runs of each of the first two would be needed")
    assert equal.endswith(
        "and search.confirm.repeats is 32 at most: take trial 2, the simplest of them"
    )
    # On a quieter machine so many runs may not be needed.
    assert "32 at most: measure on a quieter machine" in tied_in(runs_to_decide=2000)
    assert "quieter" not in tied_in(runs_to_decide=2000, name="a-simulated")


def test_no_more_repeats_are_advised_than_there_can_be() -> None:
    assert "sweep run" not in tied_in(repeats=32, contenders=64)
    assert "sweep run" not in tied_in(workload="replay")
    Confirm(repeats=tie_advice.MOST_REPEATS, contenders=tie_advice.MOST_CONTENDERS)
    for name, most in (
        ("repeats", tie_advice.MOST_REPEATS),
        ("contenders", tie_advice.MOST_CONTENDERS),
    ):
        with pytest.raises(ValueError, match="less than or equal"):
            Confirm.model_validate({name: most + 1})
