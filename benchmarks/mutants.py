"""Measures how many random changes of the core its tests notice: a mutation score.

python -m benchmarks.mutants [--count 50] [--seed 0] [--under physics] [--calls FILE]
                             [--out FILE.json]

Each mutant is one change of an operator, a comparison or a constant in orchestrator/core, in a
copy of the project in a temporary folder. The core tests that call the changed function run
against it, the quickest first; all that import the module, if the change is outside of functions.
Nothing is changed in messages, docstrings, types, decorators and switches of declarations.
`--calls` keeps which tests call what: the next run traces only test files that have changed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

# Only for the forks: what takes long to import, and is no part of the project.
import numpy  # noqa: F401
import pydantic  # noqa: F401
import pytest
from hypothesis import HealthCheck, settings

from benchmarks.machine import PROJECT, describe_machine, parser_of, write_result
from benchmarks.mutant import Mutant, mutants_of

CORE, TESTS = Path("orchestrator/core"), Path("tests/core")
# A mutant whose tests run longer than this loops, most likely: noticed.
LIMIT_SECONDS = 240.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Which core tests call which functions, and how long each takes."""

    # `file:function`, by test.
    calls: Mapping[str, frozenset[str]]
    seconds: Mapping[str, float]
    # Called while files are imported, before any test.
    at_import: frozenset[str]
    # The modules that a test file imports, itself and through others.
    imports: Mapping[str, frozenset[str]]

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that can notice a mutant: those of its module first, the quickest first."""
        place = f"{mutant.path}:{mutant.function}"
        found = {test for test, called in self.calls.items() if place in called}
        if mutant.function is None or place in self.at_import:
            files = {file for file, modules in self.imports.items() if mutant.path in modules}
            found |= {test for test in self.calls if test.split("::")[0] in files}
        path = Path(mutant.path)
        own = str(TESTS / path.relative_to(CORE).parent / f"test_{path.name}")
        return sorted(found, key=lambda test: (not test.startswith(own), self.seconds[test], test))


class _Recorder:
    """A pytest plugin that notes the functions of the core that each test calls."""

    def __init__(self, root: Path) -> None:
        self._start, self._core = len(f"{root}/"), f"{root}/{CORE}/"
        self.at_import: set[str] = set()
        self.calls: dict[str, set[str]] = {}
        self.seconds: dict[str, float] = {}
        self._called = self.at_import
        sys.settrace(self._trace)

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        _forget_results()
        self._called = self.calls[item.nodeid] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(self._core):
            function = code.co_qualname.split(".<locals>")[0]
            self._called.add(f"{code.co_filename[self._start :]}:{function}")


def _forget_results() -> None:
    """Empty the caches of functions: a test that gets a kept result calls the function too."""
    for name, module in list(sys.modules.items()):
        if name.startswith("orchestrator.core."):
            for value in vars(module).values():
                if callable(forget := getattr(value, "cache_clear", None)):
                    forget()


def coverage_of(copy: Path, cache: Path | None) -> Coverage:
    """Run the core tests once against the unchanged copy; of known files, take what is known."""
    known = json.loads(cache.read_text()) if cache is not None and cache.is_file() else {}
    files = {
        str(path.relative_to(copy)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((copy / TESTS).rglob("test_*.py"))
    }
    new = [file for file, digest in files.items() if known.get(file, {}).get("digest") != digest]
    if new:
        known |= _recorded(copy, {file: files[file] for file in new})
        if cache is not None:
            cache.write_text(json.dumps(known))
    found = [known[file] for file in files]
    return Coverage(
        calls={test: frozenset(names) for one in found for test, names in one["calls"].items()},
        seconds={test: seconds for one in found for test, seconds in one["seconds"].items()},
        at_import=frozenset(name for one in found for name in one["at_import"]),
        imports={file: frozenset(_imported(copy, file)) for file in files},
    )


def _recorded(copy: Path, files: Mapping[str, str]) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        recorder = _Recorder(copy)
        status = _pytest(copy, [*files], plugins=[recorder])
        with os.fdopen(writer, "w") as stream:
            json.dump(
                {
                    "calls": {test: sorted(called) for test, called in recorder.calls.items()},
                    "seconds": recorder.seconds,
                    "at_import": sorted(recorder.at_import),
                },
                stream,
            )
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as stream:
        found = json.load(stream)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("the core tests fail without any change")
    return {
        file: {
            "digest": digest,
            "at_import": found["at_import"],
            **{
                part: {
                    test: value
                    for test, value in found[part].items()
                    if test.split("::")[0] == file
                }
                for part in ("calls", "seconds")
            },
        }
        for file, digest in files.items()
    }


def _imported(copy: Path, file: str) -> set[str]:
    found: set[str] = set()
    waiting = [file]
    while waiting:
        for path in _imports_of(copy, waiting.pop()):
            if path not in found:
                found.add(path)
                waiting.append(path)
    return found


@cache
def _imports_of(copy: Path, file: str) -> tuple[str, ...]:
    names: set[str] = set()
    for node in ast.walk(ast.parse((copy / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    paths = [f"{name.replace('.', '/')}.py" for name in sorted(names)]
    return tuple(path for path in paths if (copy / path).is_file())


def is_noticed(mutant: Mutant, copy: Path, coverage: Coverage) -> bool:
    """Return whether a test fails, or runs forever, with the mutant in the copy."""
    tests = coverage.tests_of(mutant)
    if not tests:
        return False
    path = copy / mutant.path
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(source), encoding="utf-8")
    try:
        child = os.fork()
        if not child:
            os.setsid()
            os._exit(_pytest(copy, tests))
        return _exit_status(child) != 0
    finally:
        path.write_text(source, encoding="utf-8")


def _exit_status(child: int) -> int:
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def _pytest(copy: Path, tests: Sequence[str], plugins: Sequence[object] = ()) -> int:
    """Run tests in this process, a fork, which has imported nothing of the project's copy."""
    for name in [name for name in sys.modules if name.split(".")[0] in _PROJECT_PACKAGES]:
        del sys.modules[name]
    os.chdir(copy)
    sys.path[:] = [str(copy), *(entry for entry in sys.path if Path(entry) != PROJECT and entry)]
    sys.dont_write_bytecode = True
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # The same examples each time: a mutant is noticed always or never.
    settings.register_profile(
        "mutants",
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
    )
    settings.load_profile("mutants")
    arguments = ["-x", "-q", "--noconftest", "--tb=no", "-p", "no:cacheprovider"]
    status = pytest.main(
        [*arguments, "-p", "no:xdist", f"--basetemp={copy}/.tests", *tests], plugins=[*plugins]
    )
    return int(status)


