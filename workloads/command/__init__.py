"""Any program as a workload: one per rank, with torchrun's environment, and its layout as arguments
or variables.

Its numbers come from rank 0: one small JSON file (SWEEP_RESULT_FILE: the fields of a result, only
step_seconds required), or JSON lines while it runs (SWEEP_METRICS_FILE: {"step_seconds": 0.52,
"loss": 9.1} per optimizer step, warm-up included; a loss that is not finite ends it at once). The
rank itself is this module: it waits for the program, ends with the same exit code or signal, and
the program dies with it.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.core.problem.layout import NAMED_AXES
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.template import fill
from orchestrator.core.trial.protocol import (
    MAX_RESULT_BYTES,
    MAX_SAMPLES,
    BadResult,
    NotFiniteResult,
    Phase,
    RankResult,
    TrialRequest,
    decode_result,
)
from orchestrator.core.trial.redaction import Secrets, blotted
from workloads.options import parse_options
from workloads.rank import ConfigRejected, NotFinite, Rank, context

_PRODUCTS = ("world_size", "global_batch_size")  # of a layout's sizes
_POLL_SECONDS = 0.05
_MAX_METRICS_BYTES = 64 * MAX_RESULT_BYTES


class _Metric(BaseModel):
    """One line of the metrics file. Other keys are the program's affair."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    step_seconds: Annotated[float, Field(gt=0, le=1e7)] | None = None
    loss: Any = None
    gradient_norm: Any = None
    grad_norm: Any = None  # the name in torchtitan and others


def main() -> int:
    rank = context()
    try:
        options = parse_options(CommandOptions, rank.request.options)
        result_path = rank.run_dir / "program-result.json"
        metrics_path = rank.run_dir / "program-metrics.jsonl"
        names = template_names(
            rank.request, run_dir=rank.run_dir, result_file=result_path, metrics_file=metrics_path
        )
        argv = [fill(text, names) for text in options.argv]
        environment = (
            dict(os.environ)
            | {f"SWEEP_{name.upper()}": value for name, value in names.items()}
            | {name: fill(text, names) for name, text in options.env.items()}
        )
        cwd = fill(options.cwd, names) if options.cwd is not None else str(rank.run_dir)
        if missing := [name for name in options.env_from if name not in os.environ]:
            text = f"workload.options.env_from names {', '.join(missing)}"
            raise ConfigRejected(f"{text}, which did not reach this rank")
    except (ConfigRejected, ValueError) as exc:  # ValueError: a template
        sys.stderr.write(f"workloads.rank.ConfigRejected: {exc}\n")
        return 2
    try:
        program = subprocess.Popen(
            argv, env=environment, cwd=cwd, preexec_fn=partial(_die_with, os.getpid())
        )
    except (OSError, ValueError) as exc:
        # ValueError: no argument can contain a NUL, or letters unknown to the locale.
        reason = exc.strerror if isinstance(exc, OSError) else exc
        sys.stderr.write(f"cannot start {argv[0]!r} in {cwd}: {reason}\n")
        return 127
    metrics = _Metrics(metrics_path, rank)
    secrets = Secrets({name: os.environ[name] for name in options.env_from})
    code = _wait(program, rank, metrics)
    # A program that exits may have noticed the divergence itself; a signal counts more than that.
    has_exited = code is not None and 0 <= code < 128
    if code is None or (has_exited and rank.rank == 0 and metrics.ends_diverged(well=code == 0)):
        return _diverged(rank, metrics)
    if code < 0:
        _die_of(-code)
    if code == 0 and rank.rank == 0:
        _hand_over(rank, result_path, metrics, secrets)
    elif code == 0:
        rank.heartbeat(Phase.TEARDOWN, rank.step)  # the numbers are rank 0's
    return code


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _die_with(rank: int) -> None:
    """Have the program killed when this rank dies. For the fork of a process with one thread."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != rank:  # it died before the call above
        os._exit(1)


def template_names(
    request: TrialRequest, *, run_dir: Path, result_file: Path, metrics_file: Path
) -> dict[str, str]:
    """The names for braces in arguments; also in the environment, as SWEEP_MICRO_BATCH_SIZE etc."""
    layout, plan = request.layout, request.measurement
    return {
        **{name: str(getattr(layout, name)) for name in (*NAMED_AXES, *_PRODUCTS)},
        "sequence_length": str(request.sequence_length),
        "num_steps": str(plan.warmup_steps + plan.max_steps),
        "seed": str(request.seed),
        "run_dir": str(run_dir),
        "result_file": str(result_file),
        "metrics_file": str(metrics_file),
        **{
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in layout.options
        },
    }


def _wait(program: subprocess.Popen[bytes], rank: Rank, metrics: _Metrics) -> int | None:
    """Wait for the program. Each new line of metrics is a step of every rank on rank 0's node.

    Returns None if rank 0's loss is not finite any more: nobody needs to wait for the program's
    end.

    The limit of the first step holds for a program that writes nothing until its end. On other
    nodes nothing shows its progress: there only the total limit holds, and rank 0's launcher
    detects a hang.
    """
    on_node_of_rank_0 = rank.rank == rank.local_rank
    rank.heartbeat(Phase.FIRST_STEP)
    while True:
        try:
            return program.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if on_node_of_rank_0:
                metrics.read()
                if rank.rank == 0 and metrics.diverged is not None:
                    return None
            else:
                rank.heartbeat(Phase.STEADY)


class _Metrics:
    """The JSON lines that a program appends, read as they come."""

    def __init__(self, path: Path, rank: Rank) -> None:
        self._path = path
        self._rank = rank
        self._offset = 0
        self._rest = b""
        self.step_seconds: list[float] = []
        self._last_at: float | None = None  # the last report, monotonic
        self.num_unread, self.first_unread = 0, ""  # lines that are no metric
        self.diverged: NotFinite | None = None
        # The last gradient norm: its name, its value and its step.
        self._norm: tuple[str, Any, int] | None = None

    def read(self) -> None:
        """Read the new lines, and skip those that are no metric."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read(MAX_RESULT_BYTES)
        except OSError:
            return
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        self._take(lines)

    def read_to_the_end(self) -> None:
        before = -1
        while before != self._offset and self._offset < _MAX_METRICS_BYTES:
            before = self._offset
            self.read()
        self._take([self._rest])  # a last line without its end
        self._rest = b""

    def phase_seconds(self) -> dict[Phase, float]:
        """Seconds in each phase of a program that has ended.

        `first_step` lasts from its start to its first line, teardown from its last line on.
        """
        phases = self._rank.phase_seconds()
        if self._last_at is None:
            return {phase: seconds for phase, seconds in phases.items() if phase is Phase.START}
        after = time.monotonic() - self._last_at
        return {
            **phases,
            Phase.STEADY: max(phases[Phase.STEADY] - after, 0.0),
            Phase.TEARDOWN: after,
        }

    def _take(self, lines: Sequence[bytes]) -> None:
        before = len(self.step_seconds)
        for line in lines:
            try:
                metric = _Metric.model_validate_json(line)
            except ValidationError:
                metric = _Metric()
            if metric.step_seconds is not None:
                self.step_seconds.append(metric.step_seconds)
            elif line.strip():
                self.num_unread += 1
                self.first_unread = self.first_unread or line[:200].decode(errors="replace")
            self._check_finite(metric)
        if len(self.step_seconds) > before:
            self._last_at = time.monotonic()
            done = len(self.step_seconds)
            self._rank.heartbeat(
                Phase.STEADY, done, timed=done >= self._rank.request.measurement.warmup_steps
            )

    def _check_finite(self, metric: _Metric) -> None:
        """Note the first loss that is not finite, and the last gradient norm."""
        step = max(1, len(self.step_seconds))
        if self.diverged is None and _is_not_finite(metric.loss):
            self.diverged = NotFinite.of("loss", metric.loss, step=step)
        norm = metric.gradient_norm if metric.gradient_norm is not None else metric.grad_norm
        if norm is not None:
            # Only the last one counts: a scaler of fp16 losses skips single steps that overflow.
            self._norm = ("gradient norm", norm, step)

    def ends_diverged(self, *, well: bool) -> bool:
        """True if the program diverged; its gradient norm counts only if it ended `well`."""
        self.read_to_the_end()
        if self.diverged is None and well and self._norm is not None:
            name, value, step = self._norm
            if _is_not_finite(value):
                self.diverged = NotFinite.of(name, value, step=step)
        return self.diverged is not None


