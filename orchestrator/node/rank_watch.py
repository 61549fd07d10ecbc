"""What the launcher knows of one rank, how it looks as evidence, and which rank of a gang is to
blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.core.trial.failure_kinds import Failure
from orchestrator.core.trial.failures import Evidence, first_bad
from orchestrator.core.trial.limits import NOTHING_SEEN, SeenSteps, limit_seconds, told_passed
from orchestrator.core.trial.protocol import (
    MAX_RESULT_BYTES,
    BadResult,
    Heartbeat,
    LaunchOrder,
    LimitName,
    NotFiniteResult,
    Phase,
    RankFailure,
    RankOutcome,
    RankResult,
    decode_failure,
    decode_heartbeat,
    decode_result,
    failure_file,
    heartbeat_file,
    result_file,
)
from orchestrator.node.processes import is_stopped
from orchestrator.node.rank_log import RankLog

# Of a rank's output, that a failure is judged by
TAIL_BYTES = 1 << 16
SHOWN_TAIL_CHARACTERS = 8000  # of it, that a report carries

phase_order = tuple(Phase).index


@dataclass(kw_only=True)
class RankWatch:
    """What the launcher knows of one rank."""

    rank: int
    log: RankLog
    pipe: int | None
    run_dir: Path
    pid: int | None = None
    # Exit code, or minus the signal; None: it has not ended by itself
    code: int | None = None
    ended_at_unix_seconds: float | None = None
    phase: Phase = Phase.START
    step: int = 0
    timed: bool = False
    phase_since: float = 0.0  # monotonic
    progress_at: float = 0.0  # monotonic
    seen: SeenSteps = NOTHING_SEEN
    # Monotonic; None: it has not come so far, or did not say when
    teardown_since: float | None = None
    limit_passed: str | None = None
    result: RankResult | None = None
    bad_result: str | None = None
    # What of its result shows that the training diverged
    not_finite: str | None = None
    note: RankFailure | None = None
    # The last heartbeat read, and when it was written
    _seen: tuple[int, bytes] = (0, b"")

    @property
    def ended(self) -> bool:
        return self.code is not None

    @property
    def measured(self) -> bool:
        """Its part is done: it has a result, or rank 0 has; how its process ends in teardown does
        not matter.
        """
        if self.bad_result is not None:
            return False
        if self.phase is Phase.TEARDOWN and self.result is not None:
            return True
        return self.code == 0 and (
            self.result is not None or (self.rank > 0 and self.phase is Phase.TEARDOWN)
        )

    def read_heartbeat(self, now: float) -> None:
        path = self.run_dir / heartbeat_file(self.rank)
        try:
            seen = path.stat().st_mtime_ns, _read(path, 4096)
        except OSError:
            return
        if seen == self._seen:
            return
        try:
            heartbeat = decode_heartbeat(seen[1])
        except BadResult:
            return
        self._seen = seen
        self._note_step(heartbeat, now)
        if heartbeat.phase is not self.phase:
            self.phase_since = now
            if heartbeat.phase is Phase.TEARDOWN and heartbeat.at is not None:
                self.teardown_since = min(heartbeat.at, now)
        self.phase, self.step, self.timed, self.progress_at = (
            heartbeat.phase,
            heartbeat.step,
            heartbeat.timed,
            now,
        )

    def _note_step(self, heartbeat: Heartbeat, now: float) -> None:
        """How long the step took that has ended; of several between two looks, how long they took
        together.
        """
        if heartbeat.phase is not Phase.STEADY:
            return
        if self.phase is Phase.FIRST_STEP:
            self.seen = SeenSteps(first_seconds=now - self.phase_since)
        elif self.phase is Phase.STEADY and heartbeat.step > self.step:
            slowest = max(now - self.progress_at, self.seen.slowest_seconds or 0.0)
            self.seen = replace(self.seen, slowest_seconds=slowest)

    def read_last_words(self, now: float) -> None:
        """What it left in the run directory, once it has ended."""
        self.read_heartbeat(now)
        with suppress(FileNotFoundError):
            try:
                self.result = decode_result(
                    _read(self.run_dir / result_file(self.rank), MAX_RESULT_BYTES + 1)
                )
                self.bad_result = None
            except (BadResult, OSError) as exc:
                if isinstance(exc, FileNotFoundError):
                    raise
                self.bad_result = str(exc)
                self.not_finite = str(exc) if isinstance(exc, NotFiniteResult) else None
        with suppress(OSError, BadResult):
            self.note = decode_failure(
                _read(self.run_dir / failure_file(self.rank), MAX_RESULT_BYTES + 1)
            )
        if (
            self.code == 0
            and self.result is None
            and self.note is not None
            and self.note.exception.endswith("BadResult")
        ):
            self.bad_result, self.note = (
                self.note.message,
                None,
                # It ended well, and says why it has no result
            )
        if self.code == 0 and self.result is None and self.bad_result is None and not self.measured:
            self.bad_result = f"it ended well, but wrote no {result_file(self.rank)}"

    def overdue(self, order: LaunchOrder, now: float) -> str | None:
        """The limit that it has passed, for a person."""
        is_steady, name = self.phase is Phase.STEADY, LimitName(self.phase)
        since = self.progress_at if is_steady else self.phase_since
        if now - since <= limit_seconds(order.request, name, self.seen):
            return None
        return told_passed(order.request, name, self.seen, step=self.step if is_steady else None)

    def advance(self) -> tuple[int, int, bool, float]:
        """How far it is, to compare with others: of those equally far, one that was stopped is
        behind, then one that was silent longest.
        """
        return (
            phase_order(self.phase),
            self.step,
            not (self.pid is not None and is_stopped(self.pid)),
            self.progress_at,
        )

    def evidence(
        self,
        node: str,
        *,
        num_oom_kills: int = 0,
        xids: Sequence[int] = (),
        peak_memory_bytes: int | None = None,
        device_memory_bytes: int | None = None,
        tail_bytes: int = TAIL_BYTES,
    ) -> Evidence:
        """What speaks about its end; memory as the node's monitor saw it, unless the rank said
        itself.
        """
        code, note = self.code, self.note
        return Evidence(
            rank=self.rank,
            node=node,
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            exception=note.exception if note else "",
            message=note.message if note else "",
            traceback=note.traceback if note else "",
            noted_out_of_memory=note.out_of_memory if note else False,
            bad_result=self.bad_result,
            not_finite=self.not_finite,
            timed_out=self.limit_passed,
            phase=note.phase if note else self.phase,
            step=note.step if note else self.step,
            num_oom_kills=num_oom_kills,
            xids=xids,
            peak_memory_bytes=note.peak_memory_allocated_bytes
            if note and note.peak_memory_allocated_bytes
            else peak_memory_bytes,
            device_memory_bytes=note.device_memory_bytes
            if note and note.device_memory_bytes
            else device_memory_bytes,
            at_unix_seconds=note.at_unix_seconds if note else self.ended_at_unix_seconds or 0.0,
            log_tail=self.log.tail(tail_bytes),
            log_path=str(self.log.path),
        )

    def outcome(self) -> RankOutcome:
        code = self.code
        return RankOutcome(
            rank=self.rank,
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            result=self.result if self.measured else None,
            failure=self.note,
            bad_result=self.bad_result,
            phase=self.phase,
            step=self.step,
            ended_at_unix_seconds=self.ended_at_unix_seconds,
            log_path=str(self.log.path),
            log_tail=self.log.tail(TAIL_BYTES)[-SHOWN_TAIL_CHARACTERS:],
        )


def judge(evidence: Sequence[Evidence]) -> tuple[Failure, float] | None:
    """The failure of a gang and when it happened, from the evidence about all ranks that have not
    measured; None: nothing speaks.

    A rank that we killed is a witness only if it was hung or left a note: what it printed before,
    it may have survived.
    """
    bad = [
        rank
        for rank in evidence
        if rank.exit_code is not None or rank.signal is not None or rank.timed_out or rank.exception
    ]
    if not bad:
        return None
    failure = first_bad(bad)
    at = next(rank.at_unix_seconds for rank in bad if rank.rank == failure.rank)
    return replace(failure, log_tail=failure.log_tail[-SHOWN_TAIL_CHARACTERS:]), at


def _read(path: Path, num_bytes: int) -> bytes:
    """The start of a file that a rank wrote, however long it made it."""
    with path.open("rb") as file:
        return file.read(num_bytes)
