"""A cell's trials as a study in an Optuna storage, for optuna-dashboard. No search reads it."""

from __future__ import annotations

import datetime as dt
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import COLUMNS
from orchestrator.core.sweepfile.objective import Objective


class StudyState(StrEnum):
    """The end of a trial, in Optuna's words."""

    COMPLETE = "complete"
    # It ran out of memory, failed, or its numbers cannot be true.
    FAIL = "fail"
    # It was condemned without a launch, or ended early.
    PRUNED = "pruned"


_STATES = {
    StudyState.COMPLETE: TrialState.COMPLETE,
    StudyState.FAIL: TrialState.FAIL,
    StudyState.PRUNED: TrialState.PRUNED,
}


@dataclass(frozen=True, kw_only=True)
class StudyTrial:
    """An ended trial as a study shows it."""

    layout: Layout
    state: StudyState
    # By the study's objectives, in their order; only of a complete one.
    values: tuple[float, ...] | None
    started_at: dt.datetime
    ended_at: dt.datetime
    attributes: Mapping[str, Any]


def export_study(
    url: str,
    name: str,
    trials: Sequence[StudyTrial],
    *,
    objectives: Sequence[Objective],
    attributes: Mapping[str, Any],
) -> int:
    """Write a cell's trials into an Optuna storage as a study with attributes. Returns how many.

    It has a direction for each objective.

    Raises UsageInvalid when the name is taken; the errors of the storage's database pass through.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    params = [_params(trial.layout) for trial in trials]
    values: dict[str, set[int | str]] = {}
    for some in params:
        for axis, value in some.items():
            values.setdefault(axis, set()).add(value)
    distributions = {axis: _distribution(some) for axis, some in values.items()}
    try:
        study = optuna.create_study(
            storage=url,
            study_name=name,
            directions=[
                StudyDirection.MAXIMIZE if one.is_larger_better else StudyDirection.MINIMIZE
                for one in objectives
            ],
        )
    except optuna.exceptions.DuplicatedStudyError as exc:
        raise UsageInvalid(
            f"a study {name!r} is in that storage already: "
            "export under another name, or delete it there"
        ) from exc
    names = [one.value for one in objectives]
    with warnings.catch_warnings():
        # Experimental since Optuna 3.2; optuna-dashboard shows the names.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(names)
    asked = names[0] if len(names) == 1 else names
    for attribute, value in {"objective": asked, **attributes}.items():
        study.set_user_attr(attribute, value)
    study.add_trials(
        [_frozen(trial, some, distributions) for trial, some in zip(trials, params, strict=True)]
    )
    return len(trials)


def _frozen(
    trial: StudyTrial,
    params: Mapping[str, int | str],
    distributions: Mapping[str, BaseDistribution],
) -> FrozenTrial:
    frozen = create_trial(
        state=_STATES[trial.state],
        values=trial.values,
        params=dict(params),
        distributions={axis: distributions[axis] for axis in params},
        user_attrs={"layout": trial.layout.key, **trial.attributes},
    )
    frozen.datetime_start = _local(trial.started_at)
    frozen.datetime_complete = _local(trial.ended_at)
    return frozen


def _local(at: dt.datetime) -> dt.datetime:
    """A time as Optuna keeps it: by this machine's clock, without a zone."""
    return at.astimezone().replace(tzinfo=None)


def _distribution(values: set[int | str]) -> BaseDistribution:
    """Numbers are ordered, also powers of two by their logarithm; other values are not."""
    numbers = sorted(value for value in values if isinstance(value, int))
    if len(numbers) < len(values):
        return CategoricalDistribution(sorted(map(str, values)))
    is_log = numbers[0] > 0 and all(value & (value - 1) == 0 for value in numbers)
    return IntDistribution(numbers[0], numbers[-1], log=is_log and len(numbers) > 1)


def _params(layout: Layout) -> dict[str, int | str]:
    """Each axis under its name, options of the workload that vary included."""
    sizes = ((axis, getattr(layout, axis)) for axis in COLUMNS if axis != "options")
    return {axis: _param(value) for axis, value in (*sizes, *layout.options)}


def _param(value: Any) -> int | str:
    # True is a number in Python, and no size here.
    return value if isinstance(value, int) and not isinstance(value, bool) else str(value)
