"""The scheduler on a real local Ray, with real launchers and synthetic ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from orchestrator.cluster.contract import Finished, Placed, SchedulerEvent
from orchestrator.cluster.ray.scheduler import RayScheduler
from orchestrator.core.errors import ResourcesInsufficient
from orchestrator.core.machines.packing import FreeOnNode, Shape
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.protocol import Device, MeasurementPlan, PhaseLimits, TrialRequest
from orchestrator.node.processes import descendants, start_time

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PAIR, SINGLE = Shape(num_nodes=1, slots_per_node=2), Shape(num_nodes=1, slots_per_node=1)


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayScheduler]:
    opened = RayScheduler(address=None, device=Device.CPU, root=tmp_path_factory.mktemp("runs"))
    if opened.slots.total < 2:
        opened.close()
        pytest.skip(f"needs 2 cores, has {opened.slots.total}")
    yield opened
    opened.close()


_numbers = iter(range(1, 10_000))


def request(
    world_size: int = 2,
    *,
    sleep: bool = False,
    faults: Sequence[dict[str, Any]] = (),
    total: float = 180.0,
) -> TrialRequest:
    return TrialRequest(
        sweep="t",
        trial_id=next(_numbers),
        attempt=1,
        workload="synthetic",
        options={"sleep": sleep, "time_scale": 3000.0 if sleep else 1.0, "faults": list(faults)},
        model=PRESETS["llama-tiny"],
        sequence_length=64,
        layout=Layout(data_parallel_size=world_size, micro_batch_size=2),
        device=Device.CPU,
        measurement=MeasurementPlan(
            warmup_steps=2, min_steps=5, max_steps=6, relative_confidence=0.5
        ),
        limits=PhaseLimits(
            start=120, rendezvous=120, first_step=120, steady=30, teardown=5, total=total
        ),
        seed=0,
    )


def begin(scheduler: RayScheduler, asked: TrialRequest, shape: Shape) -> None:
    """Start on the first nodes with enough slots; the scheduler decides whether they are free."""
    large = [node for node, slots in scheduler.slots.nodes.items() if slots >= shape.slots_per_node]
    scheduler.start(asked, shape, large[: shape.num_nodes])


def until_finished(
    scheduler: RayScheduler, count: int = 1, *, seconds: float = 180.0
) -> list[SchedulerEvent]:
    events: list[SchedulerEvent] = []
    deadline = time.monotonic() + seconds
    while sum(isinstance(e, Finished) for e in events) < count:
        assert time.monotonic() < deadline, events
        events += scheduler.poll(0.5)
    return events


def title_of(pid: int) -> str:
    """Return "" if the process has ended meanwhile."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    return ""


def finished(events: Sequence[SchedulerEvent]) -> list[Finished]:
    return [e for e in events if isinstance(e, Finished)]


def test_a_local_ray_has_processes_for_agents_and_none_that_wait_for_work(
    scheduler: RayScheduler,
) -> None:
    begin(scheduler, request(), PAIR)
    # A process that waits for work would have started before the agent.
    until_finished(scheduler)
    titles = [title_of(pid) for pid in descendants(os.getpid())]
    assert len([title for title in titles if title.startswith("ray::NodeAgent")]) == 1
    assert [title for title in titles if title.startswith("ray::IDLE")] == []


def test_an_attempt_is_placed_and_every_rank_reports(scheduler: RayScheduler) -> None:
    asked = request()
    begin(scheduler, asked, PAIR)
    events = until_finished(scheduler)
    assert isinstance(events[0], Placed)
    (end,) = finished(events)
    assert end.failure is None
    assert [outcome.rank for report in end.reports for outcome in report.ranks] == [0, 1]
    assert all(outcome.result is not None for report in end.reports for outcome in report.ranks)
    assert end.shared_nodes is False


def test_an_agent_is_kept_while_the_next_attempt_wants_as_many_slots(
    scheduler: RayScheduler,
) -> None:
    begin(scheduler, request(), PAIR)
    until_finished(scheduler)
    agents = _agents()
    assert agents
    begin(scheduler, request(), PAIR)
    until_finished(scheduler)
    assert _agents() == agents


def test_an_attempt_costs_its_slots_for_as_long_as_they_are_held(scheduler: RayScheduler) -> None:
    for hang_seconds in (0.5, 1.5):
        asked = request(faults=[{"fault": "hang", "at": "step_2"}], total=hang_seconds)
        began = time.monotonic()
        begin(scheduler, asked, PAIR)
        (end,) = finished(until_finished(scheduler))
        (report,) = end.reports
        assert report.seconds >= hang_seconds
        assert (
            PAIR.num_slots * report.seconds
            <= end.gpu_seconds
            <= PAIR.num_slots * (time.monotonic() - began)
        )


