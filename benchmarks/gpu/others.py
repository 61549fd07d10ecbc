"""Compares workload llama with torchtitan's and transformers' Llama at the same layout on one GPU.

    python -m benchmarks.gpu.others OUT_DIR [--rehearse]

Each program trains in fresh processes, and they alternate: A B C A B C ... A program that is not
installed in this environment is left out, and the summary says so. Model by the GPU's memory, as
truth_8b; bf16, eager and compiled.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.arm_job import ArmJob, can_import
from benchmarks.gpu.attempt import Attempt, layout
from benchmarks.gpu.attempt_record import spread
from benchmarks.gpu.session import Session
from benchmarks.gpu.truth_8b import cell_of

PROGRAMS = ("llama", "torchtitan", "transformers")
ROUNDS = 4
NUMBERS = ("tokens_per_second", "device_used_bytes", "peak_memory_allocated_bytes")


def main() -> None:
    with Session.of_command(__doc__, name="others") as session:
        missing = [name for name in PROGRAMS[1:] if not can_import(sys.executable, name)]
        programs = [name for name in PROGRAMS if name not in missing]
        for run in range(1 if session.rehearse else ROUNDS):
            for case in cases(session):
                for program in programs:
                    train(session, program, case, run)
        session.finish({"not_installed": missing, "cases": summary(session, programs)})


def cases(session: Session) -> list[str]:
    """Names of what is compared: eager or compiled, and what is recomputed."""
    return ["eager none"] if session.rehearse else ["compiled full", "eager full"]


def train(session: Session, program: str, case: str, run: int) -> None:
    """Train in one process of one program."""
    compiled, recompute = case.startswith("compiled"), case.split()[1]
    sizes, _ = cell_of(session)

    attempt = Attempt(
        model=str(sizes["model"]),
        sequence_length=int(str(sizes["sequence_length"])),
        layout=layout(recompute, mbs=1, ga=2, precision=session.precision),
        options={"compile": compiled},
    )
    job = ArmJob(
        arm=program,
        request=session.request(attempt),
        num_warmup=1 if session.rehearse else 4,
        num_steps=2 if session.rehearse else 6,
        seconds=0.0 if session.rehearse else 6.0,
        compile=compiled,
    )
    session.train(f"{case}: {program} run{run}", job, program=program, case=case)


def summary(session: Session, programs: Sequence[str]) -> dict[str, Any]:
    """Medians over runs, their spread, and ours over theirs."""
    found: dict[str, Any] = {}
    for case in cases(session):
        runs = {
            program: [
                record
                for record in session.records.values()
                if (record["program"], record["case"]) == (program, case)
            ]
            for program in programs
        }
        found[case] = {program: medians(runs[program]) for program in programs}
        ours = found[case]["llama"]
        for program in programs[1:]:
            theirs = found[case][program]
            found[case][f"llama_over_{program}"] = {
                name: ours[name] / theirs[name]
                for name in NUMBERS
                if ours.get(name) is not None and theirs.get(name) is not None
            }
    return found


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    good = [run for run in runs if "error" not in run]
    found: dict[str, Any] = {
        "num_runs": len(good),
        "errors": [run["error"][-300:] for run in runs if "error" in run],
    }
    for name in NUMBERS:
        values = [run[name] for run in good if name in run]
        found[name] = statistics.median(values) if values else None
    found["spread"] = spread([run["tokens_per_second"] for run in good])
    return found


if __name__ == "__main__":
    main()
