"""A cell's trials as a study in an Optuna storage, for optuna-dashboard. No search reads it."""

from __future__ import annotations

from collections.abc import Iterable

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import StudyDirection
from optuna.trial import create_trial

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import COLUMNS
from orchestrator.core.sweepfile.sections import Objective
from orchestrator.search.optuna_proposals import HEADROOM, UNKNOWN_EXCESS, shown_excess
from orchestrator.search.searcher import (
    Condemned,
    Failed,
    Known,
    Measured,
    OutOfMemory,
    SetAside,
    UnderWay,
)


def export_study(
    url: str, name: str, known: Iterable[tuple[Layout, Known]], *, objective: Objective
) -> int:
    """Copy a cell's layouts into an Optuna storage. Returns how many.

    Raises UsageInvalid when the name is taken; the errors of the storage's database pass through.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rows = [
        (layout, fact, _params(layout)) for layout, fact in known if not isinstance(fact, UnderWay)
    ]
    values: dict[str, set[int | str]] = {}
    for _, _, params in rows:
        for axis, value in params.items():
            values.setdefault(axis, set()).add(value)
    distributions: dict[str, BaseDistribution] = {
        axis: CategoricalDistribution(sorted(some, key=lambda v: (isinstance(v, str), v)))
        for axis, some in values.items()
    }
    minimize = objective is Objective.STEP_SECONDS
    measured = [fact.value for _, fact, _ in rows if isinstance(fact, Measured)]
    # The worst value replaces a missing one: 0 among thousands would hide all other differences.
    worst = (max if minimize else min)(measured, default=0.0)
    trials = [
        create_trial(
            value=fact.value if isinstance(fact, Measured) else worst,
            constraints={"infeasible": _excess(fact)},
            params=params,
            distributions={axis: distributions[axis] for axis in params},
            user_attrs={"layout": layout.key, "outcome": type(fact).__name__},
        )
        for layout, fact, params in rows
    ]
    try:
        study = optuna.create_study(
            storage=url,
            study_name=name,
            direction=StudyDirection.MINIMIZE if minimize else StudyDirection.MAXIMIZE,
        )
    except optuna.exceptions.DuplicatedStudyError as exc:
        raise UsageInvalid(
            f"a study {name!r} is in that storage already: "
            "export under another name, or delete it there"
        ) from exc
    study.add_trials(trials)
    return len(trials)


def _excess(fact: Known) -> float:
    """The constraint that the study shows: above zero is infeasible."""
    match fact:
        case Measured() | UnderWay():
            return HEADROOM
        case OutOfMemory(excess=excess):
            return shown_excess(excess)
        case Failed():
            return 1.0
        case Condemned() | SetAside():
            return UNKNOWN_EXCESS


def _params(layout: Layout) -> dict[str, int | str]:
    """Each axis under its name, options of the workload that vary included."""
    sizes = ((axis, getattr(layout, axis)) for axis in COLUMNS if axis != "options")
    return {
        axis: value if isinstance(value, int) else str(value)
        for axis, value in (*sizes, *layout.options)
    }