def test_what_gangs_hold_is_what_attempts_hold_and_what_stands_idle(
    scheduler: RayScheduler,
) -> None:
    asked_at = time.monotonic()
    before = scheduler.leased()
    attempts = 0.0
    for _ in range(2):
        begin(scheduler, request(), PAIR)
        attempts += sum(end.gpu_seconds for end in finished(until_finished(scheduler)))
        time.sleep(0.3)
    begin(scheduler, request(), PAIR)
    under_way = scheduler.leased()
    attempts += sum(end.gpu_seconds for end in finished(until_finished(scheduler)))
    after, seconds = scheduler.leased(), time.monotonic() - asked_at
    assert after.reserved - before.reserved == pytest.approx(
        attempts + after.idle - before.idle, abs=1e-6
    )
    assert after.idle - before.idle >= PAIR.num_slots * 0.6
    assert before.reserved < under_way.reserved < after.reserved
    # The gang of another test may have stood here: at most all slots for all of the time.
    assert after.reserved - before.reserved <= scheduler.slots.total * seconds
    assert after.capacity is not None
    assert before.capacity is not None
    assert after.capacity - before.capacity == pytest.approx(
        scheduler.slots.total * seconds, rel=0.1
    )


def test_another_shape_gives_the_idle_gang_back(scheduler: RayScheduler) -> None:
    begin(scheduler, request(), PAIR)
    until_finished(scheduler)
    begin(scheduler, request(1), SINGLE)
    (end,) = finished(until_finished(scheduler))
    assert end.failure is None


def test_gangs_run_side_by_side_while_slots_are_free_and_no_longer(scheduler: RayScheduler) -> None:
    slots = scheduler.slots.total
    for _ in range(slots):
        begin(scheduler, request(1, sleep=True), SINGLE)
    (node,) = scheduler.slots.nodes
    assert scheduler.free_on_nodes()[node].widest == 0
    with pytest.raises(ResourcesInsufficient, match=f"{slots} of them taken"):
        begin(scheduler, request(1), SINGLE)
    ends = finished(until_finished(scheduler, slots))
    assert [(end.failure, end.shared_nodes) for end in ends] == [(None, True)] * slots
    assert scheduler.free_on_nodes()[node].widest == slots
    begin(
        scheduler, request(slots), Shape(num_nodes=1, slots_per_node=slots)
    )  # in the place of whatever stood
    until_finished(scheduler)
    assert scheduler.free_on_nodes()[node] == FreeOnNode(standing=slots, widest=slots)


def test_narrow_gangs_run_side_by_side_in_what_a_wide_one_has_leased(
    scheduler: RayScheduler,
) -> None:
    slots = scheduler.slots.total
    begin(scheduler, request(slots), Shape(num_nodes=1, slots_per_node=slots))
    until_finished(scheduler)
    (agent,) = _agents()
    before = scheduler.leased()
    asked = [request(1, sleep=True) for _ in range(slots)]
    for one in asked:
        begin(scheduler, one, SINGLE)
    placed: list[SchedulerEvent] = []
    while len(placed) < slots:
        placed += [event for event in scheduler.poll(0.2) if isinstance(event, Placed)]
    scheduler.cancel(asked[0].trial_id)
    ends = {end.trial_id: end for end in finished(until_finished(scheduler, slots))}
    assert ends.pop(asked[0].trial_id).failure is not None, "it was cancelled"
    assert [end.failure for end in ends.values()] == [None] * (slots - 1), "the others were not"
    assert _agents() == {agent}
    after = scheduler.leased()
    assert after.reserved - before.reserved >= sum(end.gpu_seconds for end in ends.values())


def test_gangs_beside_one_another_are_lost_together_with_their_agent_and_cost_what_they_held(
    scheduler: RayScheduler,
) -> None:
    slots = scheduler.slots.total
    begin(scheduler, request(slots), Shape(num_nodes=1, slots_per_node=slots))
    until_finished(scheduler)
    (agent,) = _agents()
    before = scheduler.leased()
    for _ in range(slots):
        begin(scheduler, request(1, sleep=True), SINGLE)
    time.sleep(0.5)
    os.kill(agent, signal.SIGKILL)
    ends = finished(until_finished(scheduler, slots, seconds=30))
    after = scheduler.leased()
    assert [end.failure and end.failure.kind for end in ends] == [FailureKind.NODE_LOST] * slots
    assert after.reserved - before.reserved == pytest.approx(
        sum(end.gpu_seconds for end in ends) + after.idle - before.idle, abs=1e-6
    )
    begin(scheduler, request(1), SINGLE)
    (end,) = finished(until_finished(scheduler))
    assert end.failure is None


