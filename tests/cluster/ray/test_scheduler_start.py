"""A scheduler whose start does not end well leaves no Ray behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cluster.ray import scheduler
from orchestrator.core.errors import ClusterUnavailable


class Recorded:
    """What is asked of the guard and of Ray, in order; `connect` raises `error`."""

    def __init__(self, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []

        def fail(*_: object) -> None:
            raise error

        def shutdown() -> None:
            self.asked.append("shutdown")

        monkeypatch.setattr(scheduler, "RayGuard", lambda: self)
        monkeypatch.setattr(scheduler, "connect", fail)
        monkeypatch.setattr(scheduler.ray, "is_initialized", lambda: True)
        monkeypatch.setattr(scheduler.ray, "shutdown", shutdown)

    def ray_is_gone(self) -> bool:
        return False

    def dismiss(self) -> None:
        self.asked.append("dismiss")


@pytest.mark.parametrize("signal", [KeyboardInterrupt(), SystemExit(143)])
def test_after_a_signal_the_guard_ends_ray_which_may_crash_in_its_own_shutdown(
    signal: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(signal, monkeypatch)
    with pytest.raises(type(signal)):
        scheduler.RayScheduler(address=None, device=None, root=tmp_path)
    assert recorded.asked == ["dismiss"]


def test_a_ray_that_does_not_start_is_shut_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(ClusterUnavailable("no cluster"), monkeypatch)
    with pytest.raises(ClusterUnavailable):
        scheduler.RayScheduler(address=None, device=None, root=tmp_path)
    assert recorded.asked == ["shutdown", "dismiss"]
