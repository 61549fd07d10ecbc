"""The lean and the plain start of a local Ray, with a `ray.init` that starts nothing.

test_scheduler and tests/compat test that both start a working Ray.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import parameter, services, utils

from orchestrator.cluster.ray import cluster, local
from orchestrator.cluster.ray.local import lean_ray
from orchestrator.core.errors import ClusterUnavailable

REPLACED = (
    (parameter, "RayParams"),
    (services, "start_api_server"),
    (services, "_build_python_executable_command_memory_profileable"),
    (utils, "get_dashboard_dependency_error"),
)


def _functions() -> list[Any]:
    return [getattr(owner, name, None) for owner, name in REPLACED]


@dataclass
class Starts:
    """Takes the place of `ray.init`; the first start runs `first`."""

    first: Callable[[], object] = lambda: None
    lean: list[bool] = field(default_factory=list)  # of each start
    ended: int = 0  # times that leftovers were ended

    def init(self, **options: Any) -> None:
        assert options == {"address": "local", "include_dashboard": False, "namespace": "n"}
        self.lean.append(isinstance(getattr(parameter, "RayParams", None), partial))
        if len(self.lean) == 1:
            self.first()

    def end_processes(self) -> None:
        self.ended += 1


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    fake = Starts()
    monkeypatch.setattr(local.ray, "init", fake.init)
    return fake


def _raise(exc: BaseException) -> Any:
    raise exc


def test_the_lean_start_is_one_start_and_restores_every_function(
    starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    usual = _functions()
    local.start(starts.end_processes, namespace="n")
    assert (starts.lean, starts.ended) == ([True], 0)
    assert _functions() == usual
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("number", range(len(REPLACED)))
def test_a_ray_that_lacks_one_of_the_functions_starts_plain(
    number: int,
    starts: Starts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner, name = REPLACED[number]
    monkeypatch.delattr(owner, name)
    usual = _functions()
    local.start(starts.end_processes, namespace="n")
    assert starts.lean == [False]
    assert _functions() == usual
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert name in warning.getMessage()


@pytest.mark.parametrize("name", ["ray._private.services", "ray.dashboard.utils"])
def test_a_ray_that_lacks_one_of_the_modules_starts_plain(
    name: str, starts: Starts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import_module, find_spec = local.import_module, local.find_spec
    monkeypatch.setattr(
        local,
        "import_module",
        lambda asked: _raise(ImportError(f"no {name}")) if asked == name else import_module(asked),
    )
    monkeypatch.setattr(
        local, "find_spec", lambda asked: None if asked == name else find_spec(asked)
    )
    local.start(starts.end_processes, namespace="n")
    assert starts.lean == [False]
    assert name in caplog.text


def test_a_lean_start_that_fails_is_cleared_up_and_a_plain_one_follows(
    starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    usual = _functions()
    starts.first = lambda: _raise(RuntimeError("the raylet did not start\nlong text"))
    local.start(starts.end_processes, namespace="n")
    assert (starts.lean, starts.ended) == ([True, False], 1)
    assert _functions() == usual
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "(RuntimeError: the raylet did not start)" in warning.getMessage()


def test_a_plain_start_that_fails_too_is_the_callers_error(starts: Starts) -> None:
    starts.first = lambda: _raise(RuntimeError("lean"))
    starts.end_processes = lambda: setattr(  # type: ignore[method-assign]
        local.ray, "init", lambda **_: _raise(ConnectionError("plain"))
    )
    with pytest.raises(ConnectionError, match="plain"):
        local.start(starts.end_processes, namespace="n")


def test_no_plain_start_while_the_failed_one_still_shuts_down(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(local, "SHUTDOWN_SECONDS", 0.05)
    monkeypatch.setattr(local.ray, "shutdown", ended.wait)
    starts.first = lambda: _raise(RuntimeError("lean"))
    with pytest.raises(RuntimeError, match="lean"):
        local.start(starts.end_processes, namespace="n")
    ended.set()
    assert (starts.lean, starts.ended) == ([True], 0)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(15)])
def test_a_signal_during_the_lean_start_starts_nothing_else(
    stop: BaseException, starts: Starts
) -> None:
    usual = _functions()
    starts.first = lambda: _raise(stop)
    with pytest.raises(type(stop)):
        local.start(starts.end_processes, namespace="n")
    assert starts.lean == [True]
    assert _functions() == usual


def test_lean_parameters_are_rays_own() -> None:
    usual = parameter.RayParams
    with lean_ray():
        told = parameter.RayParams(num_cpus=3)
    assert isinstance(told, usual)
    assert (told.no_monitor, told.include_log_monitor, told.num_cpus) == (True, False, 3)


def test_the_dashboard_agent_has_no_modules_and_other_programs_start_as_they_are(
    tmp_path: Path,
) -> None:
    program = tmp_path / "agent.py"
    program.write_text(
        "import sys; from ray.dashboard import utils;"
        " print(__name__, utils.get_all_modules(object), sys.argv[1:])"
    )
    usual = services._build_python_executable_command_memory_profileable
    with lean_ray():
        ours = services._build_python_executable_command_memory_profileable
        for options in ({}, {"unbuffered": False}):
            assert ours("runtime_env_agent", "s", **options) == usual(
                "runtime_env_agent", "s", **options
            )
        command = [*ours("dashboard_agent", "session"), str(program), "--any"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["__main__", "[]", "['--any']"]


def test_a_ray_without_an_error_listener_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = importlib.import_module("ray._private.worker")
    monkeypatch.delattr(worker, "global_worker")
    with caplog.at_level("DEBUG", logger=local.__name__):
        local.stop_error_listener()
    assert "error listener goes on" in caplog.text


def test_a_ray_that_does_not_start_is_told_in_a_sentence_with_the_cause_below(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise Exception("The current node timed out during startup. It may be overloaded.\nmore")

    monkeypatch.setattr(local.ray, "init", fail)
    guard = SimpleNamespace(starting=nullcontext, end_processes=starts.end_processes)
    with pytest.raises(ClusterUnavailable) as refused:
        cluster.connect(None, guard)  # type: ignore[arg-type]
    said, cause = str(refused.value).splitlines()
    assert said.startswith("a local Ray did not start: it failed after 0 s. ")
    assert "ray start --head" in said
    assert "--ray-address auto" in said
    # Ray ends its text with a full stop.
    assert cause == (
        "the cause: Exception: The current node timed out during startup. It may be overloaded"
    )