def test_an_agent_that_is_asked_from_outside_to_end_was_preempted(scheduler: RayScheduler) -> None:
    begin(scheduler, request(1, faults=[{"fault": "hang", "at": "forward"}]), SINGLE)
    while not any(isinstance(event, Placed) for event in scheduler.poll(0.2)):
        pass
    time.sleep(0.5)
    for agent in _agents():
        os.kill(agent, signal.SIGTERM)
    (end,) = finished(until_finished(scheduler, seconds=30))
    assert end.failure is not None
    assert end.failure.kind is FailureKind.PREEMPTED, end.failure
    assert "SIGTERM" in end.failure.message


@ray.remote
class _OfAnotherJob:
    def answer(self) -> None:
        """Return once the actor is placed."""


def test_a_gang_whose_slots_another_job_holds_is_given_up_and_forms_once_they_are_free(
    scheduler: RayScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler._leases.vacate(scheduler.slots.nodes)
    num_cpus = scheduler.slots.total
    other = _OfAnotherJob.options(num_cpus=num_cpus).remote()  # type: ignore[attr-defined]
    ray.get(other.answer.remote(), timeout=180)
    monkeypatch.setattr("orchestrator.cluster.ray.scheduler.PLACEMENT_SECONDS", 2.0)
    monkeypatch.setattr("orchestrator.cluster.ray.scheduler.PLACEMENT_JITTER_SECONDS", 0.0)
    begin(scheduler, request(), PAIR)
    (end,) = finished(until_finished(scheduler))
    ray.kill(other)
    assert end.failure is not None
    assert end.failure.kind is FailureKind.LAUNCH_FAILED
    assert "are its slots held by another job of the cluster?" in end.failure.message
    assert (end.gpu_seconds, end.shared_nodes) == (0.0, None), "it never held any"
    monkeypatch.undo()
    begin(scheduler, request(), PAIR)
    (end,) = finished(until_finished(scheduler))
    assert end.failure is None


def test_a_local_ray_has_nothing_that_only_clusters_need(scheduler: RayScheduler) -> None:
    titles = [title_of(pid) for pid in descendants(os.getpid())]
    assert any("raylet" in title for title in titles)
    assert not [title for title in titles if "monitor.py" in title or "dashboard.py" in title]


def test_a_shape_that_no_node_holds_is_refused(scheduler: RayScheduler) -> None:
    with pytest.raises(ResourcesInsufficient, match="4096"):
        scheduler.start(
            request(4096), Shape(num_nodes=1, slots_per_node=4096), list(scheduler.slots.nodes)
        )


def test_the_first_bad_rank_is_named_and_the_gang_serves_the_next_attempt(
    scheduler: RayScheduler,
) -> None:
    begin(scheduler, request(faults=[{"fault": "segfault", "at": "step_2", "rank": 1}]), PAIR)
    (end,) = finished(until_finished(scheduler))
    assert end.failure is not None
    assert (end.failure.kind, end.failure.rank) == (FailureKind.SEGFAULT, 1)
    begin(scheduler, request(), PAIR)
    (end,) = finished(until_finished(scheduler))
    assert end.failure is None


def test_a_cancelled_attempt_ends_and_leaves_no_process(scheduler: RayScheduler) -> None:
    asked = request(sleep=True)
    begin(scheduler, asked, PAIR)
    while not any(isinstance(e, Placed) for e in scheduler.poll(0.2)):
        pass
    time.sleep(0.5)
    scheduler.cancel(asked.trial_id)
    (end,) = finished(until_finished(scheduler, seconds=60))
    assert end.failure is not None
    assert end.failure.kind is FailureKind.CANCELLED


def test_an_agent_killed_with_sigkill_is_a_lost_node_without_survivors(
    scheduler: RayScheduler,
) -> None:
    asked = request(sleep=True)
    begin(scheduler, asked, PAIR)
    while not any(isinstance(e, Placed) for e in scheduler.poll(0.2)):
        pass
    (agent,) = _agents()
    deadline = time.monotonic() + 60
    while len(below := {pid: start_time(pid) for pid in descendants(agent)}) < 4:
        assert time.monotonic() < deadline, "a warden, a server and two ranks"
        time.sleep(0.02)
    os.kill(agent, signal.SIGKILL)
    (end,) = finished(until_finished(scheduler, seconds=30))
    assert end.failure is not None
    assert end.failure.kind is FailureKind.NODE_LOST
    deadline = time.monotonic() + 5
    while alive := [pid for pid, started in below.items() if start_time(pid) == started]:
        assert time.monotonic() < deadline, (
            f"alive 5 s after the agent's death: {[_command(pid) for pid in alive]}"
        )
        time.sleep(0.05)
    begin(scheduler, request(), PAIR)
    (end,) = finished(until_finished(scheduler))
    assert end.failure is None, "a new gang takes its place"


def _agents() -> set[int]:
    return {pid for pid in descendants(os.getpid()) if "NodeAgent" in _command(pid)}


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""
