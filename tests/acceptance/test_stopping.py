"""The right to run a sweep, and the ways to stop it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.core.machines.exposure import is_loopback
from orchestrator.core.trial.lifecycle import UNDER_WAY, TrialState
from tests.acceptance.command import Command, Running, measured, write_sweep
from tests.listening import listeners

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

SLOW = {"name": "synthetic", "options": {"sleep": True, "time_scale": 100.0}}  # 1 to 6 s a trial


@pytest.fixture
def slow_sweep(tmp_path: Path) -> Path:
    return write_sweep(tmp_path, workload=SLOW)


def started(command: Command, file: Path, store: Store) -> Running:
    running = command.start("run", file)
    running.until(lambda: len(measured(store, "t")) >= 1)
    return running


def test_a_second_orchestrator_exits_5_naming_the_first_and_ctrl_c_drains_it(
    command: Command, slow_sweep: Path
) -> None:
    with Store.open(command.store_url) as store:
        running = started(command, slow_sweep, store)
        assert_loopback_only(running)
        second = command.here.run("run", slow_sweep)
        assert second.returncode == 5
        assert str(running.process.pid) in second.stderr
        assert len(second.stderr.strip().splitlines()) == 1
        running.interrupt()
        code, _, err = running.end()
        assert code == 130
        assert "Ctrl-C again" in err
        assert "The same command continues" in err
        states = {t.state for t in store.trials(store.sweep_named("t").id)}
        assert states == {TrialState.MEASURED}, "draining lets what runs finish"
        assert running.survivors(seconds=10) == []


def assert_loopback_only(running: Running) -> None:
    """No process of the sweep, Ray's servers included, can be reached from another machine."""
    running.look()
    found = listeners(running.seen)
    assert found, "Ray takes connections at least"
    assert {place for place in found if not is_loopback(place.address)} == set()


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGINT, signal.SIGINT], 130),
        pytest.param([signal.SIGTERM], 143, marks=pytest.mark.long),
    ],
)
def test_a_second_ctrl_c_or_a_sigterm_cancels_and_the_trial_waits(
    command: Command, slow_sweep: Path, signals: list[signal.Signals], code: int
) -> None:
    with Store.open(command.store_url) as store:
        running = started(command, slow_sweep, store)
        for number in signals:
            running.interrupt(number)
        ended, _, err = running.end(timeout=15)
        assert ended == code
        assert "Traceback" not in err
        states = [t.state for t in store.trials(store.sweep_named("t").id)]
        assert not set(states) & UNDER_WAY
        assert running.survivors(seconds=10) == []


@pytest.mark.long
def test_cancel_from_another_terminal_is_obeyed(command: Command, slow_sweep: Path) -> None:
    with Store.open(command.store_url) as store:
        running = started(command, slow_sweep, store)
        command.here.ok("cancel", "t")
        code, _, _ = running.end(timeout=30)
        assert code == 130
        assert store.sweep_named("t").holder is None


@pytest.mark.long
def test_a_sigterm_to_the_whole_group_ends_ray_too_and_hangs_nothing(
    command: Command, slow_sweep: Path
) -> None:
    """As `timeout` and batch systems do it."""
    with Store.open(command.store_url) as store:
        running = started(command, slow_sweep, store)
        running.look()
        os.killpg(running.process.pid, signal.SIGTERM)
        code, _, err = running.end(timeout=45)
        assert code == 143, err
        assert running.survivors(seconds=10) == []
        assert store.sweep_named("t").holder is None
