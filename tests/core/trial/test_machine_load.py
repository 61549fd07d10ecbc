"""The effect of a machine's load on a number that was measured under it."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log, sqrt

import pytest

from orchestrator.cluster.contract import Finished
from orchestrator.core.trial.machine_load import (
    NO_LOAD,
    MachineLoad,
    disturbance_text,
    is_disturbed,
    most_slowdown,
    of_gang,
    relative_sd,
)
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.sweep.spool import _SPOOLED, Spooled


def cpu(own: float, others: float, cores: float = 2.0, sweep: float = 0.0) -> MachineLoad:
    return MachineLoad(
        cpu_cores=cores, own_cpu_cores=own, sweep_cpu_cores=sweep, others_cpu_cores=others
    )


@pytest.mark.parametrize(
    ("load", "slowdown"),
    [
        (NO_LOAD, 1.0),
        (cpu(own=2.0, others=0.0), 1.0),
        (cpu(own=1.0, others=0.3), 1.0),  # more was idle than others used
        (cpu(own=1.9, others=0.1), 1.0),  # what a machine does by itself
        (cpu(own=8.0, others=20.0, cores=64.0), 1.0),
        # Nothing was idle: others may have had every second time slice.
        (cpu(own=1.0, others=1.0), 2.0),
        (
            cpu(own=0.5, others=0.5, sweep=1.0),
            4 / 3,
            # The sweep's other gangs are not somebody else.
        ),
        (
            cpu(own=1.0, others=0.75, cores=2.0),
            1.5,
            # A quarter was idle, and would have done for a third of it.
        ),
        (cpu(own=0.6, others=1.4), 2.0 / 0.6),
        # It may have wanted a whole core, and had half of a physical one.
        (cpu(own=0.2, others=1.8), 10.0),
        (cpu(own=0.0005, others=7.9, cores=8.0, sweep=0.0), 100.0),
        (cpu(own=0.25, others=1.7), 1.9 / 0.25),
        (cpu(own=1.0, others=15.0, cores=16.0), 4.0),
        (cpu(own=0.1, others=0.9, cores=1.0, sweep=0.0), 10.0),
        # Enough was idle for it.
        (cpu(own=0.1, others=1.2), 4.0),
        (cpu(own=0.0, others=2.0), 4.0),
        (
            MachineLoad(
                foreign_gpu_processes=0,
                gpu_clock_ratio=0.7,
                gpu_throttled_fraction=0.0,
                gpu_throttle_reasons=("sw_power_cap",),
            ),
            1.0,
        ),
        (MachineLoad(foreign_gpu_processes=2), 2.0),
        (
            MachineLoad(
                gpu_clock_ratio=0.5,
                gpu_throttled_fraction=1.0,
                gpu_throttle_reasons=("hw_thermal_slowdown",),
            ),
            2.0,
        ),
        # Half of the time at 0.8 of the clock, and once above the usual clock.
        (MachineLoad(gpu_clock_ratio=0.8, gpu_throttled_fraction=0.5), 1 + 0.5 * 0.25),
        (MachineLoad(gpu_clock_ratio=1.25, gpu_throttled_fraction=0.5), 1.0),
        (MachineLoad(gpu_throttled_fraction=0.1), 1.0),
        # Hardware halves the clock at least, if nobody read it.
        (MachineLoad(gpu_throttled_fraction=0.5), 1.5),
        # A tenth of the cores is not noticed.
        (cpu(own=18.0, others=2.0, cores=20.0), 1.0),
        (cpu(own=17.0, others=3.0, cores=20.0), 20 / 17),
        # The cores of others, or all cores, were not read.
        (MachineLoad(cpu_cores=2.0, own_cpu_cores=1.0), 1.0),
        (MachineLoad(own_cpu_cores=1.0, others_cpu_cores=1.0), 1.0),
    ],
)
def test_a_load_widens_by_what_it_may_have_slowed_down(load: MachineLoad, slowdown: float) -> None:
    assert relative_sd(load) == pytest.approx(log(slowdown) / sqrt(12))
    assert is_disturbed(load) is (slowdown > 1) is (disturbance_text(load) is not None)


@pytest.mark.parametrize(
    ("load", "slowdown"),
    [
        (NO_LOAD, 1.0),
        (cpu(own=1.9, others=0.1), 1.0),
        (cpu(own=1.0, others=1.0), 2.0),
        (cpu(own=0.02, others=1.98), 100.0),
        (cpu(own=0.0001, others=1.99), 100.0),  # it waits
        (cpu(own=0.02, others=0.5), 1.0),  # more was idle than others used
        (cpu(own=0.02, others=1.2), 4.0),  # enough was idle
        (cpu(own=0.02, others=1.6), 1.24 / 0.02),
        (cpu(own=0.5, others=0.5, sweep=1.0), 2.0),
        # The attempt's own use is unknown.
        (cpu(own=0.0, others=2.0), 4.0),
        (MachineLoad(cpu_cores=2.0, others_cpu_cores=2.0), 4.0),
        (MachineLoad(foreign_gpu_processes=2), 2.0),
        (MachineLoad(gpu_clock_ratio=0.8, gpu_throttled_fraction=0.5), 1 + 0.5 * 0.25),
        (MachineLoad(gpu_throttled_fraction=0.5), 1.5),
    ],
)
def test_single_steps_may_be_slower_by_all_that_others_took(
    load: MachineLoad, slowdown: float
) -> None:
    assert most_slowdown(load) == pytest.approx(slowdown)


def test_what_disturbed_a_result_is_said_in_words() -> None:
    assert (
        disturbance_text(cpu(own=0.2, others=1.8))
        == "the machine was busy: 1.8 of 2 cores were somebody else's"
    )
    assert (
        disturbance_text(MachineLoad(foreign_gpu_processes=1)) == "1 other process ran on its GPUs"
    )
    throttled = MachineLoad(
        gpu_clock_ratio=0.6,
        gpu_throttled_fraction=0.4,
        gpu_throttle_reasons=("hw_thermal_slowdown", "sw_power_cap"),
    )
    assert (
        disturbance_text(throttled)
        == "its GPUs were slowed down for 40% of the time (hw thermal slowdown), at 60% of their "
        "clock"
    )


def test_of_a_gang_the_node_counts_where_others_disturbed_most_and_the_worst_device() -> None:
    quiet = MachineLoad(
        cpu_cores=8.0,
        own_cpu_cores=1.0,
        sweep_cpu_cores=0.0,
        others_cpu_cores=3.0,
        gpu_clock_ratio=0.5,
    )
    busy = MachineLoad(
        cpu_cores=2.0,
        own_cpu_cores=1.0,
        sweep_cpu_cores=0.0,
        others_cpu_cores=1.0,
        gpu_clock_ratio=0.9,
    )
    found = of_gang([quiet, NO_LOAD, busy])
    assert (found.others_cpu_cores, found.cpu_cores, found.gpu_clock_ratio) == (1.0, 2.0, 0.5)
    assert of_gang([NO_LOAD, NO_LOAD, MachineLoad()]) is NO_LOAD
    assert of_gang([quiet]) is quiet


def test_of_nodes_that_nobody_slowed_the_one_counts_whose_cores_others_used_most() -> None:
    unread, used = MachineLoad(cpu_cores=8.0), cpu(own=1.0, others=0.5, cores=8.0)
    for loads in ([unread, used], [used, unread]):
        assert of_gang(loads).others_cpu_cores == 0.5


def test_the_slowdowns_of_cores_and_of_devices_multiply() -> None:
    both = replace(cpu(own=1.0, others=1.0), foreign_gpu_processes=1, gpu_throttled_fraction=0.5)
    assert most_slowdown(both) == pytest.approx(2.0 * 2.0 * 1.5)
    parts = (2.0, 2.0, 1.5)
    assert relative_sd(both) == pytest.approx(sqrt(sum(log(most) ** 2 for most in parts) / 12))


def test_a_load_survives_the_spool_and_a_spool_of_before_has_none() -> None:
    load = MachineLoad(cpu_cores=2.0, others_cpu_cores=1.5, gpu_throttle_reasons=("hw_slowdown",))
    end = Finished(
        trial_id=1,
        reports=[NodeReport(node="a", ranks=[], load=load)],
        failure=None,
        gpu_seconds=1.0,
    )
    text = _SPOOLED.dump_json(Spooled(attempt=1, end=end))
    assert _SPOOLED.validate_json(text).end.reports[0].load == load
    document = json.loads(text)
    del document["end"]["reports"][0]["load"]
    before = json.dumps(document).encode()
    assert _SPOOLED.validate_json(before).end.reports[0].load == NO_LOAD


@pytest.mark.parametrize(("others", "slowdown"), [(8.0, 4.0), (9.0, 8.0)])
def test_only_others_that_took_most_of_the_cores_may_have_starved_an_attempt(
    others: float, slowdown: float
) -> None:
    """One of twelve cores was its own: beyond the idle ones others used five, or seven."""
    assert most_slowdown(cpu(own=1.0, others=others, cores=12.0)) == pytest.approx(slowdown)
