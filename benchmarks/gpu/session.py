"""One run of a GPU script: its command line, deadline and launcher, and the file of what it found.

Every script is `python -m benchmarks.gpu.NAME OUT_DIR [--rehearse] [--seconds N]`, and writes
OUT_DIR/NAME.json after each attempt. What the file has already is not measured again, so the same
command continues after its deadline. Ranks start through the project's own launcher: a request
file, a fresh process, a result file. Ray and the store take no part, and no network is used.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.arm_job import ArmJob, run_arm
from benchmarks.gpu.attempt import Attempt
from benchmarks.gpu.attempt_record import record_of
from benchmarks.machine import PROJECT, describe_machine
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import (
    Device,
    MeasurementPlan,
    PhaseLimits,
    TrialRequest,
)
from orchestrator.node.launcher import NodeLauncher
from orchestrator.node.processes import descendants, global_identity

# All scripts end within nine minutes: the last attempt may need this long after the deadline.
MARGIN_SECONDS = 25.0
DEADLINE_SECONDS = 540.0 - MARGIN_SECONDS
# On two cores that others use, too.
REHEARSAL_SECONDS = 280.0
# An attempt is not started when less time is left than the longest attempt of its kind took.
FIRST_GUESS_SECONDS = 20.0
MOST_SECONDS = 150.0  # of one attempt
SEED = 0
# Where compiled kernels are kept between attempts and between commands.
COMPILE_CACHE = Path(tempfile.gettempdir()) / "layout-sweep-compiled"
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What nvidia-smi says of the first visible GPU."""

    name: str
    total_bytes: int
    used_bytes: int


