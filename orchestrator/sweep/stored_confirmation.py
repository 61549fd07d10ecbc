"""The confirmation of a cell as the store has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from db.read.rows import Repeats, TrialRow
from db.store_reads import StoreReads
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.machine_load import relative_sd
from orchestrator.core.trial.merit import Merit
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.run import Run
from orchestrator.core.trial.winner import CONSIDERED, CONSIDERED_WITH_DRIFT
from orchestrator.sweep.confirmation import Confirmation
from orchestrator.sweep.trial_numbers import others_of

# How many of a cell's fastest trials are read from the store if its machine was seen to change.
LEADING_WITH_DRIFT = 4 * CONSIDERED_WITH_DRIFT


def confirmation_of(
    trials: Iterable[TrialRow],
    repeats: Mapping[int, Repeats],
    *,
    repeating: Mapping[int, Purpose] | None = None,
    was_paused: bool = False,
    merits: tuple[Merit, ...] = (Merit.SPEED,),
    device_memory_bytes: float | None = None,
    may_run: Callable[[Layout], bool] = lambda _: True,
    code: Callable[[], Fingerprint | None] = lambda: None,
) -> Confirmation:
    """Return the confirmation of stored trials that have the current fingerprint.

    Trials whose numbers cannot be true take no part, and none that were ended early.
    `repeats`: as the store gives them; `repeating`: trials with a repeat under way; `merits`: what
    layouts are compared by; `device_memory_bytes`: of trials that do not name it; `may_run`:
    whether a layout that was ended early could run again; `code`: what this call runs, None if no
    call runs. Then it may be that of the last attempts.
    """
    confirmation = Confirmation(repeating=repeating if repeating is not None else {}, merits=merits)
    trials = list(trials)
    measured = {
        trial.id: trial
        for trial in trials
        if trial.is_ranked and trial.step_seconds_median is not None
    }
    runs = [
        (run, trial_id, number)
        for trial_id, trial in measured.items()
        for number, run in enumerate(
            repeats[trial_id].runs if trial_id in repeats else (_only_run(trial),)
        )
    ]
    # Failures come first: repeats of an anchor that replaced a failed one count as anchors too.
    for trial_id in repeats.keys() & measured.keys():
        for kind, times in repeats[trial_id].failures.items():
            for _ in range(times):
                confirmation.fail(trial_id, kind)
        _note_others(confirmation, trial_id, repeats[trial_id], code)
    # Then runs in the order of time. Runs without a time come first; of runs that ended together,
    # first runs come before repeats.
    for run, trial_id, _ in sorted(
        runs, key=lambda one: (-inf if one[0].at is None else one[0].at, one[2] > 0, one[1])
    ):
        confirmation.note(trial_id, measured[trial_id].layout, run)
    for trial in trials:
        if trial.is_ended_early and trial.is_current_fingerprint and may_run(trial.layout):
            confirmation.note_ended_early(trial.id, _fastest_step(trial))
    if confirmation.has_other_merits:
        for trial in measured.values():
            confirmation.note_others(trial.id, others_of(trial, device_memory_bytes))
    confirmation.was_paused = bool(runs) and was_paused
    return confirmation


def _note_others(
    confirmation: Confirmation,
    trial_id: int,
    repeats: Repeats,
    code: Callable[[], Fingerprint | None],
) -> None:
    """Note the repeats of a trial with other code or software, if the next would be like them.

    After an edit was taken back, repeats count again.
    """
    now = code() if repeats.others else None
    of_trial = repeats.fingerprint
    is_taken_back = now is not None and of_trial is not None and of_trial.has_code_of(now)
    for one in repeats.others:
        has_code_of_now = now is None or one.fingerprint is None or one.fingerprint.has_code_of(now)
        if one.failure_kind is None and not (is_taken_back and not has_code_of_now):
            confirmation.end()
        elif one.failure_kind is not None and has_code_of_now:
            confirmation.fail(trial_id, one.failure_kind)


def _only_run(trial: TrialRow) -> Run:
    assert trial.step_seconds_median is not None
    return Run(
        step_seconds=trial.step_seconds_median,
        relative_confidence=trial.relative_confidence,
        load_sd=relative_sd(trial.load),
        at=trial.measured_at.timestamp() if trial.measured_at is not None else None,
        nodes=trial.nodes,
        purpose=Purpose.NEW,
        thrashing=bool(trial.thrashing),
    )


def _fastest_step(trial: TrialRow) -> Run:
    """Return the fastest step of a trial that was ended early, as a run."""
    assert trial.step_seconds_bound is not None
    return Run(
        step_seconds=trial.step_seconds_bound,
        load_sd=relative_sd(trial.load),
        at=trial.measured_at.timestamp() if trial.measured_at is not None else None,
        nodes=trial.nodes,
        purpose=Purpose.NEW,
    )


def leading_confirmation(
    store: StoreReads,
    sweep_id: int,
    cell_id: int,
    leading: Sequence[TrialRow],
    *,
    code: Callable[[], Fingerprint | None] = lambda: None,
) -> tuple[Confirmation, list[TrialRow]]:
    """Return the confirmation of a cell's fastest and repeated trials, and these, fastest first.

    `leading` are the fastest by their stored numbers. If the machine was seen to change, more of
    them are read, since their order tells less then. `code`: as for `confirmation_of`.
    """
    repeats = store.repeats(cell_id)
    found = {trial.id: trial for trial in leading[:CONSIDERED]}
    absent = [trial_id for trial_id in repeats if trial_id not in found]
    found |= {trial.id: trial for trial in (store.trials_by_id(absent) if absent else ())}
    confirmation = confirmation_of(found.values(), repeats, code=code)
    if confirmation.runs.change is not None and len(leading) >= CONSIDERED:
        more = store.best(sweep_id, LEADING_WITH_DRIFT)[cell_id]
        found |= {trial.id: trial for trial in more}
        confirmation = confirmation_of(found.values(), repeats, code=code)
    verdict = confirmation.verdict()
    first = list(verdict.order) if verdict is not None else []
    order = {trial_id: place for place, trial_id in enumerate(first)}
    rows = sorted((found[i] for i in found if i in order), key=lambda trial: order[trial.id])
    return confirmation, rows
