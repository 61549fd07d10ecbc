"""The search in any Optuna study: no layout twice, every outcome recorded whoever ran it, and the
best found in few trials.
"""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from orchestrator.core.errors import UsageInvalid
from orchestrator.search.optuna_sampler import LayoutSampler, LayoutsExhausted

LIMIT = 79.0
LAYOUTS = [
    {"tp": tp, "mbs": mbs, "recompute": r}
    for tp in (1, 2, 4, 8)
    for mbs in (1, 2, 4, 8, 16)
    for r in ("none", "full")
]


@pytest.fixture(autouse=True)
def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def speed(params: dict[str, Any]) -> float:
    """Tokens/s/GPU: small kernels and tensor parallelism cost, and so does recomputation."""
    recomputed = 0.8 if params["recompute"] == "full" else 1.0
    return float(1000 * params["mbs"] ** 0.3 / params["tp"] ** 0.4 * recomputed)


def memory(params: dict[str, Any]) -> float:
    return float(
        20 / params["tp"]
        + params["mbs"] / params["tp"] * (10 if params["recompute"] == "none" else 4)
    )


BEST = max(speed(layout) for layout in LAYOUTS if memory(layout) <= LIMIT)


def measure(
    study: optuna.Study, sampler: LayoutSampler, *, minimise: bool = False
) -> dict[str, Any]:
    trial = study.ask(sampler.distributions)
    if memory(trial.params) > LIMIT:
        trial.set_constraint("memory", memory(trial.params) / LIMIT - 1)
        study.tell(trial, state=TrialState.FAIL)
    else:
        trial.set_user_attr("peak_memory_bytes", memory(trial.params))
        study.tell(trial, 1e4 / speed(trial.params) if minimise else speed(trial.params))
    return trial.params


def new(sampler: LayoutSampler, *, minimise: bool = False) -> optuna.Study:
    return optuna.create_study(direction="minimize" if minimise else "maximize", sampler=sampler)


