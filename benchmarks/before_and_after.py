"""Runs the same benchmarks with two checkouts of the project; prints after over before.

python -m benchmarks.before_and_after --before CHECKOUT --after CHECKOUT [--tables DIR]
    [--only NAME ...] [--rounds N] [--out FILE.json]

Each checkout has its own environment in `.venv`. In every round both run at once, each pinned to a
core of its own, and the cores are swapped after it: these machines are half as fast in some minutes
as in others, and both versions meet the same minutes. `orchestration` and `start` need all cores,
so there they run one after the other, for a short time each, and the first one changes; in
`write_path` they alternate batch by batch.

A ratio is that of the means over the rounds. `rounds` in FILE holds the ratio of each round: the
spread says how much a ratio is worth.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from benchmarks.machine import describe_machine, parser_of, write_result

VERSIONS = ("before", "after")
NUM_STARTS = 20  # of each command and round
TRIALS = {"orchestration": 250, "simulated_scale": 12_000}
# Batches that are written by each checkout in a round, by their size.
NUM_BATCHES = {1: 100, 8: 60, 64: 40, 512: 12}
# The sweep that `sweep status` is asked about.
STARTED = """
name: started
model: llama-3.2-1b
gpus: 64
gpus_per_node: 8
device: h100-sxm
sequence_length: 4096
global_batch_tokens: 4M
workload: synthetic
search: {max_trials: 20}
"""


@dataclass(frozen=True)
class Benchmark:
    """A module of each checkout, its arguments, and whether it runs on one core.

    `program`: a file of this folder that runs the module. The older checkout may not have it.
    """

    name: str
    arguments: Sequence[str]
    on_one_core: bool = True
    program: str | None = None

    @property
    def command(self) -> list[str]:
        python = ".venv/bin/python"
        if self.program is None:
            return [python, "-m", f"benchmarks.{self.name}", *self.arguments]
        return [python, "-c", _text_of(self.program), *self.arguments]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout with a .venv")
    parser.add_argument("--after", type=Path, required=True, help="another one")
    parser.add_argument("--tables", type=Path, help="for search_efficiency; without it left out")
    names = [*(one.name for one in _benchmarks(Path())), "write_path", "start"]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    checkouts = {"before": arguments.before.resolve(), "after": arguments.after.resolve()}
    found: dict[str, Any] = {version: _revision(path) for version, path in checkouts.items()}
    machine = describe_machine()
    # By name, a round with both checkouts.
    measure = {
        one.name: partial(_round, one, checkouts) for one in _benchmarks(arguments.tables)
    } | {"write_path": partial(_writes, checkouts), "start": partial(_starts, checkouts)}
    for name, round_of in measure.items():
        if name in arguments.only:
            found[name] = _compared([round_of(number) for number in range(arguments.rounds)])
            _print(name, found[name])
            # Each at once: a later one may fail.
            write_result(arguments.out, benchmark="before_and_after", machine=machine, result=found)


def _benchmarks(tables: Path | None) -> list[Benchmark]:
    scale, driver = (str(TRIALS[name]) for name in ("simulated_scale", "orchestration"))
    tpe = ["--arms", "sweep_tpe", "--rounds", "1", "--trials", driver]
    some = [
        Benchmark("simulated_scale", ["--trials", scale]),
        Benchmark("enumerate", ["--repeat", "7"]),
        Benchmark("orchestration", tpe, on_one_core=False),
    ]
    if tables is not None:
        searched = ["--tables", str(tables.resolve()), "--table", "pb_*", "--methods", "auto"]
        some.append(Benchmark("search_efficiency", searched, program="timed_searches.py"))
    return some


def _text_of(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def _round(
    benchmark: Benchmark, checkouts: Mapping[str, Path], number: int
) -> dict[str, dict[str, float]]:
    """Run a benchmark with both checkouts; the numbers of each."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    order = VERSIONS if number % 2 == 0 else VERSIONS[::-1]
    with tempfile.TemporaryDirectory(prefix="before-and-after-") as folder:
        running = {}
        for place, version in enumerate(order):
            out = Path(folder) / f"{version}.json"
            command = [*benchmark.command, "--out", str(out)]
            if benchmark.on_one_core:
                command = ["taskset", "--cpu-list", str(cores[place % len(cores)]), *command]
            running[version] = _Child(benchmark.name, command, checkouts[version], out)
            if not benchmark.on_one_core:
                running[version].wait()
        return {version: running[version].numbers() for version in VERSIONS}


