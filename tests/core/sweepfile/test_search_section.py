"""How layouts are selected: what a sweep file may say of it, and what holds if it says nothing."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from orchestrator.core.sweepfile.search_section import Confirm, Plateau, Search, Strategy
from orchestrator.core.trial.protocol import Device
from tests.core.sweepfile.bounds import check_bounds


@pytest.mark.parametrize(
    ("section", "name", "taken", "refused"),
    [
        (Plateau, "trials", [1, 10**9], [0]),
        (Plateau, "gain", [0.0, 0.999], [-0.1, 1.0]),
        (Confirm, "contenders", [1, 64], [0, 65]),
        (Confirm, "repeats", [0, 32], [-1, 33]),
        (Search, "seed", [0, (1 << 32) - 1], [-1, 1 << 32]),
        (Search, "max_trials", [1, 10**9], [0]),
        (Search, "max_gpu_hours", [1e-9, 1e9], [0.0]),
        (Search, "max_cost", [1e-9, 1e9], [0.0]),
        (Search, "max_parallel_trials", ["auto", 1, 4096], [0, 4097]),
        (Search, "bound", [1e-9, 0.999], [0.0, 1.0]),
        (Search, "anchor_every", [0, 10_000], [-1, 10_001]),
    ],
)
def test_a_number_is_taken_up_to_its_bounds(
    section: type[BaseModel], name: str, taken: list[object], refused: list[object]
) -> None:
    check_bounds(section, name, taken=taken, refused=refused)


def test_what_the_file_leaves_out() -> None:
    assert Plateau() == Plateau(trials=20, gain=0.01)
    assert Confirm() == Confirm(contenders=3, repeats=2)
    found = Search()
    assert (found.strategy, found.seed, found.anchor_every) == (Strategy.AUTO, 0, 8)
    assert (found.max_trials, found.max_gpu_hours, found.max_cost) == (None, None, None)


@pytest.mark.parametrize(
    ("early_stop", "strategy", "device", "stops"),
    [
        ("auto", "auto", Device.CUDA, True),
        ("auto", "random", Device.CUDA, True),
        ("auto", "exhaustive", Device.CUDA, False),
        ("auto", "auto", Device.CPU, False),
        (True, "exhaustive", Device.CPU, True),
        (False, "auto", Device.CUDA, False),
    ],
)
def test_trials_that_cannot_win_end_early_on_gpus_unless_every_layout_is_asked_for(
    early_stop: object, strategy: str, device: Device, *, stops: bool
) -> None:
    search = Search.model_validate({"early_stop": early_stop, "strategy": strategy})
    assert search.stops_early(device) is stops


def test_a_strategy_of_optuna_finds_no_front() -> None:
    fronts = {strategy for strategy in Strategy if strategy.finds_fronts}
    assert fronts == {Strategy.AUTO, Strategy.EXHAUSTIVE, Strategy.RANDOM}
