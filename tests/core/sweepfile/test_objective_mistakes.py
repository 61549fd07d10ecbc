"""Objectives that nothing could measure, or that the search cannot look for."""

from __future__ import annotations

import pytest

from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.sweepfile.objective_mistakes import objective_mistake
from orchestrator.core.sweepfile.search_section import Search, Strategy
from orchestrator.core.trial.merit import Merit

SPEED = Objective.TOKENS_PER_SECOND_PER_GPU
ENERGY, HEADROOM = Objective.JOULES_PER_TOKEN, Objective.MEMORY_HEADROOM


def mistake(
    *objectives: Objective,
    workload: str = "llama",
    device: str = "h200",
    strategy: Strategy = Strategy.AUTO,
    early_stop: bool | None = None,
) -> str | None:
    search = Search(strategy=strategy)
    if early_stop is not None:
        search = search.model_copy(update={"early_stop": early_stop})
    return objective_mistake(objectives, search, workload=workload, device=device)


@pytest.mark.parametrize("strategy", Strategy)
def test_every_strategy_looks_for_speed_whatever_measures_it(strategy: Strategy) -> None:
    speeds = [one for one in Objective if one.merit is Merit.SPEED]
    for workload, device in (("llama", "cpu"), ("synthetic", "auto"), ("replay", "h200")):
        assert mistake(*speeds, workload=workload, device=device, strategy=strategy) is None


@pytest.mark.parametrize(
    ("workload", "device", "why"),
    [
        ("llama", "cpu", "device cpu has none"),
        ("synthetic", "h200", "workload synthetic uses none"),
        ("replay", "auto", "workload replay uses none"),
    ],
)
def test_energy_is_refused_where_no_gpu_tells_it(workload: str, device: str, why: str) -> None:
    for objectives in ((ENERGY,), (SPEED, ENERGY)):
        said = mistake(*objectives, workload=workload, device=device)
        assert said is not None
        assert why in said


@pytest.mark.parametrize("device", ["auto", "h200"])
def test_energy_of_gpus_is_let_through(device: str) -> None:
    assert mistake(SPEED, ENERGY, workload="command", device=device) is None


@pytest.mark.parametrize("strategy", Strategy)
def test_a_front_needs_a_strategy_that_finds_it(strategy: Strategy) -> None:
    said = mistake(SPEED, HEADROOM, strategy=strategy)
    if strategy.finds_fronts:
        assert said is None
    else:
        assert said is not None
        assert said.startswith(f"strategy {strategy} looks for the fastest layout only")


@pytest.mark.parametrize(("early_stop", "is_refused"), [(True, True), (False, False)])
def test_slow_trials_may_be_on_the_front_and_are_not_ended_early(
    early_stop: bool, is_refused: bool
) -> None:
    said = mistake(SPEED, HEADROOM, early_stop=early_stop)
    assert (said is not None and "leave early_stop out" in said) is is_refused
    assert mistake(SPEED, early_stop=early_stop) is None
