"""Collects the launcher's evidence about one rank, and finds the rank that failed first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from layout_sweep.regular_file import read_regular
from orchestrator.core.trial.failure_kinds import Failure
from orchestrator.core.trial.failures import Evidence, first_bad
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.limits import NOTHING_SEEN, SeenSteps, limit_seconds, passed_message
from orchestrator.core.trial.node_report import RankOutcome
from orchestrator.core.trial.protocol import (
    MAX_RESULT_BYTES,
    BadResult,
    Heartbeat,
    LimitName,
    NotFiniteResult,
    Phase,
    RankFailure,
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

# The end of a rank's output that is searched for the cause of a failure.
TAIL_BYTES = 1 << 16
# The part of it that a report has.
SHOWN_TAIL_CHARACTERS = 8000
_HEARTBEAT_BYTES = 4096

phase_order = tuple(Phase).index


@dataclass(kw_only=True)
class RankWatch:
    """The launcher's evidence about one rank. Times are monotonic unless named otherwise."""

    rank: int
    log: RankLog
    pipe: int | None
    run_dir: Path
    # The rank of the gang whose result has the steps.
    reporting_rank: int = 0
    pid: int | None = None
    code: int | None = None  # exit code, or minus the signal
    ended_at_unix_seconds: float | None = None
    phase: Phase = Phase.START
    step: int = 0
    timed: bool = False
    enough: bool = False
    phase_since: float = 0.0
    progress_at: float = 0.0
    seen: SeenSteps = NOTHING_SEEN
    teardown_since: float | None = None
    limit_passed: str | None = None
    total_limit_passed: bool = False
    result: RankResult | None = None
    bad_result: str | None = None
    not_finite: str | None = None  # the result's sign of divergence
    note: RankFailure | None = None
    # The last heartbeat: when it was written, and its text.
    _heartbeat: tuple[int, bytes] = (0, b"")
    _phase_seconds: dict[Phase, float] = field(default_factory=dict)  # of the phases that are over
    # When it was last seen, or its process had ended. None: not looked at yet.
    _until: float | None = None
    _is_over: bool = False

    @property
    def ended(self) -> bool:
        return self.code is not None

    @property
    def exit_code(self) -> int | None:
        return self.code if self.code is not None and self.code >= 0 else None

    @property
    def signal(self) -> int | None:
        return -self.code if self.code is not None and self.code < 0 else None

    @property
    def measured(self) -> bool:
        """True if its part is done: it has a result, or needs none: another rank reports.

        How its process ends in teardown does not matter.
        """
        if self.bad_result is not None:
            return False
        if self.phase is Phase.TEARDOWN and self.result is not None:
            return True
        return self.code == 0 and (
            self.result is not None
            or (self.rank != self.reporting_rank and self.phase is Phase.TEARDOWN)
        )

    @property
    def has_enough(self) -> bool:
        """True if its result is the gang's, however the others end."""
        return self.enough and self.measured

    def read_heartbeat(self, now: float) -> None:
        path = self.run_dir / heartbeat_file(self.rank)
        try:
            seen = path.stat().st_mtime_ns, read_regular(path, num_bytes=_HEARTBEAT_BYTES).content
            if seen == self._heartbeat:
                return
            heartbeat = decode_heartbeat(seen[1])
        except (OSError, BadResult):
            return
        self._heartbeat = seen
        self._note_step(heartbeat, now)
        if heartbeat.phase is not self.phase:
            self._phase_seconds[self.phase] = now - self.phase_since
            self.phase_since = now
            if heartbeat.phase is Phase.TEARDOWN and heartbeat.at is not None:
                self.teardown_since = min(heartbeat.at, now)
        self.phase, self.step, self.timed = heartbeat.phase, heartbeat.step, heartbeat.timed
        self.enough = heartbeat.enough
        self.progress_at = now

    def _note_step(self, heartbeat: Heartbeat, now: float) -> None:
        """Note how long the last step took, or the last steps since the heartbeat before."""
        if heartbeat.phase is not Phase.STEADY:
            return
        if self.phase is Phase.FIRST_STEP:
            self.seen = SeenSteps(first_seconds=now - self.phase_since)
        elif self.phase is Phase.STEADY and heartbeat.step > self.step:
            slowest = max(now - self.progress_at, self.seen.slowest_seconds or 0.0)
            self.seen = replace(self.seen, slowest_seconds=slowest)

    def read_last_words(self, now: float) -> None:
        """Read its last files in the run directory: heartbeat, result and failure note."""
        self.read_heartbeat(now)
        if not self._is_over:
            self._until, self._is_over = now, self.ended
        try:
            self.result = decode_result(
                self._read_result(result_file(self.rank)),
                needs_steps=self.rank == self.reporting_rank,
            )
            self.bad_result = None
        except FileNotFoundError:
            pass
        except (BadResult, OSError) as exc:
            self.bad_result = str(exc)
            self.not_finite = str(exc) if isinstance(exc, NotFiniteResult) else None
        with suppress(OSError, BadResult):
            self.note = decode_failure(self._read_result(failure_file(self.rank)))
        if self.code != 0 or self.result is not None:
            return
        if self.note is not None and self.note.exception.endswith("BadResult"):
            # It exited with 0, and its note says why it has no result.
            self.bad_result, self.note = self.note.message, None
        if self.bad_result is None and not self.measured:
            self.bad_result = f"it ended well, but wrote no {result_file(self.rank)}"

    def _read_result(self, name: str) -> bytes:
        return read_regular(self.run_dir / name, num_bytes=MAX_RESULT_BYTES + 1).content

    def overdue(self, order: LaunchOrder, now: float) -> str | None:
        """A message about the limit that it has passed, if it has."""
        is_steady, name = self.phase is Phase.STEADY, LimitName(self.phase)
        since = self.progress_at if is_steady else self.phase_since
        if now - since <= limit_seconds(order.request, name, self.seen):
            return None
        return passed_message(order.request, name, self.seen, step=self.step if is_steady else None)

    def advance(self) -> tuple[int, int, bool, float]:
        """Its progress, to compare: ties go to a running process, then to the latest heartbeat."""
        stopped = self.pid is not None and is_stopped(self.pid)
        return phase_order(self.phase), self.step, not stopped, self.progress_at

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
        """The evidence of its end; memory as the rank noted it, else as the monitor saw it."""
        note = self.note
        if note is not None:
            peak_memory_bytes = note.peak_memory_allocated_bytes or peak_memory_bytes
            device_memory_bytes = note.device_memory_bytes or device_memory_bytes
        return Evidence(
            rank=self.rank,
            node=node,
            exit_code=self.exit_code,
            signal=self.signal,
            exception=note.exception if note else "",
            message=note.message if note else "",
            traceback=note.traceback if note else "",
            noted_out_of_memory=note.out_of_memory if note else False,
            bad_result=self.bad_result,
            not_finite=self.not_finite,
            timed_out=self.limit_passed,
            passed_total_limit=self.total_limit_passed,
            phase=note.phase if note else self.phase,
            step=note.step if note else self.step,
            num_oom_kills=num_oom_kills,
            xids=xids,
            peak_memory_bytes=peak_memory_bytes,
            device_memory_bytes=device_memory_bytes,
            at_unix_seconds=note.at_unix_seconds if note else self.ended_at_unix_seconds or 0.0,
            log_tail=self.log.tail(tail_bytes),
            log_path=str(self.log.path),
        )

    def phase_seconds(self) -> dict[Phase, float]:
        """Return the seconds in each phase as heartbeats showed them, the last until its end.

        Empty if nothing was looked at.
        """
        if self._until is None:
            return {}
        found = self._phase_seconds | {self.phase: self._until - self.phase_since}
        return {phase: max(seconds, 0.0) for phase, seconds in found.items()}

    def outcome(self) -> RankOutcome:
        return RankOutcome(
            rank=self.rank,
            exit_code=self.exit_code,
            signal=self.signal,
            result=self.result if self.measured else None,
            failure=self.note,
            bad_result=self.bad_result,
            phase=self.phase,
            step=self.step,
            phase_seconds=self.phase_seconds(),
            ended_at_unix_seconds=self.ended_at_unix_seconds,
            log_path=str(self.log.path),
            log_tail=self.log.tail(TAIL_BYTES)[-SHOWN_TAIL_CHARACTERS:],
        )


def judge(evidence: Sequence[Evidence]) -> tuple[Failure, float] | None:
    """The failure of a gang, and its time, from the ranks that have not measured; None if unknown.

    A rank that we killed counts only if it hung or left a note: it may have survived what it
    printed before.
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