class _Child:
    """A benchmark that runs, and what it and its children used of the processor."""

    def __init__(self, name: str, command: Sequence[str], checkout: Path, out: Path) -> None:
        self._name, self._checkout, self._out = name, checkout, out
        self._cpu_seconds: float | None = None
        self._log = out.with_suffix(".log").open("w+b")
        self._process = subprocess.Popen(
            command, cwd=checkout, stdout=self._log, stderr=subprocess.STDOUT
        )

    def wait(self) -> None:
        if self._cpu_seconds is not None:
            return
        _, status, used = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._cpu_seconds = used.ru_utime + used.ru_stime
        if self._process.returncode:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-2000:]
            raise SystemExit(f"{self._name} in {self._checkout} ended with an error:\n{said}")

    def numbers(self) -> dict[str, float]:
        self.wait()
        self._log.close()
        return _NUMBERS[self._name](json.loads(self._out.read_text()), self._cpu_seconds or 0.0)


def _of_simulated_scale(result: Mapping[str, Any], _: float) -> dict[str, float]:
    cpu = 1000 * result["cpu_seconds"] / result["num_attempts"]
    return {"ms a launch": result["milliseconds_per_attempt"], "ms of CPU a launch": cpu}


def _of_enumerate(result: Mapping[str, Any], _: float) -> dict[str, float]:
    return {
        f"{what} {kind}": result[kind.replace(" ", "_")][f"{what}_seconds"]
        for kind in ("without constraints", "with four constraints")
        for what in ("enumerate", "rank")
    }


def _of_orchestration(result: Mapping[str, Any], _: float) -> dict[str, float]:
    (run,) = result["arms"]["sweep_tpe"]["runs"]
    return {
        "ms a trial": 1000 / run["trials_per_second"],
        "ms of the driver's CPU a trial": run["driver_cpu_ms_per_trial"],
    }


def _of_search_efficiency(result: Mapping[str, Any], cpu_seconds: float) -> dict[str, float]:
    summary, searches = result["summary"]["auto"], result["of_searches"]
    return {
        "launches to 5 %": summary["launches_to_5_percent"]["median"],
        "launches to 1 %": summary["launches_to_1_percent"]["median"],
        "CPU-seconds of the searches": searches["cpu_seconds"],
        "ms of CPU a launch": 1000 * searches["cpu_seconds"] / searches["launches"],
        "CPU-seconds with tables and scores": cpu_seconds,
    }


_NUMBERS = {
    "simulated_scale": _of_simulated_scale,
    "enumerate": _of_enumerate,
    "orchestration": _of_orchestration,
    "search_efficiency": _of_search_efficiency,
}


def _writes(checkouts: Mapping[str, Path], number: int) -> dict[str, dict[str, float]]:
    """Median milliseconds a trial of batches in a store, by turns; one batch at any time."""
    # Read here and run in each checkout: the older one may not have the file.
    program = _text_of("write_turns.py")
    order = VERSIONS if number % 2 == 0 else VERSIONS[::-1]
    found: dict[str, dict[str, float]] = {version: {} for version in VERSIONS}
    with ExitStack() as stack:
        writers = {}
        for version in order:
            log = stack.enter_context(tempfile.TemporaryFile())
            writer = _Writes(program, checkouts[version], log)
            writers[version] = stack.enter_context(writer)
        for database, name in (("sqlite", "SQLite"), ("postgresql", "PostgreSQL")):
            for size, times in NUM_BATCHES.items():
                taken: dict[str, list[tuple[float, float]]] = {version: [] for version in VERSIONS}
                for turn in range(times):
                    for version in order if turn % 2 == 0 else order[::-1]:
                        taken[version].append(writers[version].write(database, size))
                for version, batches in taken.items():
                    wall, cpu = (statistics.median(values) for values in zip(*batches, strict=True))
                    found[version][f"ms a trial, {name}, {size} together"] = wall
                    found[version][f"ms of CPU a trial, {name}, {size} together"] = cpu
    return found


