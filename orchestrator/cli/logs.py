"""The command `logs`: what a rank of a trial printed.

The log files are on the node that ran the trial. The store keeps the last lines of a failed rank.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import Db, Json, TrialArgument
from orchestrator.cli.store.defaults import existing_store
from orchestrator.cli.store.home import attempt_folders
from orchestrator.cli.terminal.output import note, plain, write, write_json
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.pretend.simulated_name import SIMULATED_SUFFIX
from orchestrator.core.trial.lifecycle import UNDER_WAY

if TYPE_CHECKING:
    from db.read.rows import AttemptRow, TrialDetail
    from db.store_reads import StoreReads

FOLLOW_SECONDS = 0.5


def logs(
    trial: TrialArgument,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="The rank. Default: the one that failed first, else rank 0."),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The attempt's number. Default: the one whose numbers count; if none does, or"
            " with -f, the last.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print new lines until the attempt ends.")
    ] = False,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Print the output of a rank of a trial.

    If its log file is on another node, prints the last lines that the store keeps.

    Examples:
      sweep logs 17
      sweep logs 17 --rank 3 --attempt 1
      sweep logs 17 -f
    """
    if follow and as_json:
        raise UsageInvalid(
            "--follow has no end to put into one JSON document; leave out one of the two"
        )
    with existing_store(db) as store:
        detail = store.trial(trial)
        selected = _select_attempt(detail, attempt, follow=follow)
        if rank is None:
            rank = (selected.failure.rank if selected.failure is not None else None) or 0
        path = _log_path(detail, selected, rank)
        if path is None:
            text = _stored_lines(detail, selected, rank)
        elif not follow:
            text = plain(_read_from(path, 0).decode(errors="replace"), lines=True)
        if as_json:
            place = {"trial_id": trial, "attempt": selected.number, "rank": rank, "path": path}
            write_json("logs", place | {"from_store": path is None, "text": text})
        elif path is None:
            note(
                f"no log of attempt {selected.number} can be read on this machine; these are the"
                f" last lines of rank {rank} that the store keeps"
            )
            write(plain(text.rstrip("\n"), lines=True))
        else:
            if not follow and not text:
                note(f"rank {rank} of attempt {selected.number} printed nothing")
            note(f"{path}{_which(detail, selected)}")
            for part in _lines(path, store, trial, selected.number) if follow else [text]:
                sys.stdout.write(part)
                sys.stdout.flush()


def _select_attempt(detail: TrialDetail, number: int | None, *, follow: bool) -> AttemptRow:
    """Return the attempt of this number; without one, that whose numbers count, or the last.

    Raises UsageInvalid if there is none.
    """
    trial = detail.trial
    if not detail.attempts:
        state = trial.state.replace("_", " ")
        raise UsageInvalid(f"trial {trial.id} is {state} and was never launched: it has no logs")
    if number is None:
        counting = _counting(detail) if not follow else None
        return counting or detail.attempts[-1]
    for attempt in detail.attempts:
        if number == attempt.number:
            return attempt
    known = ", ".join(str(attempt.number) for attempt in detail.attempts)
    raise UsageInvalid(f"trial {trial.id} has no attempt {number}; it has {known}")


def _counting(detail: TrialDetail) -> AttemptRow | None:
    """The attempt whose numbers are the trial's; None if none was measured."""
    from db.types import AttemptState  # SQLAlchemy

    measured = (one for one in detail.attempts if one.state is AttemptState.MEASURED)
    return next((one for one in measured if not one.superseded), None)


def _which(detail: TrialDetail, attempt: AttemptRow) -> str:
    """Say which of several attempts is shown, and whether its numbers count."""
    num = len(detail.attempts)
    if num == 1:
        return ""
    counts = ", whose numbers count" if attempt is _counting(detail) else ""
    return f" (attempt {attempt.number} of {num}{counts})"


def _log_path(detail: TrialDetail, attempt: AttemptRow, rank: int) -> Path | None:
    """The rank's log file on this machine, in the run folder or where its failure names it.

    None if there is none that we may read.
    """
    from orchestrator.core.trial.protocol import log_file  # pydantic, 0.05 s

    folders = attempt_folders(detail.run_folder, detail.trial.id, attempt.number)
    failure = attempt.failure
    if failure is not None and failure.log_path:
        failed = Path(failure.log_path)
        if failed.name == log_file(failure.rank or 0):
            folders.insert(0, failed.parent)
    paths = (folder / log_file(rank) for folder in folders)
    readable = (path for path in paths if os.access(path, os.R_OK) and path.is_file())
    return next(readable, None)


def _stored_lines(detail: TrialDetail, attempt: AttemptRow, rank: int) -> str:
    """The rank's last lines in the store. Raises UsageInvalid if there are none."""
    failure = attempt.failure
    if failure is None or not failure.log_tail or failure.rank not in (None, rank):
        if detail.sweep_name.endswith(SIMULATED_SUFFIX):
            raise UsageInvalid(
                f"trial {detail.trial.id} was simulated: nothing ran, so it has no log"
            )
        where = f" on {', '.join(attempt.nodes)}" if attempt.nodes else ""
        raise UsageInvalid(
            f"no log of rank {rank} of attempt {attempt.number} can be read on this machine,"
            f" and the store keeps only a failed rank's last lines. Its files are under"
            f" SWEEP_HOME{where}{_others_here(detail, attempt)}"
        )
    return failure.log_tail


def _others_here(detail: TrialDetail, attempt: AttemptRow) -> str:
    """Name the ranks whose logs are here: with `processes: per_node` the first one of each node."""
    folders = attempt_folders(detail.run_folder, detail.trial.id, attempt.number)
    logs = [path.stem for folder in folders for path in folder.glob("log-*.txt")]
    ranks = sorted(int(number) for _, _, number in (log.partition("-") for log in logs))
    return f". On this machine are logs of rank {', '.join(map(str, ranks))}" if ranks else ""


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except OSError as exc:
        raise UsageInvalid(f"cannot read {path}: {exc.strerror}") from exc


def _lines(path: Path, store: StoreReads, trial_id: int, attempt: int) -> Iterator[str]:
    """The whole lines that are appended to a log, until its attempt has ended."""
    offset, rest = 0, b""
    while True:
        # Asked before the file is read, so that its last lines are read too.
        trial = store.trial(trial_id).trial
        is_over = trial.num_attempts != attempt or trial.state not in UNDER_WAY
        content = _read_from(path, offset)
        offset += len(content)
        lines, newline, rest = (rest + content).rpartition(b"\n")
        if is_over and rest:
            lines, newline = lines + newline + rest, b"\n"
        if newline:
            yield plain((lines + newline).decode(errors="replace"), lines=True)
        if is_over:
            return
        time.sleep(FOLLOW_SECONDS)
