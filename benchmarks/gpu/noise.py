"""Measures how exact a measurement on this GPU is.

    python -m benchmarks.gpu.noise OUT_DIR [--rehearse]

The same layout in ten fresh processes; a minute of it without a pause, for the drift of its step
time and of the clock; and steps timed by events against steps that the host waits for.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.arm_job import ArmJob
from benchmarks.gpu.attempt import Attempt, layout
from benchmarks.gpu.attempt_record import is_measured, spread
from benchmarks.gpu.session import Session

RUNS, PAIRS, LONG_SECONDS = 10, 3, 60.0


def main() -> None:
    with Session.of_command(__doc__, name="noise") as session:
        runs = [
            session.measure(attempt_of(session, seconds=5.0, run=run + 1))
            for run in range(2 if session.rehearse else RUNS)
        ]
        long = session.measure(attempt_of(session, seconds=LONG_SECONDS))
        pairs = [
            (timed(session, run, synchronised=False), timed(session, run, synchronised=True))
            for run in range(1 if session.rehearse else PAIRS)
        ]
        speeds = [
            record["tokens_per_second"]
            for record in runs
            if record is not None and is_measured(record)
        ]
        session.finish(
            {
                "same_layout_in_fresh_processes": {
                    "num_runs": len(speeds),
                    "tokens_per_second": speeds,
                    "spread": spread(speeds),
                    "relative_sd": relative_sd(speeds),
                },
                "a_minute": None if long is None or not is_measured(long) else drift(long),
                "synchronised_over_events": [
                    ratio for pair in pairs if (ratio := ratio_of(*pair)) is not None
                ],
            }
        )


def attempt_of(session: Session, *, seconds: float, run: int = 0) -> Attempt:
    return Attempt(
        model="llama-tiny" if session.rehearse else "llama-3.2-1b",
        sequence_length=64 if session.rehearse else 4096,
        layout=layout(mbs=1, precision=session.precision),
        options={"compile": False},
        seconds=seconds,
        min_steps=20,
        run=run,
    )


def timed(session: Session, run: int, *, synchronised: bool) -> dict[str, Any] | None:
    """Steps in a process of their own, timed by events or with the host waiting for each."""
    word = "synchronised" if synchronised else "events"

    job = ArmJob(
        arm="llama",
        request=session.request(attempt_of(session, seconds=1.0)),
        num_warmup=2 if session.rehearse else 20,
        num_steps=4 if session.rehearse else 60,
        seconds=0.0 if session.rehearse else 5.0,
        synchronised=synchronised,
    )
    return session.train(f"{word} run{run}", job)


def ratio_of(events: dict[str, Any] | None, waits: dict[str, Any] | None) -> float | None:
    """Step time with the host waiting, over that without."""
    if events is None or waits is None or "error" in events or "error" in waits:
        return None
    return float(events["tokens_per_second"] / waits["tokens_per_second"])


def drift(record: dict[str, Any]) -> dict[str, Any]:
    """Medians of the tenths of a long run; the clock and the reasons why it was lowered."""
    tenths = medians_of_parts(record["step_seconds"], 10)
    return {
        "num_steps": len(record["step_seconds"]),
        "median_of_each_tenth": tenths,
        "last_over_first_tenth": tenths[-1] / tenths[0],
        "last_over_second_tenth": tenths[-1] / tenths[min(1, len(tenths) - 1)],
        "gpu": record["gpu"],
        "load": record["load"],
    }


def medians_of_parts(values: Sequence[float], num: int) -> list[float]:
    num = min(num, len(values))
    cuts = [len(values) * part // num for part in range(num + 1)]
    return [statistics.median(values[a:b]) for a, b in itertools.pairwise(cuts)]


def relative_sd(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else None


if __name__ == "__main__":
    main()
