"""Writes a batch of trials for each line on standard input, and prints what it took.

A line is "DATABASE SIZE", such as "postgresql 64"; the answer is the batch's milliseconds a trial
and the process's milliseconds of CPU a trial. `before_and_after` lets two checkouts take turns
with it, batch by batch: both meet the same seconds of a noisy machine. Garbage is collected
between batches, so a collection falls into no batch.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from contextlib import ExitStack

from benchmarks.write_path import Writer, postgresql
from db.store import Store

# Trials in each store when the first line is answered.
NUM_BEFORE = 512


def main() -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        urls = {
            "sqlite": f"sqlite:///{folder}/store.sqlite",
            "postgresql": stack.enter_context(postgresql()),
        }
        writers = {}
        for database, url in urls.items():
            writers[database] = Writer.on(stack.enter_context(Store.open(url)), "turns")
            writers[database].write(NUM_BEFORE)
        gc.collect()
        gc.freeze()
        gc.disable()
        print("ready", flush=True)
        for line in sys.stdin:
            database, size = line.split()
            wall, cpu = _time(writers[database], int(size))
            gc.collect()
            print(1e3 * wall / int(size), 1e3 * cpu / int(size), flush=True)


def _time(writer: Writer, size: int) -> tuple[float, float]:
    """Write one batch, and return its seconds and the process's seconds of CPU."""
    began, cpu = time.perf_counter(), time.process_time()
    writer.write(size)
    return time.perf_counter() - began, time.process_time() - cpu


if __name__ == "__main__":
    main()
