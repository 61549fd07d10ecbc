"""Takes over what another sweep measured under equal conditions, if a person asks for it.

Equal are: the sweep's conditions, the cell, the measured code, and the fingerprint of all that a
cell takes over. Whatever is not equal is refused by name, before anything starts.
"""

from __future__ import annotations

import logging

from db.read.rows import CellRow, SweepRow, TrialRow
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.device_name import may_be_called
from orchestrator.core.problem.hardware import is_surely
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import Device
from orchestrator.sweep.call import Call

logger = logging.getLogger(__name__)


def reuse_measured(call: Call, name: str) -> int:
    """Add what the sweep of this name measured to the cells of this one. Returns how many trials.

    Raises UsageInvalid if the conditions or the code differ, or if no cell is the same.
    """
    source = call.store.sweep_named(name)
    _refuse_other_conditions(call, source)
    # Cells are equal if only the names of their models differ.
    theirs = {row.cell: row for row in call.store.cells(source.id)}
    pairs = [(cell, theirs[cell]) for cell in call.spec.cells() if cell in theirs]
    if not pairs:
        raise UsageInvalid(
            f"sweep {name} has no cell of sweep {call.spec.name}: its cells are"
            f" {', '.join(row.cell.key for row in theirs.values()) or 'none'}; leave out --reuse"
        )
    for _, row in pairs:
        _refuse_other_code(call, source, row)
    return sum(_reuse_cell(call, source, cell, row) for cell, row in pairs)


def _reuse_cell(call: Call, source: SweepRow, cell: Cell, theirs: CellRow) -> int:
    cell_id = call.store.ensure_cell(call.sweep_id, cell, epoch=call.epoch)
    own = next(row for row in call.store.cells(call.sweep_id) if row.id == cell_id)
    if own.fingerprint_digest not in (None, theirs.fingerprint_digest):
        logger.warning(
            "Nothing of cell %s is reused: it was measured with fingerprint %s, and that of sweep"
            " %s with %s",
            cell.key,
            own.fingerprint_digest,
            source.name,
            theirs.fingerprint_digest,
            extra={"action": "not_reused"},
        )
        return 0
    legal = call.spaces.of(cell, gpus_per_node=call.gpus_per_node).legal.row_of
    found = [
        trial.id
        for trial in call.store.trials(source.id, cell_id=theirs.id)
        if trial.layout in legal and _is_reusable(trial)
    ]
    num = call.store.reuse(cell_id, found, epoch=call.epoch)
    logger.info(
        "Cell %s: %d of %d trials of sweep %s reused",
        cell.key,
        num,
        len(found),
        source.name,
        extra={"action": "reused"},
    )
    return num


def _is_reusable(trial: TrialRow) -> bool:
    if trial.state is TrialState.MEASURED:
        return trial.is_current_fingerprint is True and trial.implausible is None
    return trial.state is TrialState.OUT_OF_MEMORY


def _refuse_other_conditions(call: Call, source: SweepRow) -> None:
    if source.id == call.sweep_id:
        raise UsageInvalid(f"sweep {source.name} cannot reuse itself; name another after --reuse")
    wanted, was = call.spec.conditions(), source.conditions
    differing = [
        f"{key} was {was.get(key, 'absent')!r}, is {wanted.get(key, 'absent')!r}"
        for key in sorted(wanted.keys() | was.keys())
        if wanted.get(key, "absent") != was.get(key, "absent")
    ]
    if differing:
        raise UsageInvalid(
            f"sweep {source.name} was measured under other conditions: {'; '.join(differing)}."
            " Restore them in the file, or leave out --reuse"
        )


def _refuse_other_code(call: Call, source: SweepRow, row: CellRow) -> None:
    """Raise UsageInvalid if a cell was measured with another device or code than this call has.

    Versions of libraries are known from the first measurement on: if they differ then, what was
    reused is no longer current, and its layouts are measured again.
    """
    then = next(
        (one for one in call.store.fingerprints(source.id) if one.digest == row.fingerprint_digest),
        None,
    )
    if then is None:
        # Nothing was measured, so nothing but out-of-memories is reused.
        return
    now, on_gpu = call.code.now, call.scheduler.slots.device is Device.CUDA
    was_on = then.stack.device_name
    for what, was, is_now in (
        ("device", was_on, _device(call.scheduler.slots.device_name, was_on)),
        ("GPU driver", then.stack.driver, then.stack.driver if on_gpu else None),
        ("layout-sweep", then.orchestrator_version, now.orchestrator_version),
        ("the code's commit", then.git_sha, now.git_sha),
        (
            "uncommitted changes" if then.git_sha is not None else "the digest of its files",
            then.dirty_diff_digest,
            now.dirty_diff_digest,
        ),
    ):
        if was != is_now:
            raise UsageInvalid(
                f"cell {row.cell.key} of sweep {source.name} was measured with something else:"
                f" {what} was {was or 'none'}, is {is_now or 'none'}. Measure it again: leave out"
                " --reuse"
            )


def _device(is_on: str | None, was_on: str | None) -> str | None:
    """Return how a message calls the present device: as then, if it is the same or unknown."""
    if is_on is None or (was_on is not None and is_surely(is_on, was_on)):
        return was_on
    if was_on is not None and may_be_called(is_on, was_on):
        return f"{is_on} (Ray's name of several devices)"
    return is_on
