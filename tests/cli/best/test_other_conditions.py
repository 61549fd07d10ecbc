"""What `sweep best` shows of results that were measured under other conditions."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from db.store import Store
from orchestrator.cli.best.command import show_best
from orchestrator.cli.terminal.output import Format
from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.report.other_conditions import NOT_COMPARABLE
from orchestrator.report.pages.headline import headlines
from orchestrator.report.software_change import software_changes
from orchestrator.report.sweep_rows import read_rows
from tests.cli.cli_store import BUSY
from tests.cli.conftest import Sweep
from tests.db.builders import (
    Bench,
    cell,
    fingerprint,
    measurement,
    record_measurement,
    start_repeat,
)


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


EDITED = fingerprint().model_copy(update={"dirty_diff_digest": "files:b"})


def edited(bench: Bench, trial_id: int | None = None, mbs: int = 1) -> None:
    """Measure a layout, or a trial once more, with other files of the program."""
    if trial_id is None:
        trial_id, attempt = bench.start(mbs)
    else:
        attempt = start_repeat(bench.store, trial_id, bench.epoch, ["node-a", "node-b"])
    record_measurement(
        bench.store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        measurement=measurement(900.0 + mbs),
        fingerprint=EDITED,
    )


def command_of(text: str) -> list[str]:
    """Return the arguments of the `sweep invalidate` that a text names."""
    (line,) = [line for line in text.splitlines() if "sweep invalidate" in line]
    return shlex.split(line[line.index("sweep invalidate") :])[1:]


def test_repeats_with_other_code_that_were_kept_apart_are_said_with_what_measures_again(
    store: Store, sweep: Sweep
) -> None:
    bench = Bench.on(store)
    trials = [measured(bench, size, "2.13.0") for size in (1, 2)]
    edited(bench, trials[0])
    bench.store.release(bench.sweep_id, bench.epoch)
    for command in ("best", "status"):
        out, _ = sweep(command)
        assert "No more repeats were made: the program has changed (the program's" in out
        assert "1 repeat of the new code is not counted" in out
        assert "The ranking is that of the earlier code" in out
        # A repeat would be kept apart too.
        assert "To decide between them" not in out
        assert "To rank the new code instead, if the change still stands, run this" in out
    for now, is_undone in ((fingerprint(), True), (EDITED, False)):
        told = software_changes(store, bench.sweep_id, "tiny", code=lambda now=now: now)
        assert (told == []) is is_undone
    out, _ = sweep(*command_of(out))
    assert out.startswith("2 trials will be measured again")
    out, _ = sweep("best")
    assert "2 layouts wait to be measured: the same `sweep run` measures what" in out
    assert "invalidate" not in out


def test_layouts_with_earlier_software_are_counted_with_what_measures_them_again(
    store: Store, sweep: Sweep
) -> None:
    bench = Bench.on(store)
    for size in (1, 2, 4):
        measured(bench, size, "2.9.0")
    measured(bench, 8, "2.13.0")
    bench.store.release(bench.sweep_id, bench.epoch)
    for command in (["best"], ["best", "--pareto"], ["status"]):
        out, _ = sweep(*command)
        assert "Of 4 measured layouts, 1 has numbers with the newest code" in out
        assert "3 with an earlier one (torch 2.9.0 -> 2.13.0)" in out
    (row,) = store.sweeps()
    (head,) = headlines([read_rows(store, row)])
    (line,) = [line for line in head.remarks if "sweep invalidate" in line]
    assert line in " ".join(sweep("best")[0].split())
    told = json.loads(sweep("best", "--json")[0])["software_changes"]
    assert told == json.loads(sweep("best", "--pareto", "--json")[0])["software_changes"]
    (one,) = json.loads(sweep("status", "--json")[0])["sweeps"]
    assert told == [{"cell": cell().key, **change} for change in one["software_changes"]]
    assert told[0]["text"] + "." in line and told[0]["command"] in line
    assert sweep(*command_of(out))[0].startswith("3 trials will be measured again")
    out, _ = sweep("best")
    assert "3 layouts wait to be measured" in out


def test_cells_with_different_code_are_told_with_what_measures_the_older_again(
    store: Store, sweep: Sweep
) -> None:
    first = Bench.on(store)
    measured(first, 1, "2.13.0")
    second = store.ensure_cell(first.sweep_id, cell(sequence_length=256), first.epoch)
    edited(replace(first, cell_id=second))
    store.release(first.sweep_id, first.epoch)
    assert software_changes(store, first.sweep_id, "s") == []
    (change,) = software_changes(store, first.sweep_id, "s", across_cells=True)
    assert change.text.startswith("Of 2 cells, 1 was measured with other code")
    command = change.command.replace("--sweep s ", "")
    assert sweep(*command_of(command))[0].startswith("1 trial will be measured again")


def test_a_cell_with_only_numbers_that_cannot_be_true_says_so(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    trial_id, attempt = bench.start(1)
    record_measurement(
        bench.store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        measurement=measurement(900.0, implausible="faster than its peak"),
        fingerprint=fingerprint(),
    )
    out, _ = sweep("best")
    assert "no layout can be ranked: 1 measured and left out, since the numbers cannot" in out
    assert "under the current conditions" not in out
    _, err = sweep("export", "config", "tiny", "--to", "torchrun", code=2)
    assert "has no winner: no layout can be ranked: 1 measured and left out" in err


def test_cells_that_changed_alike_name_the_command_once(store: Store, sweep: Sweep) -> None:
    first = Bench.on(store)
    other = store.ensure_cell(first.sweep_id, cell(sequence_length=256), first.epoch)
    for bench in (first, replace(first, cell_id=other)):
        measured(bench, 1, "2.9.0")
        measured(bench, 2, "2.13.0")
    store.release(first.sweep_id, first.epoch)
    out, _ = sweep("best")
    assert out.count("sweep invalidate") == 1
    assert "Of 4 measured layouts, 2 have numbers with the newest code" in out
    told = json.loads(sweep("best", "--json")[0])["software_changes"]
    assert [one["cell"] for one in told] == [cell().key, cell(sequence_length=256).key]


@pytest.mark.parametrize("pareto", [False, True])
def test_changes_that_the_ending_of_a_run_has_named_are_not_named_again(
    store: Store, capsys: pytest.CaptureFixture[str], *, pareto: bool
) -> None:
    bench = Bench.on(store)
    measured(bench, 1, "2.9.0")
    measured(bench, 2, "2.13.0")
    for stands_alone in (True, False):
        show_best(None, pareto=pareto, format=Format.TABLE, db=store.url, stands_alone=stands_alone)
        assert ("sweep invalidate" in capsys.readouterr().out) is stands_alone