class Session:
    """The records of one script, each under its key, and the means to make more of them."""

    def __init__(
        self, name: str, out_dir: Path, *, rehearse: bool, seconds: float = DEADLINE_SECONDS
    ) -> None:
        self.name, self.rehearse = name, rehearse
        self.path = out_dir / f"{name}.json"
        self.end = time.monotonic() + (REHEARSAL_SECONDS if rehearse else seconds)
        self.visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-script-")
        self._launcher: NodeLauncher | None = None
        self._number = 0
        self._longest: dict[str, float] = {}
        self._known = self._read()
        self._known.setdefault("machines", [])
        self._is_described = False
        self.left_out: list[str] = []

    @classmethod
    def of_command(
        cls, about: str | None, *, name: str, seconds: float = DEADLINE_SECONDS
    ) -> Session:
        parser = argparse.ArgumentParser(
            description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("out_dir", type=Path, help="the folder of NAME.json")
        parser.add_argument(
            "--rehearse", action="store_true", help="the same with tiny models on a CPU"
        )
        parser.add_argument(
            "--seconds",
            type=float,
            default=seconds,
            help="start nothing more after so many seconds of a GPU's time (default %(default)s)",
        )
        arguments = parser.parse_args()
        arguments.out_dir.mkdir(parents=True, exist_ok=True)
        return cls(name, arguments.out_dir, rehearse=arguments.rehearse, seconds=arguments.seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._launcher is not None:
            self._launcher.close()
        self._folder.cleanup()

    @property
    def folder(self) -> Path:
        """A folder that is removed in the end."""
        return Path(self._folder.name)

    @property
    def device(self) -> Device:
        return Device.CPU if self.rehearse else Device.CUDA

    @property
    def precision(self) -> str:
        return "fp32" if self.rehearse else "bf16"

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self._known.setdefault("records", {})
        return found

    def time_left(self) -> float:
        return self.end - time.monotonic()

    def keep(
        self, key: str, make: Callable[[], Mapping[str, Any] | None], *, kind: str = ""
    ) -> dict[str, Any] | None:
        """The record of this key; made now if there is none, and None if no time is left for it.

        Records of one `kind` take about as long as each other. `make` returns None for nothing to
        keep.
        """
        if key in self.records:
            return self.records[key]
        expected = self._longest.get(kind, 0.0 if self.rehearse else FIRST_GUESS_SECONDS)
        if self.time_left() < expected:
            self.left_out.append(key)
            return None
        self._require_device()
        begin = time.monotonic()
        made = make()
        seconds = time.monotonic() - begin
        self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)
        if made is None:
            self.left_out.append(key)
            return None
        machine = len(self._known["machines"]) - 1
        self.records[key] = {**made, "seconds": round(seconds, 2), "machine": machine}
        self._write()
        print(f"{seconds:6.1f} s  {key}: {_headline(made)}", flush=True)
        return self.records[key]

    def measure(self, attempt: Attempt) -> dict[str, Any] | None:
        """The record of an attempt; None if it had to be left out."""
        return self.keep(attempt.key, lambda: self._run(attempt), kind=attempt.kind)

    def train(self, key: str, job: ArmJob, **facts: Any) -> dict[str, Any] | None:
        """The record of a process of `trainer_arm.py`, with facts about it."""

        def trained() -> dict[str, Any] | None:
            found = run_arm(job, timeout=max(self.time_left(), 1.0) + MARGIN_SECONDS / 2)
            is_late = "error" in found and self.time_left() <= 0
            return None if is_late else {**facts, **found}

        return self.keep(key, trained, kind=f"{job.arm} {facts}")

    def product_flops(self) -> float | None:
        """FLOP/s of matrix products kept up for some seconds on this device."""

        def multiplied() -> dict[str, Any]:
            wanted = ("--seconds", "0.2") if self.rehearse else ("--seconds", "5", "--devices", "0")
            done = subprocess.run(
                [sys.executable, "-m", "workloads.tools.matmul", *wanted],
                cwd=PROJECT,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                return {"error": done.stderr[-500:]}
            said = json.loads(done.stdout)
            return {**said, "flops": next(iter(said["flops"].values()), None)}

        record = self.keep("matrix products", multiplied)
        return None if record is None else record.get("flops")

    def memory_used_bytes(self) -> int:
        """What is used of the GPU; in a rehearsal, the memory of all processes started here."""
        if not self.rehearse:
            return self.gpu().used_bytes
        return sum(_resident_bytes(pid) for pid in descendants(os.getpid()))

    def gpu(self) -> Gpu:
        """Ask nvidia-smi. Ends with exit code 2 if there is no GPU."""
        if shutil.which("nvidia-smi") is None:
            raise SystemExit(self._without_gpu())
        fields = "name,memory.total,memory.used"
        command = ("nvidia-smi", "-i", self.visible, f"--query-gpu={fields}")
        said = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False
        )
        words = said.stdout.strip().rsplit(",", 2)
        if said.returncode or len(words) != 3:
            raise SystemExit(self._without_gpu())
        name, total, used = (word.strip() for word in words)
        return Gpu(name=name, total_bytes=int(total) * MIB, used_bytes=int(used) * MIB)

    def known_gpu(self) -> Gpu:
        """The GPU that was measured on; before anything was, the one here."""
        machines = self._known["machines"]
        return Gpu(**machines[-1]["gpu"]) if machines else self.gpu()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, and say whether the script has all its records."""
        self._known |= {"summary": dict(summary), "left_out": self.left_out}
        self._known["is_complete"] = not self.left_out
        self._write()
        print(json.dumps(self._known["summary"], indent=1))
        if self.left_out:
            print(
                f"{self.name}: the time is over; {len(self.left_out)} of the records are missing."
                " The same command continues."
            )

    def request(self, attempt: Attempt) -> TrialRequest:
        """The request of an attempt, as a sweep would make it."""
        self._number += 1
        left = max(5.0, min(MOST_SECONDS, self.time_left() + MARGIN_SECONDS / 2))
        limits = dict.fromkeys(("start", "rendezvous", "first_step", "steady", "total"), left)
        return TrialRequest(
            sweep=f"gpu-{self.name}",
            trial_id=self._number,
            attempt=1,
            workload="llama",
            options={**attempt.options, **dict(attempt.layout.options)},
            model=attempt.shape,
            sequence_length=attempt.sequence_length,
            layout=attempt.layout,
            device=self.device,
            measurement=self._plan(attempt),
            limits=PhaseLimits(**limits, teardown=15.0),
            seed=SEED,
        )

    def _plan(self, attempt: Attempt) -> MeasurementPlan:
        if self.rehearse:
            return MeasurementPlan(
                warmup_steps=1, min_steps=2, max_steps=2, relative_confidence=0.02
            )
        # They may take more steps than `max_steps`, until the seconds have passed.
        long = {"warmup_seconds": min(2.0, attempt.seconds / 2), "min_seconds": attempt.seconds}
        return MeasurementPlan(
            warmup_steps=2,
            min_steps=attempt.min_steps,
            max_steps=attempt.min_steps,
            relative_confidence=0.02,
            **long,
        )

    def _run(self, attempt: Attempt) -> dict[str, Any] | None:
        request = self.request(attempt)
        report = self.launch(request)
        is_late = self.time_left() <= 0
        kind = report.failure.kind if report.failure is not None else None
        if is_late and kind in (FailureKind.HUNG, FailureKind.CANCELLED):
            return None  # our own limit has ended it
        return record_of(request, report)

    def launch(self, request: TrialRequest) -> NodeReport:
        """Run a request on this machine until its last process has ended."""
        if self._launcher is None:
            self._launcher = NodeLauncher(self.folder / "runs", node="local")
        threads = {"OMP_NUM_THREADS": "1"} if self.rehearse else {}
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": str(COMPILE_CACHE / "inductor"),
            "TRITON_CACHE_DIR": str(COMPILE_CACHE / "triton"),
        }
        order = LaunchOrder(
            request=request,
            program="workloads.llama",
            local_world_size=1,
            devices=() if self.rehearse else (self.visible,),
            orchestrator=global_identity(),
            environment={**threads, **caches},
        )
        return self._launcher.run(order)

    def _require_device(self) -> None:
        """Describe this machine, once and before anything is measured on it."""
        if self._is_described:
            return
        gpu = None if self.rehearse else asdict(self.gpu())
        self._known["machines"].append({**describe_machine(), "gpu": gpu})
        self._is_described = True

    def _without_gpu(self) -> int:
        print(
            f"{self.name}: no NVIDIA GPU here (nvidia-smi names none).\n"
            "--rehearse runs the same with tiny models on a CPU.",
            file=sys.stderr,
        )
        return 2

    def _read(self) -> dict[str, Any]:
        new = {"benchmark": f"gpu.{self.name}", "is_rehearsal": self.rehearse}
        if not self.path.exists():
            return new
        known: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        if {key: known.get(key) for key in new} != new:
            raise SystemExit(
                f"{self.path} is of another script, or one is a rehearsal and the other is not:"
                " choose another folder"
            )
        return known

    def _write(self) -> None:
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(self._known, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.path)


def _headline(record: Mapping[str, Any]) -> str:
    speed = record.get("tokens_per_second")
    return f"{speed:,.0f} tokens/s" if speed else str(record.get("outcome", "done"))


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
