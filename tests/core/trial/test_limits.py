"""Limits of phases: minimums, predictions, seen steps, and the message when a limit passes."""

from __future__ import annotations

from math import exp

import pytest

from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.sweepfile.measurement_section import Limits, Measuring
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.limits import (
    COMPILE_SECONDS,
    LAUNCH_SECONDS,
    LONGEST_SDS,
    MINIMUM_SECONDS,
    NOTHING_SEEN,
    RENDEZVOUS_SECONDS_PER_RANK,
    STEP_MULTIPLE,
    TOTAL_MULTIPLE,
    PredictedStep,
    SeenSteps,
    limit_seconds,
    longest_safe_step,
    passed_message,
    resolve_limits,
)
from orchestrator.core.trial.protocol import (
    MAX_SECONDS,
    Device,
    LimitName,
    MeasurementPlan,
    TrialRequest,
)
from orchestrator.core.trial.rank_profile import ProfilePlan

PLAN = MeasurementPlan(warmup_steps=3, min_steps=5, max_steps=50, relative_confidence=0.02)
SURE = PredictedStep(
    seconds=80.0,
    log_sd=0.0,
    # sweeps/playbook.yaml predicts 73 to 81 s for 70B on 16 GPUs.
)


def request(
    predicted: PredictedStep | None = None, *, compiles: bool = False, **numbers: float
) -> TrialRequest:
    asked = {name: numbers.get(name) for name in LimitName}
    return TrialRequest(
        sweep="t",
        trial_id=1,
        attempt=1,
        workload="synthetic",
        model=PRESETS["llama-tiny"],
        sequence_length=64,
        layout=Layout(data_parallel_size=16),
        device=Device.CPU,
        measurement=PLAN,
        limits=resolve_limits(
            asked, plan=PLAN, num_ranks=16, predicted=predicted, compiles=compiles
        ),
        seed=0,
    )


def test_a_number_in_the_file_is_that_number_whatever_is_predicted_or_seen() -> None:
    numbers = {name.value: 7.0 + place for place, name in enumerate(LimitName)}
    asked = request(SURE, **numbers)
    assert {
        name.value: limit_seconds(asked, name, SeenSteps(first_seconds=900.0)) for name in LimitName
    } == numbers


def test_without_a_prediction_every_limit_is_its_floor_until_a_step_is_seen() -> None:
    asked = request()
    floors = dict(MINIMUM_SECONDS) | {
        LimitName.RENDEZVOUS: 120.0 + 16 * RENDEZVOUS_SECONDS_PER_RANK
    }
    assert {name: limit_seconds(asked, name, NOTHING_SEEN) for name in LimitName} == floors


def test_a_predicted_step_that_is_long_raises_the_limits_that_it_is_part_of() -> None:
    limits = request(SURE).limits
    assert limits.first_step == 300.0 + STEP_MULTIPLE * 80.0
    assert limits.steady == STEP_MULTIPLE * 80.0
    around = limits.start + limits.rendezvous + limits.first_step + limits.teardown
    assert limits.total == around + TOTAL_MULTIPLE * 53 * 80.0
    assert (limits.start, limits.teardown) == (120.0, 20.0)


def test_layers_that_are_compiled_have_more_time_for_their_first_step() -> None:
    plain, compiled = request(SURE).limits, request(SURE, compiles=True).limits
    assert compiled.first_step == plain.first_step + COMPILE_SECONDS == 600.0 + STEP_MULTIPLE * 80.0
    assert compiled.total == plain.total + COMPILE_SECONDS
    assert compiled.steady == plain.steady
    unknown = request(compiles=True).limits
    assert (unknown.first_step, unknown.total) == (600.0, 2100.0)
    assert request(compiles=True, first_step=7.0).limits.first_step == 7.0


