"""What is started of Ray without what only clusters need. That it starts: test_scheduler."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from ray._private import parameter, services, utils

from orchestrator.cluster.ray.local import bare


def test_what_is_started_afterwards_is_whole_again_also_where_the_start_failed() -> None:
    usual = _switches()
    with pytest.raises(ConnectionError):
        _start_and_fail(usual[0])
    assert _switches() == usual


def test_a_ray_without_such_a_switch_starts_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(services, "start_api_server")
    with bare():
        assert not hasattr(services, "start_api_server")
    assert not hasattr(services, "start_api_server")


def test_the_agent_of_the_dashboard_has_no_modules_and_ray_s_other_programs_start_as_they_are(
    tmp_path: Path,
) -> None:
    program = tmp_path / "agent.py"
    program.write_text(
        "import sys; from ray.dashboard import utils; print(__name__, utils.get_all_modules(object), sys.argv[1:])"
    )
    usual = services._build_python_executable_command_memory_profileable
    with bare():
        ours = services._build_python_executable_command_memory_profileable
        assert ours("runtime_env_agent", "session") == usual("runtime_env_agent", "session")
        command = [*ours("dashboard_agent", "session"), str(program), "--any"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["__main__", "[]", "['--any']"]


def _switches() -> tuple[Any, ...]:
    python = services._build_python_executable_command_memory_profileable
    return (
        parameter.RayParams,
        services.start_api_server,
        python,
        utils.get_dashboard_dependency_error,
    )


def _start_and_fail(parameters: type) -> None:
    with bare():
        told = parameter.RayParams(num_cpus=3)
        assert (told.no_monitor, told.include_log_monitor, told.num_cpus) == (True, False, 3)
        assert isinstance(told, parameters)
        raise ConnectionError