class _Writes:
    """A checkout that writes a batch when told. If it fails, the end of its log is shown."""

    def __init__(self, program: str, checkout: Path, log: IO[bytes]) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [".venv/bin/python", "-c", program],
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> _Writes:
        self._answer()  # "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def write(self, database: str, size: int) -> tuple[float, float]:
        """Return milliseconds a trial, and milliseconds of CPU a trial."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{database} {size}\n")
        self._process.stdin.flush()
        wall, cpu = self._answer().split()
        return float(wall), float(cpu)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-2000:]
            raise SystemExit(f"write_turns ended with an error:\n{said}")
        return line


def _starts(checkouts: Mapping[str, Path], number: int) -> dict[str, dict[str, float]]:
    """Median seconds of commands on a small store, by turns; bytecode is kept, as installed."""
    order = VERSIONS if number % 2 == 0 else VERSIONS[::-1]
    commands = {"seconds of sweep --help": ["--help"], "seconds of sweep status": ["status"]}
    taken: dict[str, dict[str, list[float]]] = {
        version: {name: [] for name in commands} for version in VERSIONS
    }
    with tempfile.TemporaryDirectory(prefix="before-and-after-") as folder:
        environments = {}
        for version, checkout in checkouts.items():
            home = Path(folder) / version
            home.mkdir()
            url = f"sqlite:///{home}/store.sqlite"
            environments[version] = os.environ | {
                "SWEEP_HOME": str(home),
                "SWEEP_DB": url,
                "PYTHONDONTWRITEBYTECODE": "",
            }
            file = home / "started.yaml"
            file.write_text(STARTED)
            subprocess.run(
                [checkout / ".venv/bin/sweep", "run", file, "--simulate", "--quiet"],
                cwd=checkout,
                env=environments[version],
                check=True,
                capture_output=True,
            )
        for _ in range(NUM_STARTS + 1):
            for name, command in commands.items():
                for version in order:
                    began = time.perf_counter()
                    subprocess.run(
                        [checkouts[version] / ".venv/bin/sweep", *command],
                        cwd=checkouts[version],
                        env=environments[version],
                        check=True,
                        capture_output=True,
                    )
                    taken[version][name].append(time.perf_counter() - began)
    return {
        # The first start compiles what is not compiled yet.
        version: {name: statistics.median(seconds[1:]) for name, seconds in of.items()}
        for version, of in taken.items()
    }


def _compared(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """By number: the means, after over before, and that ratio in each round."""
    found = {}
    for name in rounds[0]["before"]:
        before, after = ([one[version][name] for one in rounds] for version in VERSIONS)
        found[name] = {
            "before": _rounded(statistics.mean(before)),
            "after": _rounded(statistics.mean(after)),
            "after_over_before": _ratio(statistics.mean(after), statistics.mean(before)),
            "rounds": [_ratio(b, a) for a, b in zip(before, after, strict=True)],
        }
    return found


def _ratio(after: float, before: float) -> float | None:
    return round(after / before, 3) if before else None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _revision(checkout: Path) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        command, cwd=checkout, check=True, capture_output=True, text=True
    ).stdout.strip()


def _print(benchmark: str, numbers: Mapping[str, Mapping[str, Any]]) -> None:
    for name, found in numbers.items():
        rounds = ", ".join(str(ratio) for ratio in found["rounds"])
        print(
            f"| {benchmark}: {name} | {found['before']} | {found['after']}"
            f" | {found['after_over_before']} | {rounds} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
