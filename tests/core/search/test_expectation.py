"""How many layouts are expected to fit, to run out of memory, and to fail otherwise."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from statistics import NormalDist

import numpy as np
import pytest

from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.search.expectation import (
    even_selection,
    expected_out_of_memory,
    fitting,
    probability_of_fitting,
    share_that_fails,
)
from orchestrator.core.search.planner import plan_cell
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import Device

H100 = DEVICES["h100-sxm"]


def spec(**changes: object) -> SweepSpec:
    return SweepSpec.model_validate(
        {
            "name": "t",
            "model": "llama-3.1-8b",
            "gpus": 8,
            "sequence_length": 4096,
            "global_batch_size": 64,
            "axes": {"zero_stage": [0, 1]},
        }
        | changes
    )


def test_the_number_that_fits_is_a_sum_of_probabilities_within_what_is_sure() -> None:
    wanted = spec(device="h100-sxm")
    (cell,) = wanted.cells()
    candidates = plan_cell(
        wanted, cell, hardware=H100, gpus_per_node=8, device=Device.CPU
    ).candidates
    found = fitting(candidates)
    chances = probability_of_fitting(candidates, np.arange(len(candidates)))
    assert found is not None
    assert chances is not None
    assert found.expected == pytest.approx(chances.sum())
    assert candidates.predict is not None
    predicted = candidates.predict(candidates.table)
    assert candidates.memory_limit_bytes is not None
    usable = candidates.memory_limit_bytes * predicted.usable_share
    assert chances == pytest.approx(predicted.probability_of_fitting(usable))
    assert 0 < found.at_least < found.at_most < len(candidates)
    assert found.at_least <= round(found.expected) <= found.at_most
    everything = expected_out_of_memory(candidates, num_trials=len(candidates))
    assert everything == pytest.approx(len(candidates) - found.expected)
    few = expected_out_of_memory(candidates, num_trials=5)
    assert few is not None
    # What is predicted not to fit comes last.
    assert few < 2


def test_without_a_device_a_limit_of_memory_is_held_against_a_wider_guess() -> None:
    wanted = spec(device="cpu", precision="bf16", device_memory_gib=80)
    (cell,) = wanted.cells()
    candidates = plan_cell(
        wanted, cell, hardware=None, gpus_per_node=8, device=Device.CPU
    ).candidates
    chances = probability_of_fitting(candidates, candidates.order)
    assert chances is not None
    assert ((chances > 0.05) & (chances < 0.95)).any()
    unlimited = spec(device="cpu")
    assert (
        fitting(
            plan_cell(
                unlimited, unlimited.cells()[0], hardware=None, gpus_per_node=8, device=Device.CPU
            ).candidates
        )
        is None
    )


def test_other_failures_are_as_usual_until_trials_tell() -> None:
    assert share_that_fails(num_failed=0, num_measured=0) == pytest.approx(0.1)
    assert share_that_fails(num_failed=0, num_measured=90) == pytest.approx(0.01)
    assert share_that_fails(num_failed=40, num_measured=50) == pytest.approx(0.41)


def test_without_a_device_the_chance_to_fit_is_normal_in_the_logarithm() -> None:
    """The median is 95.5 % of the limit, the spread 18 % for what is not known of the device."""
    wanted = spec(device="cpu", precision="bf16", device_memory_gib=80)
    (cell,) = wanted.cells()
    candidates = plan_cell(
        wanted, cell, hardware=None, gpus_per_node=8, device=Device.CPU
    ).candidates
    limit = 80 * 2**30
    chosen = replace(candidates, memory_bytes=np.full(len(candidates), 0.955 * limit * exp(0.18)))
    found = probability_of_fitting(chosen, np.arange(3))
    assert found is not None
    assert found.tolist() == pytest.approx([NormalDist().cdf(-1.0)] * 3, abs=1e-6)
    half = replace(candidates, memory_bytes=np.full(len(candidates), 0.955 * limit))
    whole = fitting(half)
    assert whole is not None
    assert whole.expected == pytest.approx(len(candidates) / 2, rel=1e-6)
    assert (whole.at_least, whole.at_most) == (0, len(candidates))
    assert expected_out_of_memory(half, num_trials=4) == pytest.approx(2.0, abs=1e-5)


def test_layouts_fit_or_do_not_if_they_do_so_in_nine_cases_of_ten() -> None:
    wanted = spec(device="cpu", precision="bf16", device_memory_gib=80)
    (cell,) = wanted.cells()
    some = plan_cell(wanted, cell, hardware=None, gpus_per_node=8, device=Device.CPU).candidates
    z = NormalDist().inv_cdf(0.9)
    # Just more and just less likely than 90 %, and than 10 %.
    away = np.array([-1.01 * z, -0.99 * z, 0.99 * z, 1.01 * z])
    four = replace(
        some,
        table=some.table.take(np.arange(4)),
        memory_bytes=0.955 * 80 * 2**30 * np.exp(0.18 * away),
        order=np.arange(4),
    )
    found = fitting(four)
    assert found is not None
    assert (found.at_least, found.at_most) == (1, 3)
    # The chances are 90.3, 89.8, 10.2 and 9.7 %; of a single layout, and of none.
    for row, expected in ((0, 0.903), (3, 0.097), (None, 0.0)):
        rows = np.arange(4)[[] if row is None else [row]]
        part = replace(
            four,
            table=four.table.take(rows),
            memory_bytes=four.memory_bytes[rows],
            order=np.arange(len(rows)),
        )
        alone = fitting(part)
        assert alone is not None
        assert alone.expected == pytest.approx(expected, abs=1e-3)
        assert (alone.at_least, alone.at_most) == (row == 0, row == 0)
        assert expected_out_of_memory(part, num_trials=1) == pytest.approx(
            len(rows) - expected, abs=1e-3
        )


def test_of_many_rows_an_even_selection_counts() -> None:
    assert even_selection(0).tolist() == []
    assert even_selection(3).tolist() == [0, 1, 2]
    many = even_selection(10_000)
    assert (len(many), many[0], many[-1]) == (4096, 0, 9999)


def test_of_more_layouts_than_are_looked_at_each_stands_for_several() -> None:
    """10,000 layouts, all at the usable limit: half of them fit, from 4,096 that are looked at."""
    wanted = spec(device="cpu", precision="bf16", device_memory_gib=80)
    (cell,) = wanted.cells()
    few = plan_cell(wanted, cell, hardware=None, gpus_per_node=8, device=Device.CPU).candidates
    rows = np.arange(10_000) % len(few)
    many = replace(
        few,
        table=few.table.take(rows),
        memory_bytes=np.full(10_000, 0.955 * 80 * 2**30),
        order=np.arange(10_000),
    )
    whole = fitting(many)
    assert whole is not None
    assert whole.expected == pytest.approx(5000, rel=1e-6)
    assert (whole.at_least, whole.at_most) == (0, 10_000)
    assert expected_out_of_memory(many, num_trials=8000) == pytest.approx(4000, rel=1e-6)
    sure = fitting(replace(many, memory_bytes=np.full(10_000, 2.0**30)))
    assert sure is not None
    assert (sure.at_least, sure.at_most) == (10_000, 10_000)
