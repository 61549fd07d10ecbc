"""What `sweep best` shows of results that were measured under other conditions."""

from __future__ import annotations

import json

from db.store import Store
from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.report.other_conditions import NOT_COMPARABLE
from orchestrator.report.pages.headline import headlines
from orchestrator.report.sweep_rows import read_rows
from tests.cli.cli_store import BUSY
from tests.cli.conftest import Sweep
from tests.db.builders import Bench, fingerprint, measurement, record_measurement, start_repeat


def measured(bench: Bench, mbs: int, torch: str, load: MachineLoad = NO_LOAD, runs: int = 1) -> int:
    trial_id, attempt = bench.start(mbs)
    told = measurement(900.0 + mbs, peak_memory_allocated_bytes=None, confident=False)
    for place in range(runs):
        if place:
            attempt = start_repeat(bench.store, trial_id, bench.epoch, ["node-a", "node-b"])
        record_measurement(
            bench.store,
            trial_id,
            attempt,
            epoch=bench.epoch,
            measurement=told,
            fingerprint=fingerprint(torch),
            load=load,
        )
    return trial_id


def test_they_have_the_same_columns_as_the_current_ones(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    old = measured(bench, 1, "2.9.0", load=BUSY, runs=2)
    measured(bench, 2, "2.13.0")
    out, _ = sweep("best")
    line = next(line for line in out.splitlines() if line.split()[:2] == [str(old), "901"])
    # Median steps of 0.5 s; the builders' program reserved 75 of 80 GiB.
    assert line.split()[2:10] == ["±1.5%?", "2", "41.0%", "500.0", "ms", "75.0", "of", "80.0"]
    assert "(reserved)" in line
    assert "(disturbed)" in line
    assert [mark for mark in out.splitlines() if mark.startswith("?: ")]
    (other,) = json.loads(sweep("best", "--json")[0])["other_fingerprints"]
    assert other["trial_id"] == old
    assert other["num_measurements"] == 2
    assert other["changed"] == "torch 2.9.0 -> 2.13.0"


def test_the_head_of_a_report_names_the_same_layouts(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    for size, torch in ((1, "2.9.0"), (2, "2.9.0"), (4, "2.10.0"), (8, "2.13.0")):
        measured(bench, size, torch)
    (row,) = store.sweeps()
    (head,) = headlines([read_rows(store, row)])
    told = json.loads(sweep("best", "--json")[0])["other_fingerprints"]
    assert len(told) == 2
    lines = [line for line in head.remarks if line.startswith(NOT_COMPARABLE)]
    for line, one in zip(lines, told, strict=True):
        assert f": trial {one['trial_id']}, " in line
        assert f"changed since: {one['changed']}" in line
