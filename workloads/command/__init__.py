"""Any program as a workload: started once per rank with torchrun's environment, told its layout by
arguments or environment.

Its numbers come from rank 0, either as one small JSON file (SWEEP_RESULT_FILE: the fields of a
result, only step_seconds required) or as JSON lines while it runs (SWEEP_METRICS_FILE:
{"step_seconds": 0.52, "loss": 9.1} per optimizer step, warm-up included; a loss that is not finite
ends it at once). The rank that the launcher sees is this module, which waits for the program; it
ends as the program ended, signal for signal, and the program dies with it.
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

RESULT_VARIABLE = "SWEEP_RESULT_FILE"
METRICS_VARIABLE = "SWEEP_METRICS_FILE"

_POLL_SECONDS = 0.05
_MAX_METRICS_BYTES = 64 * MAX_RESULT_BYTES


class _Metric(BaseModel):
    """One line of the metrics file; what else stands in it is the program's own."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    step_seconds: Annotated[float, Field(gt=0, le=1e7)] | None = None
    loss: Any = None
    gradient_norm: Any = None
    # As torchtitan, Hugging Face and Megatron-LM call it
    grad_norm: Any = None


def main() -> int:
    rank = context()
    try:
        options = parse_options(CommandOptions, rank.request.options)
        result_path, metrics_path = (
            rank.run_dir / "program-result.json",
            rank.run_dir / "program-metrics.jsonl",
        )
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
            raise ConfigRejected(
                f"workload.options.env_from names {', '.join(missing)}, which did not reach this rank"
            )
    except (ConfigRejected, ValueError) as exc:  # the latter of a template
        sys.stderr.write(f"workloads.rank.ConfigRejected: {exc}\n")
        return 2
    try:
        program = subprocess.Popen(
            argv, env=environment, cwd=cwd, preexec_fn=partial(_die_with, os.getpid())
        )
    except (OSError, ValueError) as exc:
        # The latter of a text that no argument can hold: a NUL, or letters unknown to the locale
        sys.stderr.write(
            f"cannot start {argv[0]!r} in {cwd}: {exc.strerror if isinstance(exc, OSError) else exc}\n"
        )
        return 127
    metrics = _Metrics(metrics_path, rank)
    secrets = Secrets({name: os.environ[name] for name in options.env_from})
    code = _wait(program, rank, metrics)
    # A program that ends itself may have noticed the same; of one that a signal ended, the signal
    # is what counts.
    if code is None or (
        0 <= code < 128 and rank.rank == 0 and metrics.ends_diverged(well=code == 0)
    ):
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
    """Have the program killed when this rank dies: between fork and exec, in the fork of a process
    with one thread.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != rank:  # it died before the call above
        os._exit(1)


def template_names(
    request: TrialRequest, *, run_dir: Path, result_file: Path, metrics_file: Path
) -> dict[str, str]:
    """What an argument may name in braces; each is also in the environment, as
    SWEEP_MICRO_BATCH_SIZE and so on.
    """
    layout, plan = request.layout, request.measurement
    return {
        "data_parallel_size": str(layout.data_parallel_size),
        "tensor_parallel_size": str(layout.tensor_parallel_size),
        "pipeline_parallel_size": str(layout.pipeline_parallel_size),
        "context_parallel_size": str(layout.context_parallel_size),
        "micro_batch_size": str(layout.micro_batch_size),
        "grad_accum_steps": str(layout.grad_accum_steps),
        "recompute": str(layout.recompute),
        "zero_stage": str(layout.zero_stage),
        "precision": str(layout.precision),
        "world_size": str(layout.world_size),
        "global_batch_size": str(layout.global_batch_size),
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
    """Wait for the program; each new line of metrics is a step, for the launcher's limits, of every
    rank on rank 0's node.

    None: its loss is not finite any more, as rank 0 sees, and nobody needs to wait for its end.

    A program that writes nothing until its end is held to the limit of its first step. On other
    nodes nothing shows how far it is: there only the total limit holds, and rank 0's launcher tells
    a hang.
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
        # Monotonic, of the last step that was reported
        self._last_at: float | None = None
        self.num_unread, self.first_unread = 0, ""  # lines that are no metric
        # By the first loss that is not finite
        self.diverged: NotFinite | None = None
        # The last gradient norm: its name, its value and its step
        self._norm: tuple[str, Any, int] | None = None

    def read(self) -> None:
        """Take the new lines. What is no metric is left out: the program's own affair."""
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
        """Seconds in each phase, once the program has ended, as far as its lines tell: `first_step`
        from its start to its first line.

        What it does before that first line is all in there; what it does after its last one is
        teardown.
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
            self._look(metric)
        if len(self.step_seconds) > before:
            self._last_at = time.monotonic()
            done = len(self.step_seconds)
            self._rank.heartbeat(
                Phase.STEADY, done, timed=done >= self._rank.request.measurement.warmup_steps
            )

    def _look(self, metric: _Metric) -> None:
        """Note a loss that is not finite.

        Of gradient norms the last counts: a scaler of fp16 losses skips single steps that overflow.
        """
        step = max(1, len(self.step_seconds))
        if self.diverged is None and _is_not_finite(metric.loss):
            self.diverged = NotFinite.of("loss", metric.loss, step=step)
        norm = metric.gradient_norm if metric.gradient_norm is not None else metric.grad_norm
        if norm is not None:
            self._norm = ("gradient norm", norm, step)

    def ends_diverged(self, *, well: bool) -> bool:
        """Whether the program has diverged, now that all of its lines are there; by its gradient
        norm only where it ended `well`.
        """
        self.read_to_the_end()
        if (
            self.diverged is None
            and well
            and self._norm is not None
            and _is_not_finite(self._norm[1])
        ):
            name, value, step = self._norm
            self.diverged = NotFinite.of(name, value, step=step)
        return self.diverged is not None


def _is_not_finite(value: Any) -> bool:
    """Whether a value is NaN or infinite, also where it is written as a text.

    Null, and what is no number at all, are not.
    """
    try:
        return value is not None and not isinstance(value, bool) and not math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
    except OverflowError:  # an integer beyond any float
        return True


def _diverged(rank: Rank, metrics: _Metrics) -> int:
    """Say so, and end: what the program still does is ended with the gang."""
    assert metrics.diverged is not None
    sys.stderr.write(f"workloads.rank.NotFinite: {metrics.diverged}\n")
    rank.refuse(metrics.diverged)
    return 1


def _hand_over(rank: Rank, result_path: Path, metrics: _Metrics, secrets: Secrets) -> None:
    """Make rank 0's result out of what the program left, its file first, without secrets.

    If that is none, say why.
    """
    phases = metrics.phase_seconds()
    warmup_steps = rank.request.measurement.warmup_steps
    try:
        with result_path.open("rb") as file:
            result = decode_result(file.read(MAX_RESULT_BYTES + 1))
        if (
            result.loss_first is not None
            and result.loss_last is None
            and "loss_last" in result.model_fields_set
        ):
            raise NotFiniteResult("loss_last", "null")  # as orjson and JavaScript write NaN
        if not result.phase_seconds:
            result = result.model_copy(update={"phase_seconds": phases})
    except FileNotFoundError:
        steps = metrics.step_seconds[: warmup_steps + MAX_SAMPLES]
        if len(steps) <= warmup_steps:
            unread = (
                f"; {metrics.num_unread} lines were no steps, the first: {metrics.first_unread}"
                if metrics.num_unread
                else ""
            )
            said = f"the program wrote {len(steps)} steps, warm-up included; expected more than {warmup_steps}{unread}"
            _refuse(rank, secrets.blot(said))
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
    """Say why what the program left is no result, in its log and to the launcher."""
    sys.stderr.write(f"{reason}\n")
    rank.refuse(BadResult(reason))


def _die_of(number: int) -> None:
    """End as the program ended, so that the launcher judges the program and not this wrapper."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
