"""Runs a user's program as workload command on one GPU, with a clock that is right and with others.

    python -m benchmarks.gpu.programs OUT_DIR [--rehearse] [--seconds N]

A Llama of transformers, measured through the whole program: `sweep run`, Ray, launcher, SQLite.
Its clock waits for the GPU, never waits, or tells milliseconds as seconds. Another sweep then takes
over the first (`--reuse`), and has to launch nothing. Each sweep's output and its trials go into
OUT_DIR/programs.json. Needs what `sweep run` needs, and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import PROJECT, describe_machine
from orchestrator.core.problem.model_shape import PRESETS

PROGRAM = Path(__file__).with_name("user_program.py")
CLI = "import sys; from orchestrator.cli import main; sys.exit(main())"
# By the clock: how many layouts are launched in its sweep, before repeats.
LAUNCHES = {"waits": 3, "never": 2, "milliseconds": 1}
# How long a sweep that was asked to end may take.
ENDING_SECONDS = 60.0
COLUMNS = (
    "layout, state, failure_kind, failure_message, tokens_per_second, step_seconds_median,"
    " num_steps, mfu, peak_flops_source, confident, implausible, unsteady,"
    " peak_memory_driver_bytes, peak_memory_driver_kind, device_memory_bytes,"
    " device_name, driver, torch, cuda, gpu_busy, gpu_power_watts, gpu_clock_mhz, gpu_seconds,"
    " num_measurements, reused_from"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="with a tiny model on a CPU")
    parser.add_argument("--seconds", type=float, default=300.0, help="of all sweeps together")
    parser.add_argument(
        "--only", nargs="+", choices=list(LAUNCHES), help="measure with these clocks alone"
    )
    arguments = parser.parse_args()
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.seconds
    found: dict[str, Any] = {
        "benchmark": "gpu.programs",
        "is_rehearsal": arguments.rehearse,
        "machine": describe_machine(),
        "sweeps": {},
    }
    with tempfile.TemporaryDirectory(prefix="gpu-programs-") as name:
        folder = Path(name)
        clocks = arguments.only or (["waits"] if arguments.rehearse else list(LAUNCHES))
        sweeps = [(clock, sweep_of(clock, folder, rehearse=arguments.rehearse)) for clock in clocks]
        if clocks[0] == "waits":
            sweeps.insert(1, ("again", {**sweeps[0][1], "name": "again"}))
        for clock, spec in sweeps:
            file = folder / f"{clock}.yaml"
            file.write_text(yaml.safe_dump(spec), encoding="utf-8")
            reuse = ("--reuse", "waits") if clock == "again" else ()
            left = max(1.0, end - time.monotonic())
            found["sweeps"][clock] = measured(file, clock, reuse, folder=folder, timeout=left)
            text = json.dumps(found, indent=1) + "\n"
            (arguments.out_dir / "programs.json").write_text(text, encoding="utf-8")
    return 0


def sweep_of(clock: str, folder: Path, *, rehearse: bool) -> dict[str, Any]:
    model = "llama-tiny" if rehearse else "llama-3.2-1b"
    length = 64 if rehearse else 2048
    sizes = folder / "model.json"
    sizes.write_text(json.dumps(asdict(PRESETS[model])), encoding="utf-8")
    layout = ["{micro_batch_size}", "{grad_accum_steps}", str(length), "{num_steps}"]
    return {
        "name": clock,
        "model": model,
        "gpus": 1,
        "gpus_per_node": 1,
        "device": "cpu" if rehearse else "auto",
        "sequence_length": length,
        "global_batch_size": 8,
        "precision": "fp32" if rehearse else "bf16",
        "axes": {"micro_batch_size": [1, 2, 4], "recompute": ["none"]},
        "search": {"max_trials": LAUNCHES[clock], "confirm": {"repeats": 1}},
        "workload": {
            "name": "command",
            "options": {
                "argv": [sys.executable, str(PROGRAM), *layout, clock, str(sizes)],
                "pass_env": ["PYTHONPATH"],
            },
        },
    }


def measured(
    file: Path, clock: str, reuse: Sequence[str], *, folder: Path, timeout: float
) -> dict[str, Any]:
    """Run a sweep; what it printed, its exit code, and its trials."""
    began = time.monotonic()
    done = sweep("run", str(file), *reuse, folder=folder, timeout=timeout)
    seconds = time.monotonic() - began
    print(f"sweep run {clock}: exit code {done.returncode} after {seconds:.0f} s", flush=True)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    query = f"select {COLUMNS} from v_trial where sweep = '{clock}' order by trial_id"
    rows = sweep("sql", query, "--json", folder=folder, timeout=60.0)
    return {
        "seconds": round(seconds, 1),
        "exit_code": done.returncode,
        "printed": done.stdout[-6000:].splitlines(),
        "errors": done.stderr[-2000:].splitlines(),
        "trials": json.loads(rows.stdout) if rows.returncode == 0 else rows.stderr[-500:],
    }


def sweep(*arguments: str, folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    settings = {
        "PYTHONPATH": path,
        "SWEEP_HOME": str(folder / "home"),
        "SWEEP_DB": f"sqlite:///{folder}/sweep.sqlite",
        "NO_COLOR": "1",
        "COLUMNS": "160",
    }
    with subprocess.Popen(
        [sys.executable, "-c", CLI, *arguments],
        env={**os.environ, **settings},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            said, errors = ended(process)
    return subprocess.CompletedProcess(process.args, process.returncode, said, errors)


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ask a sweep to end, which stores its results, or kill its session; return what it printed.

    A process that left the session may hold the pipes: then what was printed is unknown.
    """
    process.terminate()
    try:
        return process.communicate(timeout=ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        return "", "killed, and another process holds its output"


if __name__ == "__main__":
    sys.exit(main())