def test_a_step_counts_as_long_as_it_may_be_in_nine_cases_of_ten() -> None:
    unsure = PredictedStep(seconds=80.0, log_sd=0.4)
    assert request(unsure).limits.steady == pytest.approx(
        STEP_MULTIPLE * 80.0 * exp(LONGEST_SDS * 0.4)
    )


def test_a_short_step_lowers_no_limit() -> None:
    short = PredictedStep(seconds=0.5, log_sd=0.4)
    assert request(short).limits.steady == 60.0
    assert (
        limit_seconds(
            request(short), LimitName.STEADY, SeenSteps(first_seconds=1.0, slowest_seconds=0.6)
        )
        == 60.0
    )


def test_a_limit_follows_the_first_step_until_a_later_one_has_ended() -> None:
    assert (
        limit_seconds(request(), LimitName.STEADY, SeenSteps(first_seconds=100.0))
        == STEP_MULTIPLE * 100.0
    )
    assert (
        limit_seconds(
            request(), LimitName.STEADY, SeenSteps(first_seconds=100.0, slowest_seconds=20.0)
        )
        == STEP_MULTIPLE * 20.0
    )
    assert (
        limit_seconds(
            request(SURE), LimitName.STEADY, SeenSteps(first_seconds=100.0, slowest_seconds=20.0)
        )
        == STEP_MULTIPLE * 80.0
    )


def test_the_total_follows_the_steps_that_are_asked_for() -> None:
    seen = SeenSteps(first_seconds=60.0, slowest_seconds=40.0)
    assert (
        limit_seconds(request(), LimitName.TOTAL, seen)
        == 120.0 + 128.0 + 300.0 + 20.0 + TOTAL_MULTIPLE * 53 * 40.0
    )


@pytest.mark.parametrize(
    ("asked", "name", "seen", "said"),
    [
        (
            request(steady=60.0),
            LimitName.STEADY,
            NOTHING_SEEN,
            "steady limit of 60 s passed (measurement.limits.steady of the sweep file; if this is "
            "no hang, raise it or write auto)",
        ),
        (request(), LimitName.STEADY, NOTHING_SEEN, "steady limit of 60 s passed (auto: the "
        "minimum; if this is no hang, set measurement.limits.steady)"),
        (request(SURE), LimitName.STEADY, NOTHING_SEEN, "auto: 5 x a step, predicted to take at "
        "most 80 s;"),
        (request(SURE), LimitName.FIRST_STEP, NOTHING_SEEN, "auto: 300 s and 5 x a step, predicted "
        "to take at most 80 s;"),
        (request(SURE, compiles=True), LimitName.FIRST_STEP, NOTHING_SEEN, "auto: 600 s to compile "
        "and 5 x a step, predicted to take at most 80 s;"),
        (request(compiles=True), LimitName.FIRST_STEP, NOTHING_SEEN, "first_step limit of 600 s "
        "passed (auto: the minimum;"),
        (request(compiles=True), LimitName.TOTAL, NOTHING_SEEN, "auto: the minimum;"),
        (request(SURE), LimitName.TOTAL, NOTHING_SEEN, "auto: 2 x 53 steps and what is around "
        "them, predicted to take at most 80 s;"),
        (request(SURE), LimitName.STEADY, SeenSteps(first_seconds=90.0), "steady limit of 450 s "
        "passed (auto: 5 x a step, the first took 90 s;"),
        (request(), LimitName.STEADY, SeenSteps(first_seconds=9.0, slowest_seconds=30.0), "auto: 5 "
        "x a step, the slowest so far took 30 s;"),
        (request(), LimitName.RENDEZVOUS, NOTHING_SEEN, "rendezvous limit of 128 s passed (auto: "
        "120 s and 0.5 s a rank;"),
    ],
)  # fmt: skip
def test_a_hang_names_the_limit_where_it_comes_from_and_what_to_change(
    asked: TrialRequest, name: LimitName, seen: SeenSteps, said: str
) -> None:
    assert said in passed_message(asked, name, seen)


