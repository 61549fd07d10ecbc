"""The sentences about the prediction of one layout, which the terminal and the page share."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.problem.hardware import GIB
from orchestrator.core.search.explanation import Explanation, LayoutChange
from orchestrator.report import explanation_text as say
from tests.core.search.test_calculator import calculator_of


def explained() -> Explanation:
    """60 of 80 GiB and 2 s for 1024 x 4096 tokens on 8 GPUs."""
    found = calculator_of("8b.yaml", 0)
    return replace(
        found.explain(found.start),
        memory_by_part={"parameters": 20.0 * GIB, "activations": 40.0 * GIB},
        memory_limit_bytes=80.0 * GIB,
        memory_band=(0.9, 1.2),
        probability_of_fitting=0.97,
        seconds_by_part={"compute": 1.5, "optimizer": 0.5},
        step_band=(0.5, 2.0),
    )


def change(found: Explanation, seconds: float | None) -> LayoutChange:
    return LayoutChange(
        layout=found.layout,
        differs={"micro_batch_size": (8, 4), "zero_stage": (0, 1), "options": ((), (("a", 1),))},
        step_seconds=seconds,
        memory_bytes=61.2 * GIB,
        fits=True,
    )


def test_a_measured_step_outside_of_the_band_is_compared_with_the_prediction() -> None:
    # 2 s, and 1 s to 4 s.
    found = explained()
    assert say.against_band(found, 4.0) == ""
    assert say.against_band(found, 3000.0) == ", 1,500 times the prediction"
    assert say.against_band(found, 78.0) == ", 39 times the prediction"
    assert say.against_band(found, 199.2) == ", 100 times the prediction"
    assert say.against_band(found, 0.9) == ", 0.45 times the prediction"
    assert say.against_band(replace(found, step_band=None), 78.0) == ""


def test_memory_is_said_with_what_is_to_spare_or_missing() -> None:
    found = explained()
    assert say.memory_sentence(found) == (
        "Memory: 60.0 of 80.0 GiB (54.0 GiB to 72.0 GiB in four of five cases) predicted: fits with"
        " 20.0 GiB to spare"
        " (probability of fitting 97%)"
    )
    # Without a device no band is known.
    found = replace(found, memory_band=None)
    small = replace(found, memory_limit_bytes=50.0 * GIB, probability_of_fitting=None)
    assert say.memory_sentence(small) == "Memory: 60.0 of 50.0 GiB predicted: 10.0 GiB too much"
    doubtful = replace(found, probability_of_fitting=0.37)
    assert say.memory_sentence(doubtful) == (
        "Memory: 60.0 of 80.0 GiB predicted: 20.0 GiB below the limit, and yet more likely not to"
        " fit (probability of fitting 37%)"
    )
    surely_not = replace(found, probability_of_fitting=0.0)
    assert "more likely not to fit (probability of fitting 0%)" in say.memory_sentence(surely_not)
    unlimited = replace(found, memory_limit_bytes=None)
    assert "no limit is known" in say.memory_sentence(unlimited)


def test_a_step_is_said_with_its_band_and_its_speed() -> None:
    # 4,194,304 tokens in 2 s on 8 GPUs.
    assert say.step_sentence(explained(), why_no_times="") == (
        "Step: 2.000 s (1.000 s to 4.000 s in four of five cases) predicted, 262,144 tokens/s/GPU"
    )
    unknown = replace(explained(), seconds_by_part=None)
    assert say.step_sentence(unknown, why_no_times="cores have no data sheet") == (
        "Step: no time is predicted: cores have no data sheet"
    )


def test_a_change_is_said_in_short_names_with_its_gain() -> None:
    found = explained()
    differences = "mbs 8 -> 4, zero 0 -> 1, options none -> a=1"
    assert say.fitting_sentence(found, change(found, None)) == (
        f"To fit: {differences}, 61.2 of 80.0 GiB."
    )
    assert say.faster_sentence(found, change(found, 1.6)) == (
        f"{differences}: 1.600 s, 25.0% faster"
    )
    assert say.speed(found, change(found, 2.5)) == ", 20.0% slower"


def test_bands_are_factors_on_the_prediction() -> None:
    found = explained()
    assert say.step_band(found) == (1.0, 4.0)
    assert say.memory_band(found) == (54.0 * GIB, 72.0 * GIB)
    assert say.memory_band(replace(found, memory_band=None)) is None
    assert say.step_band(replace(found, step_band=None)) is None