def _is_not_finite(value: Any) -> bool:
    """True for NaN and infinity, also as texts; False for null and for what is no number."""
    try:
        return value is not None and not isinstance(value, bool) and not math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
    except OverflowError:  # an integer beyond any float
        return True


def _diverged(rank: Rank, metrics: _Metrics) -> int:
    """Report the divergence and end: the launcher ends the program with the gang."""
    assert metrics.diverged is not None
    sys.stderr.write(f"workloads.rank.NotFinite: {metrics.diverged}\n")
    rank.refuse(metrics.diverged)
    return 1


def _hand_over(rank: Rank, result_path: Path, metrics: _Metrics, secrets: Secrets) -> None:
    """Make rank 0's result of the program's file or lines, or report why there is none."""
    phases = metrics.phase_seconds()
    warmup_steps = rank.request.measurement.warmup_steps
    try:
        with result_path.open("rb") as file:
            result = decode_result(file.read(MAX_RESULT_BYTES + 1))
        has_null = "loss_last" in result.model_fields_set and result.loss_last is None
        if result.loss_first is not None and has_null:
            # So orjson and JavaScript write NaN.
            raise NotFiniteResult("loss_last", "null")
        if not result.phase_seconds:
            result = result.model_copy(update={"phase_seconds": phases})
    except FileNotFoundError:
        steps = metrics.step_seconds[: warmup_steps + MAX_SAMPLES]
        if len(steps) <= warmup_steps:
            text = (
                f"the program wrote {len(steps)} steps, warm-up included; "
                f"expected more than {warmup_steps}"
            )
            if metrics.num_unread:
                text += f"; {metrics.num_unread} lines were no steps, the first: "
                text += metrics.first_unread
            _refuse(rank, secrets.blot(text))
            return
        result = RankResult(
            warmup_seconds=steps[:warmup_steps],
            step_seconds=steps[warmup_steps:],
            phase_seconds=phases,
        )
    except NotFiniteResult as exc:
        diverged = NotFinite.of(exc.name, exc.value)
        sys.stderr.write(f"{result_path.name}: {diverged}\n")
        rank.refuse(diverged)
        return
    except (BadResult, OSError) as exc:
        _refuse(rank, secrets.blot(f"{result_path.name}: {exc}"))
        return
    rank.finish(blotted(result, secrets))


def _refuse(rank: Rank, reason: str) -> None:
    """Report why the program left no result, in the log and to the launcher."""
    sys.stderr.write(f"{reason}\n")
    rank.refuse(BadResult(reason))


def _die_of(number: int) -> None:
    """End as the program ended, so that the launcher judges the program and not this wrapper."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
