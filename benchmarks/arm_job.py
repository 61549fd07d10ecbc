"""A job of `trainer_arm.py`: which program trains which layout, written for its process and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import PROJECT
from orchestrator.core.trial.protocol import Device, TrialRequest

PROGRAM = PROJECT / "benchmarks" / "trainer_arm.py"
# Steps with tokens of their own; later steps repeat them.
DISTINCT_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class ArmJob:
    """An arm (`llama`, `transformers`, `torchtitan`) and the steps that it trains."""

    arm: str
    request: TrialRequest
    num_warmup: int
    num_steps: int
    seconds: float = 0.0  # of timed steps, at least
    compile: bool = False
    # Wait for the device around each step.
    synchronised: bool = False
    num_threads: int = 1


def run_arm(job: ArmJob, *, python: str = sys.executable, timeout: float) -> dict[str, Any]:
    """What the arm printed, or `{"error": ...}` with the end of what it said."""
    with tempfile.TemporaryDirectory() as folder:
        tokens, file = Path(folder) / "tokens.npy", Path(folder) / "job.json"
        # Workload llama makes its own.
        if job.arm != "llama":
            np.save(tokens, tokens_of(job.request))
        file.write_text(json.dumps(described(job, tokens)))
        variables = {**os.environ, "OMP_NUM_THREADS": str(job.num_threads)}
        if job.arm == "llama":
            variables["PYTHONPATH"] = os.pathsep.join(
                filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])
            )
        try:
            done = subprocess.run(
                [python, "-P", str(PROGRAM), str(file)],
                env=variables,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"it took more than {timeout:.0f} s"}
    if done.returncode:
        return {"error": (done.stdout + done.stderr)[-1500:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def described(job: ArmJob, tokens: Path) -> dict[str, Any]:
    """The job as its process reads it, without a type of this project."""
    request = job.request
    return {
        "arm": job.arm,
        "device": "cpu" if request.device is Device.CPU else "cuda",
        "num_threads": job.num_threads,
        "synchronised": job.synchronised,
        "num_warmup": job.num_warmup,
        "num_steps": job.num_steps,
        "seconds": job.seconds,
        "precision": request.layout.precision.value,
        "recompute": str(request.layout.recompute),
        "compile": job.compile,
        "tokens": str(tokens),
        "sequence_length": request.sequence_length,
        "model": asdict(request.model),
        "request": request.model_dump(mode="json"),
    }


def tokens_of(request: TrialRequest) -> np.ndarray[Any, Any]:
    """The ids that workload llama trains with: (steps, micro-batches, sequences, length + 1)."""
    # Its package imports torch, which takes seconds that most scripts do not need.
    from workloads.llama.data import Tokens

    layout, length = request.layout, request.sequence_length
    tokens = Tokens(vocab_size=request.model.vocab_size, sequence_length=length, seed=request.seed)
    size = layout.global_batch_size
    ids = [
        tokens.sequence(step=step, index=index, global_batch_size=size)
        for step in range(DISTINCT_STEPS)
        for index in range(size)
    ]
    shape = (DISTINCT_STEPS, layout.grad_accum_steps, layout.micro_batch_size, length + 1)
    return np.stack(ids).reshape(shape)


def can_import(python: str, module: str) -> bool:
    """True if this interpreter finds the module."""
    text = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", text], capture_output=True, check=False).returncode == 0
