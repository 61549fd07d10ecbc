"""Makes a rank's result of what the user's program wrote, or reports why there is none.

The result of the rank that reports has the steps; those of other ranks have their memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layout_sweep.regular_file import read_regular
from orchestrator.core.trial.line_count import TELL_NUM_STEPS
from orchestrator.core.trial.protocol import (
    MAX_RESULT_BYTES,
    BadResult,
    Device,
    NotFiniteResult,
    Phase,
    RankResult,
    decode_result,
    log_file,
)
from orchestrator.core.trial.redaction import Secrets, redacted
from orchestrator.core.trial.unread_output import TELL_STEPS
from workloads.command.appended_lines import APPEND
from workloads.command.metrics import Metrics
from workloads.command.own_log import why_steps_are_unread
from workloads.command.resident import peak_resident_bytes
from workloads.command.told_fields import ToldFields
from workloads.rank import NotFinite, Rank


@dataclass(kw_only=True)
class Handover:
    """Hands over what rank 0's program wrote: a document, or lines."""

    rank: Rank
    program: int  # its process id
    document: Path
    metrics: Metrics
    secrets: Secrets
    # Until the first result: the launcher times what follows.
    _phases: Mapping[Phase, float] | None = field(default=None, init=False, repr=False)
    # Seen at the results so far: an ended process that was not waited for is not seen later.
    _resident_bytes: int = field(default=0, init=False, repr=False)

    def hand_over(self, *, enough: bool = False) -> None:
        """Make the result of a program that ended well, or report why there is none.

        `enough`: the end of other ranks does not matter.
        """
        try:
            result = self._of_document()
        except FileNotFoundError:
            try:
                result = self._of_lines()
            except BadResult as exc:
                self.refuse(str(exc))
                return
        except NotFiniteResult as exc:
            diverged = self._told_diverged(exc)
            self.rank.refuse(diverged)
            return
        except (BadResult, OSError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else exc
            self.refuse(f"{self.document.name}: {reason}")
            return
        self._finish(result, enough=enough)

    def hand_over_enough(self) -> None:
        """Make the result of a program whose lines are enough, however it ends."""
        self._finish(self._of_lines(), enough=True)

    def slowest_step(self) -> float | None:
        """The longest step of the document, in seconds; None if there is no valid one.

        A document that shows that the training diverged has none to wait for: 0.
        """
        try:
            return max(self._decoded(self._read_document()).step_seconds)
        except NotFiniteResult:
            return 0.0
        except (BadResult, OSError):
            return None

    def complete(self) -> bool:
        """Let the document of a program that was asked to end count, if it wrote one.

        A document that was cut off by the end is left out. One that shows that the training
        diverged takes the result back. Returns False then.
        """
        try:
            result = self._of_document()
        except NotFiniteResult as exc:
            self.rank.withdraw(self._told_diverged(exc))
            return False
        except (BadResult, OSError):
            self._complete_lines()
            return True
        self._finish(result, enough=True)
        return True

    def _complete_lines(self) -> None:
        """Add the memory that the program told, or was seen to use, until its end."""
        if self.metrics.has_enough:
            self.metrics.read()
            with suppress(BadResult):
                self._finish(self._of_lines(), enough=True)

    def report_diverged(self) -> int:
        """Report the divergence and end: the launcher ends the program with the gang."""
        assert self.metrics.diverged is not None
        sys.stderr.write(f"workloads.rank.NotFinite: {self.metrics.diverged}\n")
        self.rank.refuse(self.metrics.diverged)
        return 1

    def _of_document(self) -> RankResult:
        """The document, with what it lacks from the lines.

        Raises FileNotFoundError, OSError, BadResult, NotFiniteResult.
        """
        result = self._decoded(self._with_steps(self._read_document()))
        if not result.phase_seconds:
            result = result.model_copy(update={"phase_seconds": self._phase_seconds()})
        return self._completed(result)

    def _read_document(self) -> bytes:
        found = read_regular(self.document, num_bytes=MAX_RESULT_BYTES + 1)
        if not found.content:
            raise BadResult("the document is empty")
        return found.content

    def _with_steps(self, document: bytes) -> bytes:
        """Add the steps of the lines to a document without any."""
        try:
            told = json.loads(document)
        except (ValueError, RecursionError):
            return document
        warmup, timed = self._steps_of_lines()
        if not isinstance(told, dict) or "step_seconds" in told or not timed:
            return document
        return json.dumps({"warmup_seconds": warmup, **told, "step_seconds": timed}).encode()

    def _decoded(self, document: bytes) -> RankResult:
        """Raises BadResult, NotFiniteResult."""
        result = decode_result(document)
        has_null = "loss_last" in result.model_fields_set and result.loss_last is None
        if result.loss_first is not None and has_null:
            # So orjson and JavaScript write NaN.
            raise NotFiniteResult("loss_last", "null")
        for name in ("seen", "step_seconds_bound", "profile"):
            if getattr(result, name) is not None:
                raise BadResult(f"{name}: no field of a document; leave it out")
        return result

    def _of_lines(self) -> RankResult:
        """Raises BadResult if they are too few."""
        metrics = self.metrics
        if metrics.file.lost is not None:
            raise BadResult(metrics.file.lost)
        warmup, timed = self._steps_of_lines()
        if not timed:
            raise BadResult(self._why_too_few(len(warmup)))
        result = RankResult(
            warmup_seconds=warmup, step_seconds=timed, phase_seconds=self._phase_seconds()
        )
        return self._completed(result)

    def _why_too_few(self, num_steps: int) -> str:
        metrics, plan = self.metrics, self.rank.request.measurement
        text = (
            f"the program wrote {num_steps} steps, warm-up included; "
            f"expected more than {metrics.num_warmup}"
        )
        reasons = []
        if metrics.printed is not None and (why := metrics.printed.why_no_steps()):
            reasons.append(why)
        elif without := metrics.why_no_steps():
            reasons.append(without)
        if metrics.num_unread:
            reasons.append(
                f"{metrics.num_unread} lines were no steps, the first: {metrics.first_unread}"
            )
        if metrics.file.may_have_lost_lines:
            reasons.append(
                f"was {metrics.file.path.name} written anew for each step? If so, {APPEND}"
            )
        writes_nothing = metrics.printed is None and not metrics.file.written_at_ns
        log = self.rank.run_dir / log_file(self.rank.rank)
        if writes_nothing and not reasons and (unread := why_steps_are_unread(log)):
            reasons.append(unread)
        asked = plan.warmup_steps + plan.max_steps
        fix = f"let it run {asked} steps ({TELL_NUM_STEPS}), and report each"
        if metrics.names_num_steps:
            fix = f"report each of the {asked} steps that it is asked for"
        if writes_nothing:
            fix += f": {TELL_STEPS}"
        return "; ".join([text, *(reasons or [fix])])

    def _completed(self, result: RankResult) -> RankResult:
        fields = self.metrics.fields
        fields.take_memory_beside(self.metrics.file.path)
        return fields.completed(result)

    def _steps_of_lines(self) -> tuple[list[float], list[float]]:
        """The steps of the warm-up, and the timed ones."""
        steps, num_warmup = self.metrics.step_seconds, self.metrics.num_warmup
        return steps[:num_warmup], steps[num_warmup:]

    def _phase_seconds(self) -> dict[Phase, float]:
        return self.metrics.phase_seconds() if self._phases is None else dict(self._phases)

    def _finish(self, result: RankResult, *, enough: bool = False) -> None:
        seen = self.metrics.seen(ended_itself=not enough)
        is_told = result.peak_memory_resident_bytes is not None
        result = with_resident_memory(result, self.rank, self.program, least=self._resident_bytes)
        if not is_told:
            self._resident_bytes = result.peak_memory_resident_bytes or 0
        bound = self.metrics.step_seconds_bound
        result = result.model_copy(update={"seen": seen, "step_seconds_bound": bound})
        self.rank.finish(redacted(result, self.secrets), enough=enough)
        self._phases = self._phases or result.phase_seconds

    def _told_diverged(self, exc: NotFiniteResult) -> NotFinite:
        diverged = NotFinite.of(exc.name, exc.value)
        sys.stderr.write(f"{self.document.name}: {diverged}\n")
        return diverged

    def refuse(self, reason: str) -> None:
        """Report why the program left no result, in the log and to the launcher."""
        reason = self.secrets.redact(reason)
        sys.stderr.write(f"{reason}\n")
        self.rank.refuse(BadResult(reason))


# Fields that only the rank that reports may tell.
_OF_TRAINING = ("loss_first", "loss_last", "gradient_norm", "tokens_per_step", "phase_seconds")


def hand_over_memory(
    rank: Rank, program: int, *, document: Path, lines: Path, secrets: Secrets
) -> None:
    """Make the result of a rank other than 0: its memory and own fields, if it tells any."""
    fields = ToldFields.of_file(lines)
    fields.take_memory_beside(lines)
    with suppress(OSError, ValueError, RecursionError):
        told = json.loads(read_regular(document, num_bytes=MAX_RESULT_BYTES + 1).content)
        if isinstance(told, dict):
            fields.take(told)
    values: dict[str, Any] = fields.values()
    kept = {name: value for name, value in values.items() if name not in _OF_TRAINING}
    result = with_resident_memory(RankResult(step_seconds=[], **kept), rank, program)
    if result.model_fields_set > {"step_seconds"}:
        rank.finish(redacted(result, secrets))


def with_resident_memory(
    result: RankResult, rank: Rank, program: int, *, least: int = 0
) -> RankResult:
    """Add the resident memory of a program on a CPU, if it does not tell that itself.

    `least`: what it is known to have used, in bytes.
    """
    if rank.request.device is not Device.CPU or result.peak_memory_resident_bytes is not None:
        return result
    resident = max(peak_resident_bytes(program) or 0, least)
    if not resident:
        return result
    return result.model_copy(update={"peak_memory_resident_bytes": resident})
