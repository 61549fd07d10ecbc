"""The commands that only read: status, best, trials, show, logs, sql, export."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from db.store import Store
from db.types import SweepState
from db.write.writes import StoppedCell
from orchestrator import cli
from orchestrator.cli import explain as explain_command
from orchestrator.cli.sweep_file import store_if_any
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.core.trial.reserved_time import Leased
from orchestrator.report import ranking
from tests.cli.cli_store import BUSY, FORMULA, Filled, fill
from tests.db.builders import (
    CONDITIONS,
    SLOW_END,
    Bench,
    Runs,
    cell,
    measure_runs,
    record_measurement,
    start_repeat,
)
from tests.kept_loggers import kept_loggers

Sweep = Callable[..., str]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Filled]:
    folder = tmp_path_factory.mktemp("look")
    url = f"sqlite:///{folder}/sweep.sqlite"
    with Store.open(url) as store:
        return url, fill(store, folder)


@pytest.fixture
def ids(database: tuple[str, Filled]) -> Filled:
    return database[1]


@pytest.fixture
def sweep(
    database: tuple[str, Filled],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Sweep]:
    """Run a command line on the store and return its stdout, which controls no terminal."""
    monkeypatch.setenv("SWEEP_DB", database[0])
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert cli.main(arguments) == code
        out, err = capsys.readouterr()
        assert not set(out + err) & set("\x1b\x9b\x07\u202e")
        assert "Traceback" not in err
        return out if code == 0 else err

    with kept_loggers():
        yield run


def document(text: str) -> Any:
    found = json.loads(text)
    assert found["schema"] == 1
    return found


def test_status_counts_states_and_names_the_holder_and_what_runs(sweep: Sweep, ids: Filled) -> None:
    text = sweep("status")
    assert f"running on host {socket.gethostname()}, pid {os.getpid()}" in text
    assert "10 trials in 2 cells" in text
    assert "taking steps" in text
    assert "before its first step" in text
    assert "1,234 tokens/s/GPU" in text
    assert "nothing has fitted: 1 out of memory, 0 pruned" in text
    found = document(sweep("status", "tiny", "--json"))["sweeps"][0]
    assert found["num_trials"] == {
        "queued": 1,
        "launching": 1,
        "running": 1,
        "measured": 3,
        "out_of_memory": 2,
        "failed": 1,
        "pruned": 1,
    }
    assert [(r["trial_id"], r["state"]) for r in found["running"]] == [
        (ids.running, "running"),
        (ids.launching, "launching"),
    ]
    assert all(0 <= r["seconds"] < 600 for r in found["running"])
    assert found["holder"]["pid"] == os.getpid()
    assert found["gpu_seconds"] == pytest.approx(3 * 94 + 3 * 20)
    assert [cell["best"] and cell["best"]["trial_id"] for cell in found["cells"]] == [
        ids.measured,
        None,
    ]


def test_status_says_what_the_held_gpu_seconds_went_into(sweep: Sweep, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/held.sqlite"
    with Store.open(url) as store:
        fill(store, tmp_path)
        row = store.sweep_named("tiny")
        nothing, some = (
            Leased(reserved=0.0, idle=0.0, capacity=0.0),
            Leased(reserved=400.0, idle=18.0, capacity=800.0),
        )
        store.begin_session(
            row.id, row.owner_epoch, num_gpus=8, price_per_gpu_hour=36.0, leased=nothing
        )
        store.renew(row.id, row.owner_epoch, leased=some)
    found = document(sweep("status", "tiny", "--db", url, "--json"))["sweeps"][0]
    # Three measured, of 94 GPU-seconds each; two out of memory and one failed, of 20 each. Two run
    # in the rest that is not idle.
    parts = {
        "startup": 3 * 94.0,
        "out_of_memory": 40.0,
        "failed": 20.0,
        "under_way": 400.0 - 18.0 - 342.0,
        "idle": 18.0,
    }
    assert {
        name: value for name, value in found["gpu_seconds_by_part"].items() if value
    } == pytest.approx(parts)
    assert (found["gpu_seconds"], found["capacity_gpu_seconds"], found["dollars"]) == (
        400.0,
        800.0,
        pytest.approx(4.0),
    )
    assert sum(cell["gpu_seconds"] for cell in found["cells"]) == pytest.approx(342.0)
    shares = (
        "start-up 70.5%, failed or no longer counted 5.0%, out of memory 10.0%, under way 10.0%,"
        " idle 4.5%"
    )
    assert (
        f"0.11 GPU-hours reserved, $4.00: {shares}; the cluster had 0.22 GPU-hours meanwhile"
        in sweep("status", "tiny", "--db", url)
    )


def test_status_says_why_a_sweep_ended(sweep: Sweep, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ended.sqlite"
    nothing = Leased(reserved=0.0, idle=0.0, capacity=0.0)
    with Store.open(url) as store:
        fill(store, tmp_path)
        row = store.sweep_named("tiny")
        store.begin_session(row.id, row.owner_epoch, num_gpus=8, leased=nothing)
        assert (
            document(sweep("status", "tiny", "--db", url, "--json"))["sweeps"][0]["stop_reasons"]
            == []
        )
        said = ["max_gpu_hours reached", "nothing fits"]
        stopped = [
            StoppedCell(cell=cell.cell, reason=reason, num_untried=num)
            for cell, reason, num in zip(store.cells(row.id), said, (1204, 0), strict=True)
        ]
        store.release(row.id, row.owner_epoch, SweepState.FINISHED, leased=nothing, stopped=stopped)
        found = document(sweep("status", "tiny", "--db", url, "--json"))["sweeps"][0]
        assert (found["stop_reasons"], found["num_untried"]) == (said, 1204)
        assert [(c["stop_reason"], c["num_untried"]) for c in found["cells"]] == [
            ("max_gpu_hours reached", 1204),
            ("nothing fits", 0),
        ]
        text = sweep("status", "tiny", "--db", url)
        assert "Sweep tiny: finished (max_gpu_hours reached; nothing fits)" in text
        assert re.search(r"^llama-tiny_\S+ .* 1,204 +[\d.]+$", text, re.MULTILINE)
        assert "1,204 layouts never tried in 1 cell: max_gpu_hours reached\n" in text
        untried = "1,204 layouts of this cell never tried: max_gpu_hours reached\n"
        assert untried in sweep("best", "tiny", "--db", url)
        Bench.on(store, "other")
        assert re.search(r" never tried .*\n(.*\n)?tiny .* 1,204 ", sweep("status", "--db", url))
        # Another call goes on: what it will leave is not known.
        epoch = store.acquire(row.id, host="a", pid=1)
        store.begin_session(row.id, epoch, num_gpus=8, leased=nothing)
        found = document(sweep("status", "tiny", "--db", url, "--json"))["sweeps"][0]
        assert (found["num_untried"], found["cells"][0]["num_untried"]) == (None, None)
        assert "never tried" not in sweep("status", "tiny", "--db", url)
        assert "never tried" not in sweep("best", "tiny", "--db", url)


def test_show_says_what_an_attempt_held_and_what_for(sweep: Sweep, ids: Filled) -> None:
    assert "0.0056: out of memory 100.0%" in sweep("show", str(ids.out_of_memory))
    (attempt,) = document(sweep("show", str(ids.measured), "--json"))["attempts"]
    assert attempt["gpu_seconds_by_part"] | {"startup": 0.0} == dict.fromkeys(
        attempt["gpu_seconds_by_part"], 0.0
    )
    assert attempt["gpu_seconds_by_part"]["startup"] == 94.0


def test_status_tells_the_phase_of_the_least_advanced_rank(
    sweep: Sweep, ids: Filled, tmp_path: Path
) -> None:
    folder = (
        tmp_path
        / "home"
        / "runs"
        / ids.run_folder
        / f"trial-{ids.running}"
        / "attempt-1"
        / "node-0"
    )
    folder.mkdir(parents=True)
    (folder / "heartbeat-0.json").write_text('{"phase": "steady", "step": 12}')
    (folder / "heartbeat-1.json").write_text('{"phase": "steady", "step": 9}')
    (folder / "heartbeat-2.json").write_text("rubbish")
    running = document(sweep("status", "--json"))["sweeps"][0]["running"]
    assert [(r["phase"], r["step"]) for r in running] == [("steady", 9), (None, None)]
    assert "steady, step 9" in sweep("status")


def test_best_keeps_cells_and_fingerprints_apart(sweep: Sweep, ids: Filled) -> None:
    found = document(sweep("best", "--top", "5", "--json"))
    assert [(b["trial_id"], b["place"], b["is_current"]) for b in found["best"]] == [
        (ids.measured, 1, True),
        (ids.slower, 2, True),
    ]
    assert [o["trial_id"] for o in found["other_fingerprints"]] == [ids.old_conditions]
    assert [c["reason"] for c in found["cells_without"]] == [
        "nothing has fitted: 1 out of memory, 0 pruned with them"
    ]
    text = sweep("best", "--top", "5")
    assert (
        text.index("1,234")
        < text.index("900")
        < text.index("not comparable")
        < text.index("2,000")
        < text.index("nothing has fitted")
    )
    assert "70.0 of 80.0 GiB" in text
    (other,) = found["other_fingerprints"]
    assert other["changed"] == "torch 2.9.0 -> 2.13.0"
    assert "torch 2.9.0 -> 2.13.0" in text
    assert "±1.5%" in text


ONCE: Runs = {1: [(1.0, 0)], 2: [(1.2, 1)]}
REPEATED: Runs = {1: [(1.0, 0), (1.01, 2)], 2: [(1.2, 1)]}
AHEAD_AFTER_ONE: Runs = {1: [(1.2, 0), (1.21, 2)], 2: [(1.0, 1)]}
# The machine is 1.6 times slower at first: the second layout is as fast as the third.
SLOW_START: Runs = {
    1: [(1.6, 0), (1.0, 10), (1.005, 12)],
    2: [(1.92, 1)],
    4: [(1.2, 9)],
}
USUALLY = "runs of one layout usually vary by 1 to 4 % (nothing was repeated here)"


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (ONCE, f"Trial 1 is ahead after one run; {USUALLY}; not confirmed by another"),
        (
            {1: [(1.0, 0)], 2: [(1.01, 1)]},
            f"No single winner: trials 1, 2 are tied; {USUALLY}, and with that any of the tied"
            " could be the fastest",
        ),
        (
            REPEATED,
            "Winner: trial 1, confirmed by 2 runs; runs of one layout vary by 0.7% (1 repeat), and"
            " with that no other measured layout of this fingerprint could be faster",
        ),
        (
            AHEAD_AFTER_ONE,
            "Trial 2 is ahead after one run; runs of one layout vary by 0.6% (1 repeat); not",
        ),
        (SLOW_START, "The machine drifted: trial 1 took 1.600 s at first and 1.000 s 10 min 00 s"),
    ],
)
def test_best_says_how_sure_its_order_is(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch, runs: Runs, said: str
) -> None:
    measured_at(tmp_path, monkeypatch, runs)
    assert f"  {said}" in sweep("best")
    found = document(sweep("best", "--json"))
    variation = re.search(r"runs of one layout vary by .*? repeats?\)", sweep("best"))
    assert variation is None or variation[0] in sweep("status"), "one number for both"
    if runs is SLOW_START:
        assert found["drift"]["llama-tiny_2gpu_s128_gb64"].startswith(said)
        assert said in sweep("status")
    else:
        assert found["drift"] == {}
        assert "without drift" not in sweep("best")


def test_status_says_that_repeated_layouts_are_tied(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied: Runs = {1: [(1.0, 0), (1.02, 2)], 2: [(1.01, 1), (1.005, 3)]}
    measured_at(tmp_path, monkeypatch, tied)
    (line,) = [one for one in sweep("status").splitlines() if "tied" in one]
    order = re.findall(r"trials? (\d+)(?:, | and )(\d+)", line)
    assert line.startswith("no single winner: trials ")
    assert sorted(order[0]) == ["1", "2"]


def test_a_winner_is_not_said_to_be_tied(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_at(tmp_path, monkeypatch, REPEATED)
    assert "tied" not in sweep("status")


def test_best_says_that_layouts_failed(sweep: Sweep, ids: Filled) -> None:
    (line,) = [one for one in sweep("best").splitlines() if "failed: " in one]
    (failed,) = document(sweep("trials", "--state", "failed", "--json"))["trials"]
    assert failed["trial_id"] == ids.failed
    assert line == "  1 layout of this cell failed: sweep trials tiny --state failed"


def test_best_report_and_notebook_say_by_how_much_the_winner_leads(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.report.notebook import open_store

    measured_at(tmp_path, monkeypatch, REPEATED)
    (found,) = re.findall(
        r"It is (\S+)% faster than trial 2, the next \(95 % interval: (\S+)% to (\S+)%\)",
        sweep("best"),
    )
    margin, low, high = map(float, found)
    # 1.2 s over a mean of 1.0 and 1.01 s; each interval holds the other layout's run too.
    assert margin == pytest.approx(19.4, abs=0.3)
    assert 0 < low < margin < high
    (told,) = document(sweep("best", "--json"))["margins"].values()
    assert told["runner_up"] == 2 and f"{told['value']:.1%}" == f"{found[0]}%"
    said = f"It is {found[0]}% faster than trial 2, the next"
    assert said in sweep("report", "--format", "md")
    assert said in repr(open_store(f"sqlite:///{tmp_path}/runs.sqlite").sweep().best())
    measured_at(tmp_path / "tied", monkeypatch, {1: [(1.0, 0)], 2: [(1.01, 1)]})
    assert "faster than trial" not in sweep("best")
    assert "Trials 1 and 2 differ by 1.0% (95 % interval: -4" in sweep("best")
    measured_at(tmp_path / "alone", monkeypatch, {1: [(1.0, 0)]})
    assert "faster than trial" not in sweep("best")


def test_where_the_machine_drifted_best_shows_the_speeds_that_it_compares(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_at(tmp_path, monkeypatch, SLOW_START)
    found = {b["trial_id"]: b for b in document(sweep("best", "--top", "3", "--json"))["best"]}
    anchor, early = found[1], found[2]
    for trial in found.values():
        assert trial["compared_tokens_per_second_per_gpu"] == pytest.approx(
            1000 / trial["compared_step_seconds"]
        )
        assert trial["compared_relative_confidence"] > 0
    # Measured on the slow machine: corrected, and less sure than its steps and what was repeated.
    assert early["step_seconds_median"] == 1.92
    assert 1.0 < early["compared_step_seconds"] < 1.5
    assert early["compared_relative_confidence"] > 3 * early["relative_confidence"]
    assert early["compared_relative_confidence"] > 3 * anchor["compared_relative_confidence"]
    title, *lines = sweep("best", "--top", "3").splitlines()[1:5]
    assert title.split()[:6] == ["trial", "without", "drift", "±95%", "tokens/s/GPU", "±95%"]
    for line in lines:
        number, rate, sure, *_ = line.split()
        trial = found[int(number)]
        assert rate == f"{trial['compared_tokens_per_second_per_gpu']:,.0f}"
        assert sure == f"±{trial['compared_relative_confidence']:.1%}"


def test_an_interval_as_wide_as_its_number_is_unknown_and_explained(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = {1: [(1.0, 0), (30.0, 10), (1.1, 12), (30.0, 14)], 2: [(1.2, 1)]}
    measured_at(tmp_path, monkeypatch, apart)
    found = document(sweep("best", "--json"))["best"]
    wide = [one["trial_id"] for one in found if one["compared_relative_confidence"] >= 1]
    text = sweep("best")
    rows = {line.split()[0]: line.split()[2] for line in text.splitlines()[2:4]}
    assert wide and {rows[str(trial_id)] for trial_id in wide} == {"unknown"}
    assert "unknown: the speed without drift of trial" in text
    assert "may differ by 100% or more from what is shown; runs of one layout vary by" in text


def test_on_a_quiet_machine_best_compares_what_was_measured(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_at(tmp_path, monkeypatch, ONCE)
    for trial in document(sweep("best", "--top", "3", "--json"))["best"]:
        assert trial["compared_step_seconds"] == pytest.approx(trial["step_seconds_median"])
        # Runs of one layout differ more than the steps of a run.
        assert trial["compared_relative_confidence"] > trial["relative_confidence"]
    (row,) = csv.DictReader(io.StringIO(sweep("best", "--format", "csv")))
    assert float(row["compared_tokens_per_second_per_gpu"]) == pytest.approx(1000.0)


def measured_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    """A store with layouts by micro-batch size; each run has the time that it was measured at."""
    tmp_path.mkdir(exist_ok=True)
    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/runs.sqlite")
    with Store.open(url) as store:
        measure_runs(store, runs)


@pytest.mark.parametrize(
    ("slower", "load", "said"),
    [
        (1.01, NO_LOAD, ""),
        (1.5, NO_LOAD, "; between runs that were not repeated the machine's speed may have "),
        (1.5, BUSY, "; the load of others may have slowed a run by "),
    ],
)
def test_a_tie_of_clearly_different_layouts_has_its_reason(
    slower: float, load: MachineLoad, said: str
) -> None:
    rows: Any = [
        SimpleNamespace(id=1, step_seconds_median=1.0, load=NO_LOAD),
        SimpleNamespace(id=2, step_seconds_median=slower, load=load),
        SimpleNamespace(id=3, step_seconds_median=9.0, load=BUSY),  # not tied
    ]
    verdict: Any = SimpleNamespace(tied=(1, 2), run_sd=0.02)
    why = ranking.why_tied(verdict, rows)
    assert why.startswith(said) and bool(why) == bool(said)


def test_a_result_that_was_disturbed_is_marked_and_says_by_what(sweep: Sweep, ids: Filled) -> None:
    said = "the machine was busy: 1.8 of 2 cores were somebody else's"
    text = sweep("best", "--top", "5")
    line = next(line for line in text.splitlines() if "900" in line)
    assert line.endswith("(disturbed)")
    assert text.count("disturbed") == 1
    assert (
        f"  trial {ids.slower}: {said}; its GPUs were slowed down for 50% of the time"
        " (hw thermal slowdown), at 60% of their clock" in text
    )
    assert said in sweep("best"), "it is tied, so it is shown beside the best one"
    assert [best["trial_id"] for best in document(sweep("best", "--json"))["best"]] == [
        ids.measured
    ]
    shown = sweep("show", str(ids.slower))
    assert (
        said in shown
        and "of 2 cores: its own 0.2, its sweep's 0.0, others' 1.8" in shown
        and "91 °C" in shown
    )
    assert "machine load" not in sweep("show", str(ids.measured))
    found = {trial["trial_id"]: trial for trial in document(sweep("trials", "--json"))["trials"]}
    assert (
        found[ids.slower]["others_cpu_cores"] == 1.8
        and found[ids.measured]["others_cpu_cores"] is None
    )
    (row,) = document(
        sweep(
            "sql",
            "select trial_id, gpu_throttle_reasons from v_trial where others_cpu_cores > 1",
            "--json",
        )
    )["rows"]
    assert row == [ids.slower, "hw_thermal_slowdown, sw_power_cap"]


def test_best_and_trials_come_as_csv_and_markdown(sweep: Sweep, ids: Filled) -> None:
    rows = list(csv.DictReader(io.StringIO(sweep("best", "--format", "csv"))))
    assert [(row["trial_id"], row["tokens_per_second_per_gpu"]) for row in rows] == [
        (str(ids.measured), "1234.5")
    ]
    assert "| 41.0% |" in sweep("best", "--format", "md")
    rows = list(csv.DictReader(io.StringIO(sweep("trials", "--format", "csv"))))
    assert len(rows) == 10
    assert next(row["why"] for row in rows if row["trial_id"] == str(ids.queued)) == f"'{FORMULA}"
    assert next(row["model"] for row in rows if row["trial_id"] == "10") == f"'{FORMULA}"
    assert sweep("trials", "--format", "md").count("\n") == 12


def test_trials_are_filtered_sorted_and_limited(sweep: Sweep, ids: Filled) -> None:
    def listed(*arguments: str) -> list[int]:
        return [
            trial["trial_id"] for trial in document(sweep("trials", *arguments, "--json"))["trials"]
        ]

    assert listed("--state", "failed", "--state", "pruned") == [ids.pruned, ids.failed]
    assert listed("--cell", "llama-tiny_2gpu", "--limit", "2") == [ids.measured, ids.slower]
    assert listed("--sort", "id", "--limit", "1") == [ids.old_conditions]
    assert listed("--sort", "memory", "--limit", "1") == [ids.out_of_memory]
    assert listed("--sort", "updated", "--limit", "1") == [10]
    assert document(sweep("trials", "--limit", "1", "--json"))["num_matching"] == 10
    text = sweep("trials")
    assert f"needs at least the memory of trial {ids.out_of_memory}" in text
    assert "other conditions: fingerprint" in text
    assert "[/bold] [link=x]y" in text
    assert "there are llama-tiny_2gpu" in sweep("trials", "--cell", "nope", code=2)


def test_every_trial_can_be_shown(sweep: Sweep) -> None:
    for trial in range(1, 11):
        assert sweep("show", str(trial)).startswith(f"Trial {trial}: ")
        assert document(sweep("show", str(trial), "--json"))["trial"]["trial_id"] == trial


def test_a_measured_trial_is_shown_with_prediction_conditions_and_evidence(
    sweep: Sweep, ids: Filled
) -> None:
    text = sweep("show", str(ids.measured))
    for part in (
        "best prediction not yet tried",
        "0.89",
        "NVIDIA H100",
        "torch 2.13.0",
        "989 TFLOP/s",
        "IQR 10.0 ms",
        "first step 14 s",
        "of these, compiling 9.5 s",
        "612 W",
    ):
        assert part in text
    attempt = document(sweep("show", str(ids.measured), "--json"))["attempts"][0]
    assert attempt["measurement"]["step_seconds"] == [0.49, 0.5, 0.51]
    assert attempt["fingerprint"]["stack"]["torch"] == "2.13.0"
    assert attempt["phase_seconds"]["first_step"] == 14.0


def test_of_several_runs_show_names_the_one_that_counts(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With an even number of runs, the slower of the two in the middle.
    measured_at(tmp_path, monkeypatch, {1: [(1.0, 0), (1.2, 1), (1.1, 2), (1.3, 3)], 2: [(1.5, 4)]})
    titles = [line for line in sweep("show", "1").splitlines() if line.startswith("Attempt ")]
    assert titles == [
        "Attempt 1: measured; attempt 2 counts, the median of 4 runs",
        "Attempt 2: measured; this one counts, the median of 4 runs",
        "Attempt 3: measured; attempt 2 counts, the median of 4 runs",
        "Attempt 4: measured; attempt 2 counts, the median of 4 runs",
    ]
    assert "Attempt 1: measured\n" in sweep("show", "2")


def test_a_failed_trial_is_shown_with_its_evidence_log_and_last_lines(
    sweep: Sweep, ids: Filled
) -> None:
    text = sweep("show", str(ids.failed))
    for part in (
        "user_error",
        "rank 1, node node-a, phase first_step, step 0",
        str(ids.log),
        "first line",
        "last line",
        "OutOfMemoryError",
    ):
        assert part in text
    assert (
        document(sweep("show", str(ids.failed), "--json"))["attempts"][0]["failure"]["kind"]
        == "user_error"
    )


def test_logs_come_from_the_failure_s_file(sweep: Sweep, ids: Filled) -> None:
    text = sweep("logs", str(ids.failed))
    assert text.startswith("first line\n[/bold] [link=x]y red")
    assert text.endswith("last line\n")
    assert document(sweep("logs", str(ids.failed), "--json"))["from_store"] is False


def test_logs_come_from_the_run_folder_of_this_machine(
    sweep: Sweep, ids: Filled, tmp_path: Path
) -> None:
    folder = (
        tmp_path
        / "home"
        / "runs"
        / ids.run_folder
        / f"trial-{ids.measured}"
        / "attempt-1"
        / "node-1"
    )
    folder.mkdir(parents=True)
    (folder / "log-3.txt").write_text("rank three\n")
    assert sweep("logs", str(ids.measured), "--rank", "3") == "rank three\n"
    assert "no log of rank 0" in sweep("logs", str(ids.measured), code=2)


def test_logs_are_of_the_attempt_whose_numbers_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/sweep.sqlite")
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    with Store.open(url) as store:
        bench = Bench.on(store)
        trial_id = bench.measure()
        start_repeat(store, trial_id, bench.epoch)
        runs = tmp_path / "runs" / store.sweep_named("tiny").run_folder / f"trial-{trial_id}"
    for number, text in ((1, ""), (2, "of the repeat\n")):
        folder = runs / f"attempt-{number}" / "node-0"
        folder.mkdir(parents=True)
        (folder / "log-0.txt").write_text(text)
    assert cli.main(["logs", str(trial_id)]) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert "rank 0 of attempt 1 printed nothing\n" in told.err
    assert "log-0.txt (attempt 1 of 2, whose numbers count)" in told.err
    assert cli.main(["logs", str(trial_id), "--attempt", "2"]) == 0
    told = capsys.readouterr()
    assert told.out == "of the repeat\n"
    assert "log-0.txt (attempt 2 of 2)" in told.err


def test_logs_fall_back_to_what_the_store_keeps(
    sweep: Sweep, ids: Filled, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = ids.log.with_name("moved.txt")
    ids.log.rename(hidden)
    try:
        assert "last line" in sweep("logs", str(ids.failed))
        assert document(sweep("logs", str(ids.failed), "--json"))["from_store"] is True
        assert "no log of rank 0" in sweep("logs", str(ids.failed), "--rank", "0", code=2)
    finally:
        hidden.rename(ids.log)


def test_logs_of_what_never_ran_say_so(sweep: Sweep, ids: Filled) -> None:
    assert "never launched" in sweep("logs", str(ids.queued), code=2)
    assert "has no attempt 4; it has 1" in sweep("logs", str(ids.failed), "--attempt", "4", code=2)


def test_logs_follow_a_running_attempt_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/sweep.sqlite")
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setattr("orchestrator.cli.logs.FOLLOW_SECONDS", 0.05)
    with Store.open(url) as store:
        bench = Bench.on(store)
        trial_id, _ = bench.start()
        log = (
            tmp_path
            / "runs"
            / store.sweep_named("tiny").run_folder
            / f"trial-{trial_id}"
            / "attempt-1"
            / "node-0"
            / "log-0.txt"
        )
        log.parent.mkdir(parents=True)
        log.write_text("one\n")

        def go_on() -> None:
            time.sleep(0.2)
            with log.open("a") as file:
                file.write("two\nhalf")
            store.mark_lost(
                bench.sweep_id, store.acquire(bench.sweep_id, host="b", pid=1, takeover=True)
            )

        other = threading.Thread(target=go_on)
        other.start()
        assert cli.main(["logs", str(trial_id), "-f"]) == 0
        other.join()
    assert capsys.readouterr().out == "one\ntwo\nhalf\n"


def test_sql_answers_in_every_format_and_only_reads(sweep: Sweep, ids: Filled) -> None:
    question = "select trial_id, mfu, why from v_trial where trial_id in (2, 9) order by 1"
    assert FORMULA in sweep("sql", question)
    assert sweep("sql", question, "--format", "csv").splitlines() == [
        "trial_id,mfu,why",
        "2,0.41,best prediction not yet tried",
        f"9,,'{FORMULA}",
    ]
    found = document(sweep("sql", question, "--json"))
    assert (found["columns"], found["rows"][0]) == (
        ["trial_id", "mfu", "why"],
        [2, 0.41, "best prediction not yet tried"],
    )
    assert sweep("sql", question, "--format", "md").count("|\n") == 4
    assert "refused" in sweep("sql", "delete from trial", code=2)
    assert (
        document(sweep("sql", "select 1 from trial", "--max-rows", "3", "--json"))["truncated"]
        is True
    )
    assert "failure_message" in sweep("sql", "select failure_message from v_trial")


def test_rows_wider_than_the_terminal_are_shown_one_column_a_line(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = sweep("sql", "select * from v_best where is_current")
    assert text.startswith("row 1\n  sweep_id ")
    assert max(len(line) for line in text.splitlines()) <= 100


def test_sql_schema_names_the_views_and_their_columns(sweep: Sweep) -> None:
    assert (
        "tokens_per_second_per_gpu"
        in document(sweep("sql", "--schema", "--json"))["views"]["v_best"]
    )
    assert "v_scaling" in sweep("sql", "--schema")
    assert (
        "v_trial,trial_id,number of the trial: what `sweep show` takes"
        in sweep("sql", "--schema", "--format", "csv").splitlines()
    )


def test_sql_runs_a_query_by_its_name_on_one_sweep(sweep: Sweep, ids: Filled) -> None:
    found = document(sweep("sql", "@best", "--json"))
    assert dict(zip(found["columns"], found["rows"][0], strict=True))["trial_id"] == ids.measured
    assert sweep("sql", "@best", "--sweep", "tiny", "--format", "csv").count("\n") == 2
    assert len(document(sweep("sql", "@worst_predictions", "top=1", "--json"))["rows"]) == 1
    assert "did you mean @best" in sweep("sql", "@bets", code=2)
    assert "did you mean 'tiny'" in sweep("sql", "@best", "--sweep", "tinny", code=2)
    assert "did you mean top=" in sweep("sql", "@worst_predictions", "to=1", code=2)
    for extra in (("--sweep", "tiny"), ("top=1",)):
        assert "for a query with a name" in sweep("sql", "select 1", *extra, code=2)


def test_sql_lists_its_queries_with_question_and_parameters(sweep: Sweep) -> None:
    text = sweep("sql", "--list")
    assert "@pareto" in text and "within=: how much slower" in text
    queries = {
        query["name"]: query for query in document(sweep("sql", "--list", "--json"))["queries"]
    }
    assert queries["cost"]["parameters"][0]["name"] == "price"
    assert ",top\n" in sweep("sql", "--list", "--format", "csv")
    assert "give one statement" in sweep("sql", "--list", "select 1", code=2)


def test_export_writes_every_trial_as_csv_json_and_parquet(sweep: Sweep, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    rows = list(csv.DictReader(io.StringIO(sweep("export", "csv"))))
    assert len(rows) == 10
    assert {row["state"] for row in rows} == {state.value for state in TrialState}
    assert not any(cell.startswith(("=", "@")) for row in rows for cell in row.values())
    trials = document(sweep("export", "json"))["trials"]
    assert len(trials) == 10
    assert (trials[1]["confident"], trials[1]["created_at"][-1]) == (True, "Z")
    target = tmp_path / "trials.parquet"
    assert (
        document(sweep("export", "parquet", "--sweep", "tiny", "-o", str(target), "--json"))[
            "num_trials"
        ]
        == 10
    )
    table = parquet.read_table(target)
    assert table.column("tokens_per_second_per_gpu").to_pylist()[1] == 1234.5
    assert "cannot write" in sweep(
        "export", "csv", "-o", str(tmp_path / "no" / "folder.csv"), code=2
    )
    assert not list(tmp_path.glob("*.part"))


def test_export_takes_the_sweep_as_the_other_commands_do(sweep: Sweep) -> None:
    assert (
        sweep("export", "csv", "tiny")
        == sweep("export", "csv", "--sweep", "tiny")
        == sweep("export", "csv", "-o", "-")
    )
    assert "did you mean 'tiny'" in sweep("export", "csv", "tinyy", code=2)
    assert "contradict" in sweep("export", "csv", "tiny", "--sweep", "other", code=2)


def test_parquet_goes_into_a_pipe_and_not_onto_a_terminal(
    sweep: Sweep, database: tuple[str, Filled], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as parquet

    program = (
        "from orchestrator.cli import main; raise SystemExit(main(['export', 'parquet', 'tiny']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        timeout=60,
        check=True,
        env=os.environ | {"SWEEP_DB": database[0]},
    )
    assert parquet.read_table(io.BytesIO(done.stdout)).num_rows == 10
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    assert "not for a terminal" in sweep("export", "parquet", code=2)


def test_rows_and_the_json_document_do_not_share_stdout(sweep: Sweep) -> None:
    assert "cannot both go to stdout" in sweep("export", "csv", "--json", code=2)


def test_export_makes_one_optuna_study_per_cell(sweep: Sweep, tmp_path: Path) -> None:
    import optuna

    storage = f"sqlite:///{tmp_path}/optuna.sqlite"
    found = document(sweep("export", "optuna", "-o", storage, "--json"))
    studies = found["studies"]
    # Two measured, one out of memory, one pruned and one failed by its code. In the other cell one
    # out of memory.
    assert list(studies.values()) == [5, 1]
    left_out = {"measured with another fingerprint than the newest": 1, "not ended": 3}
    assert list(found["left_out"].values()) == [left_out, {}]
    study = optuna.load_study(study_name=next(iter(studies)), storage=storage)
    assert study.best_value == 1234.5
    assert "already" in sweep("export", "optuna", "-o", storage, code=2)


def test_a_sweep_need_not_be_named_where_there_is_one_and_is_the_newest_where_there_are_two(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/two.sqlite")
    with Store.open(url) as store:
        assert "holds no sweep yet" in sweep("best", code=2)
        assert "holds no sweep yet" in sweep("status")
        Bench.on(store, "first").measure()
        Bench.on(store, "second")
        assert "nothing measured yet" in sweep("best")  # of the newest
        assert "did you mean 'first'" in sweep("best", "frist", code=2)
        text = sweep("status")
        assert text.index("second") < text.index("first")
        assert [found["sweep"] for found in document(sweep("status", "--json"))["sweeps"]] == [
            "second",
            "first",
        ]
        assert "1,000" in sweep("best", "first")


def test_postgresql_is_looked_at_in_the_same_way(
    sweep: Sweep, postgresql_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as parquet

    monkeypatch.setenv("SWEEP_DB", postgresql_url)
    with Store.open(postgresql_url) as store:
        ids = fill(store, tmp_path)
        found = document(sweep("status", "--json"))["sweeps"][0]
        assert [r["trial_id"] for r in found["running"]] == [ids.running, ids.launching]
        assert all(0 <= r["seconds"] < 600 for r in found["running"])
        assert [o["trial_id"] for o in document(sweep("best", "--json"))["other_fingerprints"]] == [
            ids.old_conditions
        ]
        assert sweep("show", str(ids.failed)).startswith(f"Trial {ids.failed}: failed")
        assert document(
            sweep(
                "sql", "select mfu, confident, created_at from v_trial where trial_id = 2", "--json"
            )
        )["rows"][0][:2] == [
            0.41,
            True,
        ]
        assert len(sweep("export", "csv").splitlines()) >= 12
        sweep("export", "parquet", "-o", str(tmp_path / "x.parquet"))
        assert parquet.read_table(tmp_path / "x.parquet").num_rows == 10
        assert "only reading is possible" in sweep("sql", "delete from trial", code=2)


def test_looking_makes_no_database(sweep: Sweep, tmp_path: Path) -> None:
    missing = f"sqlite:///{tmp_path}/none/sweep.sqlite"
    for command in (
        ["status"],
        ["best"],
        ["trials"],
        ["show", "1"],
        ["logs", "1"],
        ["sql", "select 1"],
        ["export", "csv"],
        ["cancel"],
    ):
        assert "there is no store at" in sweep(*command, "--db", missing, code=2)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("nonsense", 2),
        ("mysql://me:c4nary@host/db", 2),
        ("sqlite://", 2),
        ("postgresql://me:c4nary%zz@127.0.0.1:1/db?connect_timeout=1", 75),
    ],
)
def test_a_bad_url_is_one_line_without_its_password(
    sweep: Sweep, url: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("db.connection.engine.PATIENCE_SECONDS", 0.2)
    said = sweep("status", "--db", url, code=code)
    assert "c4nary" not in said
    assert said.splitlines()[-1].startswith("error: ")


def test_a_file_that_only_others_may_write_is_read_by_every_command_and_by_a_plan(
    sweep: Sweep, ids: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = (
        ("status",), ("best",), ("trials",), ("show", str(ids.failed)), ("logs", str(ids.failed)),
        ("nodes",), ("sql", "select count(*) from v_trial"), ("export", "csv"),
    )  # fmt: skip
    for command in reading:
        # Imports what it needs, which not everybody may read.
        sweep(*command)
    # Not below tmp_path, which nobody else can enter.
    with tempfile.TemporaryDirectory(prefix="sweep-foreign-") as name:
        folder, url = Path(name), f"sqlite:///{name}/s.sqlite"
        (folder / "logs").mkdir()
        with Store.open(url) as store:
            assert fill(store, folder / "logs").failed == ids.failed
        monkeypatch.setenv("SWEEP_DB", url)
        # Run folders lie in SWEEP_HOME, which is below tmp_path.
        for path, mode in ((folder / "s.sqlite", 0o444), (folder / "logs", 0), (folder, 0o555)):
            path.chmod(mode)
        with tempfile.TemporaryFile("w+") as said:
            pid = os.fork()
            if pid == 0:
                try:
                    if os.geteuid() == 0:
                        os.setgid(65534)
                        os.setuid(65534)
                    with redirect_stderr(said):
                        codes = [cli.main(command) for command in reading]
                        with store_if_any(url) as found:
                            num_sweeps = len(found.sweeps()) if found is not None else 0
                    print(codes, num_sweeps, file=said, flush=True)
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            said.seek(0)
            assert (told := said.read()).endswith(f"{[0] * len(reading)} 1\n"), told
        for path in (folder, folder / "logs"):
            path.chmod(0o755)


def test_a_file_that_is_no_database_is_one_line(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text(
        "this is no database at all, but a longer text than its header needs to be\n" * 20
    )
    assert "not a SQLite database" in sweep(
        "status", "--db", f"sqlite:///{tmp_path}/text.sqlite", code=2
    )


def test_what_does_not_exist_is_named(sweep: Sweep) -> None:
    assert "no trial with id 99" in sweep("show", "99", code=2)
    assert "no trial with id 99" in sweep("logs", "99", code=2)
    assert "did you mean 'tiny'" in sweep("status", "tinny", code=2)


def test_a_thrashing_or_unsure_number_is_marked(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/edge.sqlite")
    edge = {"thrashing": True, "allocator_retries": 7, "confident": False, "mfu": None, "hfu": None}
    with Store.open(url) as store:
        trial_id = Bench.on(store).measure(4, 500.0, **edge)
    text = sweep("best")
    assert "thrashing" in text
    assert "±1.5%?" in text
    assert "7: thrashing at the memory edge" in sweep("show", str(trial_id))


@pytest.mark.parametrize(
    ("num_steps", "relative_confidence", "said"),
    [
        (1, None, "the run reported one number"),
        (5, None, "too few timed steps"),
        (50, 0.2, "the steps varied too much"),
    ],
)
def test_the_question_mark_beside_a_number_says_what_it_stands_for(
    tmp_path: Path,
    sweep: Sweep,
    monkeypatch: pytest.MonkeyPatch,
    num_steps: int,
    relative_confidence: float | None,
    said: str,
) -> None:
    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/unsure.sqlite")
    with Store.open(url) as store:
        unsure_trial(Bench.on(store), 4, num_steps, relative_confidence)
    for command in ("best", "trials"):
        marks = [line for line in sweep(command).splitlines() if line.startswith("?: ")]
        assert len(marks) == 1
        assert said in marks[0]
    assert f"less sure than asked for: {said}" in sweep("show", "1")


def test_of_several_reasons_each_names_its_trials(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/unsure.sqlite")
    with Store.open(url) as store:
        bench = Bench.on(store)
        for micro_batch_size, num_steps in ((1, 1), (2, 5), (4, 4)):
            unsure_trial(bench, micro_batch_size, num_steps, None)
    marks = [line for line in sweep("best", "--top", "3").splitlines() if line.startswith("?: ")]
    named = [line.removeprefix("?: ").partition(": ")[0] for line in sorted(marks)]
    assert named == ["trial 1", "trials 2 and 3"]


def test_numbers_that_cannot_be_true_are_left_out_of_the_best_and_explained(
    tmp_path: Path,
    sweep: Sweep,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/implausible.sqlite")
    reason = "its lines came every 500 ms, and say that a step takes 5 ms"
    with Store.open(url) as store:
        bench = Bench.on(store)
        bench.measure(1, 500.0)
        bench.measure(2, 1000.0, implausible=reason, confident=False)
    best = sweep("best", "--top", "5")
    assert f"Left out, because the numbers cannot be true: trial 2; {reason}" in best
    assert "Trial 1 is the only layout" in best
    assert json.loads(sweep("best", "--json"))["implausible"][0]["trial_id"] == 2
    assert "(cannot be true)" in sweep("trials")
    assert f"?: its numbers cannot be true: {reason}" in sweep("trials")
    assert f"less sure than asked for: its numbers cannot be true: {reason}" in sweep("show", "2")
    assert "1" in sweep("sql", "select trial_id from v_best")
    with Store.open(url) as store:
        marked = next(one for one in store.trials(bench.sweep_id) if one.implausible)
    nothing: Any = SimpleNamespace(step_band=None, step_seconds=None)
    explain_command.print_trial(nothing, marked)
    assert f"These numbers cannot be true: {reason}" in capsys.readouterr().out


def test_times_that_were_not_checked_are_said_below_the_best_and_with_their_trial(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/unchecked.sqlite")
    with Store.open(url) as store:
        bench = Bench.on(store)
        bench.measure(1, 500.0)
        bench.measure(2, 500.0, unchecked="all steps arrived at once")
    said = "The numbers of trial 2 are not fully checked: all steps arrived at once"
    assert said in sweep("best")
    assert said in sweep("trials")
    assert "not fully checked: all steps arrived at once" in sweep("show", "2")
    assert "fully checked" not in sweep("show", "1")
    told = [one["unchecked"] for one in json.loads(sweep("trials", "--json"))["trials"]]
    assert told == [None, "all steps arrived at once"]


def unsure_trial(
    bench: Bench, micro_batch_size: int, num_steps: int, relative_confidence: float | None
) -> None:
    from orchestrator.core.trial.measurement import StepTime

    steps = StepTime(
        median=0.5, iqr=0.0, num_steps=num_steps, relative_confidence=relative_confidence
    )
    bench.measure(micro_batch_size, 500.0 - micro_batch_size, step_time=steps, confident=False)


def test_steps_that_nobody_waited_for_are_told_where_all_counts_as_useful(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.db.builders import fingerprint, measurement

    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/unwaited.sqlite")
    with Store.open(url) as store:
        bench = Bench.on(store)
        # Each held its two GPUs for 2 s; the steps tell of 3 s.
        for micro_batch_size, timed_seconds in (
            (1, 1.0),
            (2, 2.0),
        ):
            trial_id, attempt = bench.start(micro_batch_size)
            told = measurement(step_seconds=(1.0, 1.0, 1.0))
            facts = {"gpu_seconds": 4.0, "timed_seconds": timed_seconds, "warmup_seconds": 0.0}
            record_measurement(
                store,
                trial_id,
                attempt,
                epoch=bench.epoch,
                measurement=told,
                fingerprint=fingerprint(),
                **facts,
            )
    assert "  1 attempt reported more seconds of steps than its GPUs were reserved" in sweep(
        "status", "tiny"
    )
    assert (
        document(sweep("status", "tiny", "--json"))["sweeps"][0]["num_attempts_of_longer_steps"]
        == 1
    )
    assert "the program reported 3.0 s of steps, but its GPUs were reserved for 2.0 s" in sweep(
        "show", "2"
    )
    assert "more than the" not in sweep("show", "1")


def simulation(store: Store, name: str) -> Bench:
    sweep_id = store.ensure_sweep(name, "{}", CONDITIONS | {"workload": "synthetic"})
    epoch = store.acquire(sweep_id, host=socket.gethostname(), pid=os.getpid())
    return Bench(store, sweep_id, store.ensure_cell(sweep_id, cell(), epoch), epoch)


def test_a_simulation_is_not_the_newest_sweep_and_is_found_by_the_name_of_what_it_simulates(
    tmp_path: Path,
    sweep: Sweep,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/simulated.sqlite")
    with Store.open(url) as store:
        simulation(store, "big-simulated").measure(tokens_per_second_per_gpu=7777.0)
        assert "7,777" in sweep("best")  # where there is no other
        Bench.on(store, "first").measure(tokens_per_second_per_gpu=1111.0)
        simulation(store, "first-simulated").measure(tokens_per_second_per_gpu=8888.0)
        assert "1,111" in sweep("best")
        assert "1,111" in sweep("best", "first")
        assert "8,888" in sweep("best", "first-simulated")
        capsys.readouterr()
        assert cli.main(["status", "big"]) == 0
        out, err = capsys.readouterr()
        assert "Sweep big-simulated" in out
        assert "there is no sweep big; this is big-simulated: simulated" in err


def test_export_takes_the_newest_sweep_in_every_format_says_which_and_all_only_when_asked(
    tmp_path: Path,
    sweep: Sweep,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/exported.sqlite")
    with Store.open(url) as store:
        Bench.on(store, "first").measure()
        Bench.on(store, "second").measure(2)
    for target in ("csv", "json", "parquet"):
        capsys.readouterr()
        assert cli.main(["export", target, "-o", str(tmp_path / target)]) == 0
        assert f"1 trial of sweep second written to {tmp_path / target}" in capsys.readouterr().err
    optuna = document(sweep("export", "optuna", "-o", f"sqlite:///{tmp_path}/one.sqlite", "--json"))
    assert (optuna["sweep"], len(optuna["studies"])) == ("second", 1)
    assert {trial["sweep"] for trial in document(sweep("export", "json", "--all"))["trials"]} == {
        "first",
        "second",
    }
    everything = document(
        sweep("export", "optuna", "--all", "-o", f"sqlite:///{tmp_path}/all.sqlite", "--json")
    )
    assert (everything["sweep"], len(everything["studies"])) == (None, 2)
    assert "contradict" in sweep("export", "csv", "first", "--all", code=2)


def test_where_the_machine_drifted_list_and_status_name_what_best_names(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_at(tmp_path, monkeypatch, SLOW_END)
    best = document(sweep("best", "--json"))["best"][0]
    assert best["tokens_per_second_per_gpu"] == pytest.approx(1000 / 1.2)
    (listed,) = document(sweep("list", "--json"))["sweeps"]
    (cell_of_status,) = document(sweep("status", "--json"))["sweeps"][0]["cells"]
    speed = best["tokens_per_second_per_gpu"]
    assert listed["fastest_best_tokens_per_second_per_gpu"] == speed
    assert listed["slowest_best_tokens_per_second_per_gpu"] == speed
    assert cell_of_status["best"]["trial_id"] == best["trial_id"]