def test_limits_of_endless_steps_are_numbers_that_messages_can_have() -> None:
    asked = request(PredictedStep(seconds=9e6, log_sd=1000.0))
    assert (asked.limits.steady, asked.limits.total) == (MAX_SECONDS, MAX_SECONDS)
    assert limit_seconds(request(), LimitName.TOTAL, SeenSteps(first_seconds=9e6)) == MAX_SECONDS
    assert request(total=1e8).limits.total == MAX_SECONDS


def test_a_limit_that_no_file_sets_names_no_key() -> None:
    asked = request(total=9.0)
    asked = asked.model_copy(update={"limits": asked.limits.model_copy(update={"in_file": False})})
    assert passed_message(asked, LimitName.TOTAL, NOTHING_SEEN) == "total limit of 9 s passed"


def test_auto_is_the_default_and_what_an_earlier_program_stored_stays_a_number() -> None:
    assert Measuring().limits.numbers == {}
    stored = {
        "start": 120.0,
        "rendezvous": 120.0,
        "first_step": 300.0,
        "steady": 60.0,
        "teardown": 20.0,
        "total": 1800.0,
    }
    before = Measuring.model_validate({"limits": stored})
    assert before.limits.numbers == {LimitName(name): value for name, value in stored.items()}
    resolved = resolve_limits(
        before.limits.asked, plan=before.plan(Device.CUDA), num_ranks=16, predicted=SURE
    )
    assert resolved.steady == 60.0
    again = Limits.model_validate(Limits(steady=7.0).model_dump(mode="json"))
    assert again.numbers == {LimitName.STEADY: 7.0}


def test_the_longest_safe_step_is_a_share_of_a_limit_or_all_steps_of_the_plan_fill_it() -> None:
    """Half of a limit; of `total`, what a launch leaves, over 3 + 50 steps."""
    for name in (LimitName.FIRST_STEP, LimitName.STEADY):
        found = longest_safe_step(name, 600.0, plan=PLAN, log_sd=0.3)
        assert found == pytest.approx(600.0 / 2 / exp(LONGEST_SDS * 0.3))
    total = longest_safe_step(LimitName.TOTAL, LAUNCH_SECONDS + 530.0, plan=PLAN, log_sd=0.3)
    assert total == pytest.approx(530.0 / 53)
    assert longest_safe_step(LimitName.TOTAL, 1.0, plan=PLAN, log_sd=0.3) == 0.0
    for name in (LimitName.START, LimitName.RENDEZVOUS, LimitName.TEARDOWN):
        assert longest_safe_step(name, 600.0, plan=PLAN, log_sd=0.3) is None


@pytest.mark.parametrize(
    ("on_last", "one_for_all", "reporting", "processes"),
    [(False, False, 0, 4), (True, False, 12, 4), (False, True, 0, 1)],
)
def test_of_16_ranks_on_four_nodes_rank_0_or_the_first_of_the_last_node_reports(
    on_last: bool, one_for_all: bool, reporting: int, processes: int
) -> None:
    asked = request().model_copy(
        update={"reports_on_last_node": on_last, "one_rank_per_node": one_for_all}
    )
    order = LaunchOrder(request=asked, program="workloads.llama", local_world_size=4)
    assert asked.reporting_rank(local_world_size=4) == order.reporting_rank == reporting
    assert order.num_processes == processes


def test_a_request_says_of_itself_only_what_it_is_told() -> None:
    asked = request()
    assert not asked.one_rank_per_node
    assert not asked.reports_on_last_node
    assert (asked.peaks, asked.nodes, asked.profile, asked.elapsed_seconds) == ((), (), None, 0.0)
    assert (asked.tag, asked.folder) == ("t/1/1", "attempt-1")
    profiled = asked.model_copy(update={"profile": ProfilePlan(), "attempt": 2})
    assert (profiled.tag, profiled.folder) == ("t/1/profile-2", "profile-2")