_PROJECT_PACKAGES = frozenset({"orchestrator", "tests", "db", "workloads"})


def copy_of_project(folder: Path) -> Path:
    """A copy of the files that git knows, and of new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        check=True,
        capture_output=True,
        text=True,
    )
    copy = folder / "project"
    for name in listed.stdout.splitlines():
        if (PROJECT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, copy / name)
    return copy


def sample(copy: Path, *, under: str, count: int, seed: int) -> list[Mutant]:
    """Random mutants: places are drawn with equal probability, then the change."""
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    for file in sorted((copy / CORE / under).rglob("*.py") or [copy / CORE / under]):
        name = str(file.relative_to(copy))
        for mutant in mutants_of(name, file.read_text(encoding="utf-8")):
            places.setdefault((mutant.path, mutant.start, mutant.end), []).append(mutant)
    generator = random.Random(seed)
    chosen = generator.sample(sorted(places), min(count, len(places)))
    return [generator.choice(places[place]) for place in chosen]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under", default="", help="a folder of orchestrator/core, as `physics`")
    parser.add_argument("--calls", type=Path, help="keep here which tests call what")
    arguments = parser.parse_args()
    machine = describe_machine()
    alive = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copy_of_project(Path(folder))
        coverage = coverage_of(copy, arguments.calls)
        chosen = sample(copy, under=arguments.under, count=arguments.count, seed=arguments.seed)
        for number, mutant in enumerate(chosen, start=1):
            begin = time.monotonic()
            noticed = is_noticed(mutant, copy, coverage)
            diff = mutant.diff((copy / mutant.path).read_text(encoding="utf-8"))
            words = "killed" if noticed else "ALIVE "
            seconds = time.monotonic() - begin
            print(f"{number:3} {words} {seconds:5.1f} s {mutant.path}:{mutant.line}", flush=True)
            if not noticed:
                print(diff, flush=True)
                alive.append({**asdict(mutant), "diff": diff})
    num_noticed = len(chosen) - len(alive)
    print(f"noticed: {num_noticed} of {len(chosen)}")
    result = {
        "seed": arguments.seed,
        "under": arguments.under or str(CORE),
        "mutants": len(chosen),
        "noticed": num_noticed,
        "alive": alive,
    }
    write_result(arguments.out, benchmark="mutants", machine=machine, result=result)


if __name__ == "__main__":
    main()