@pytest.mark.parametrize("minimise", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_that_fits_is_found_in_a_third_of_the_trials_without_any_physics(
    seed: int, minimise: bool
) -> None:
    sampler = LayoutSampler(LAYOUTS, memory_limit_bytes=LIMIT, seed=seed)
    study = new(sampler, minimise=minimise)
    asked = [measure(study, sampler, minimise=minimise) for _ in range(len(LAYOUTS) // 3)]
    assert max(speed(params) for params in asked if memory(params) <= LIMIT) == BEST


def test_with_predictions_it_is_found_at_once_even_if_their_unit_and_level_are_off() -> None:
    sampler = LayoutSampler(
        LAYOUTS,
        step_seconds=[3.0 / speed(layout) for layout in LAYOUTS],
        memory_bytes=[0.95 * memory(layout) for layout in LAYOUTS],
        memory_limit_bytes=LIMIT,
    )
    study = new(sampler)
    asked = [measure(study, sampler) for _ in range(4)]
    assert BEST in [speed(params) for params in asked]


def test_every_layout_is_asked_once_and_then_it_says_so() -> None:
    sampler = LayoutSampler(LAYOUTS[:10], seed=1)
    study = new(sampler)
    asked = [tuple(measure(study, sampler).items()) for _ in range(10)]
    assert sampler.num_left(study) == 0
    assert len(set(asked)) == 10
    with pytest.raises(LayoutsExhausted, match="all 10 layouts"):
        study.ask(sampler.distributions)


def test_several_in_flight_are_distinct_and_may_end_in_any_order() -> None:
    sampler = LayoutSampler(LAYOUTS, seed=0)
    study = new(sampler)
    trials = [study.ask(sampler.distributions) for _ in range(12)]
    assert len({tuple(trial.params.items()) for trial in trials}) == 12
    for trial in reversed(trials):
        study.tell(trial, speed(trial.params))
    assert sampler.num_left(study) == len(LAYOUTS) - 12


def test_parameters_may_be_suggested_one_by_one() -> None:
    sampler = LayoutSampler(LAYOUTS, seed=0)
    study = new(sampler)

    def objective(trial: optuna.Trial) -> float:
        params = {
            name: trial.suggest_categorical(name, distribution.choices)
            for name, distribution in sampler.distributions.items()
        }  # type: ignore[attr-defined]
        assert params in LAYOUTS
        return speed(params)

    study.optimize(objective, n_trials=8)
    assert len({tuple(trial.params.items()) for trial in study.trials}) == 8


def test_what_others_measured_in_the_study_is_known_to_a_new_sampler() -> None:
    first = LayoutSampler(LAYOUTS, memory_limit_bytes=LIMIT, seed=0)
    study = new(first)
    done = [measure(study, first) for _ in range(10)]
    second = LayoutSampler(LAYOUTS, memory_limit_bytes=LIMIT, seed=0)
    study.sampler = second
    assert second.num_left(study) == len(LAYOUTS) - 10
    assert measure(study, second) not in done


@pytest.mark.parametrize("one_by_one", [False, True])
def test_of_a_trial_that_was_enqueued_in_part_what_ran_is_told(one_by_one: bool) -> None:
    sampler = LayoutSampler(LAYOUTS, seed=0)
    study = new(sampler)
    for _ in range(3):
        study.enqueue_trial({"tp": 8})
        trial = study.ask() if one_by_one else study.ask(sampler.distributions)
        for name, distribution in sampler.distributions.items() if one_by_one else ():
            trial.suggest_categorical(name, distribution.choices)  # type: ignore[attr-defined]
        study.tell(trial, speed(trial.params))
    ran = {
        tuple(trial.params[name] for name in ("tp", "mbs", "recompute")) for trial in study.trials
    }
    assert sampler.num_left(study) == len(LAYOUTS) - len(ran)
    rest = [tuple(measure(study, sampler).values()) for _ in range(len(LAYOUTS) - len(ran))]
    assert ran.isdisjoint(rest)
    assert len(set(rest)) == len(rest)


def test_an_infinite_value_is_a_failure_and_no_number() -> None:
    def asked(*, infinite: bool) -> list[dict[str, Any]]:
        sampler = LayoutSampler(LAYOUTS, seed=0)
        study = new(sampler, minimise=True)
        for _ in range(12):
            trial = study.ask(sampler.distributions)
            if trial.params["mbs"] < 16:
                study.tell(trial, 1e4 / speed(trial.params))
            elif infinite:
                study.tell(trial, float("inf"))
            else:
                study.tell(trial, state=TrialState.FAIL)
        return [trial.params for trial in study.trials]

    assert asked(infinite=True) == asked(infinite=False)


def test_of_a_pruned_trial_nothing_is_learned_and_it_is_not_asked_again() -> None:
    pruned = LayoutSampler(LAYOUTS[:6], seed=0)
    study = new(pruned)
    asked = []
    for _ in range(6):
        trial = study.ask(pruned.distributions)
        asked.append(trial.params)
        study.tell(trial, state=TrialState.PRUNED)
    assert len({tuple(params.items()) for params in asked}) == 6
    assert pruned.num_left(study) == 0
    assert pruned._rows.told == {}


def test_a_study_without_layouts_left_has_no_trial_that_runs_for_ever() -> None:
    sampler = LayoutSampler(LAYOUTS[:2], seed=1)
    study = new(sampler)
    for _ in range(2):
        measure(study, sampler)
    with pytest.raises(LayoutsExhausted):
        study.ask(sampler.distributions)
    assert [trial.state for trial in study.trials] == [
        TrialState.COMPLETE,
        TrialState.COMPLETE,
        TrialState.FAIL,
    ]


def test_a_trial_of_no_layout_is_left_alone() -> None:
    sampler = LayoutSampler(LAYOUTS, seed=0)
    study = new(sampler)
    study.enqueue_trial({"tp": 8, "mbs": 16, "recompute": "none", "other": 3})
    study.add_trial(optuna.trial.create_trial(value=5.0, params={}, distributions={}))
    assert measure(study, sampler) in LAYOUTS
    assert measure(study, sampler) in LAYOUTS


@pytest.mark.parametrize(
    ("layouts", "said"),
    [
        ([], "no layouts"),
        ([{"tp": 1}, {"tp": 1}], "repeat another"),
        ([{"tp": 1}, {"mbs": 1}], "all have the same"),
    ],
)
def test_layouts_that_are_no_set_are_refused(layouts: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(UsageInvalid, match=said):
        LayoutSampler(layouts)


def test_an_objective_that_is_not_positive_is_refused_and_so_are_predictions_that_are_not() -> None:
    sampler = LayoutSampler(LAYOUTS, seed=0)
    study = new(sampler)
    study.tell(study.ask(sampler.distributions), -1.0)
    with pytest.raises(UsageInvalid, match="needs positive ones"):
        study.ask(sampler.distributions)
    with pytest.raises(UsageInvalid, match="one positive number for each"):
        LayoutSampler(LAYOUTS, step_seconds=[1.0])
