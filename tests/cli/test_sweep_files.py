"""The commands that read a sweep file, called in this process; `sweep run`: tests/acceptance."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from orchestrator import cli
from orchestrator.cli import sweep_file
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.core.search.proposer import FAILS_UNTIL_KNOWN
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.fingerprint import Fingerprint, Stack
from orchestrator.core.trial.limits import COMPILE_SECONDS
from orchestrator.core.trial.protocol import Device
from orchestrator.node import gpu_monitor
from tests.db.builders import Bench, begin_trial, measurement, record_measurement

CPU = Fingerprint(orchestrator_version="0", stack=Stack(device_name="Some CPU"))

SPEC = {
    "name": "priced",
    "model": "llama-3.1-8b",
    "gpus": 8,
    "gpus_per_node": 8,
    "device": "h200",
    "sequence_length": 4096,
    "global_batch_size": 64,
    "axes": {"micro_batch_size": [1, 2], "recompute": ["full"]},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "priced.yaml"
    path.write_text(json.dumps(SPEC))
    return path


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def cost(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(planned(capsys, *arguments, "--json"))["cost"]
    return found


def test_a_plan_says_what_its_dollars_rest_on(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = cost(capsys, file)
    assert listed["price_per_gpu_hour"] == DEVICES["h200"].price_per_hour
    assert listed["dollars"] == pytest.approx(listed["gpu_hours"] * listed["price_per_gpu_hour"])
    assert "typical list price of h200" in planned(capsys, file)


def test_the_price_in_the_sweep_file_goes_before_the_list(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = cost(capsys, file, "price_per_gpu_hour=2.5")
    assert own["dollars"] == pytest.approx(own["gpu_hours"] * 2.5)
    assert "$2.50 a GPU-hour: price_per_gpu_hour of the sweep file" in planned(
        capsys, file, "price_per_gpu_hour=2.5"
    )


def test_a_plan_says_what_the_tightest_budget_leaves(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = cost(capsys, file, "price_per_gpu_hour=2.5")
    assert (
        whole["budget_limit"],
        whole["budget_gpu_hours_left"],
        whole["num_trials_within_budget"],
    ) == (None, None, whole["num_trials"])
    half = whole["gpu_hours"] / 2
    limits = [
        "price_per_gpu_hour=2.5",
        f"search.max_cost={half * 2.5}",
        f"search.max_gpu_hours={half * 3}",
    ]
    found = cost(capsys, file, *limits)
    assert (found["budget_limit"], found["budget_gpu_hours_left"]) == (
        "max_cost",
        pytest.approx(half),
    )
    assert (found["gpu_hours"], found["dollars"]) == (
        pytest.approx(half),
        pytest.approx(half * 2.5),
    )
    assert found["num_trials_within_budget"] == whole["num_trials"] // 2
    text = planned(capsys, file, *limits, "search.max_wall_time=2h")
    assert "search.max_cost leaves" in text
    assert f"about {whole['num_trials'] // 2} of {whole['num_trials']} trials" in text
    assert "search.max_wall_time ends each call after 2 h 00 min" in text


def test_what_the_sweep_has_reserved_already_is_not_left_of_its_budget(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/sweep.sqlite"
    with Store.open(url) as store:
        Bench.on(store, "priced").measure()  # 4 GPU-seconds
    found = cost(capsys, file, "search.max_gpu_hours=0.5", "--db", url)
    assert found["reserved_gpu_hours"] == pytest.approx(4 / 3600)
    assert found["budget_gpu_hours_left"] == pytest.approx(0.5 - 4 / 3600)
    assert "(0.0011 already reserved)" in planned(
        capsys, file, "search.max_gpu_hours=0.5", "--db", url
    )


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_limit_of_money_without_a_price_is_refused_at_the_door(
    file: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert cli.main([command, str(file), "device=h800", "search.max_cost=5"]) == 2
    assert (
        "search.max_cost: device h800 has no list price; give price_per_gpu_hour"
        in capsys.readouterr().err
    )
    # There is no GPU here that would tell.
    assert cli.main([command, str(file), "device=auto", "search.max_cost=5"]) == 2
    assert "the price of device auto is unknown here" in capsys.readouterr().err


def test_what_is_not_predicted_has_no_price(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cost(capsys, file, "device=cpu", "price_per_gpu_hour=2.5")["dollars"] is None
    text = planned(capsys, file, "device=cpu")
    assert "$" not in text
    assert "cores have no data sheet" in text
    # A device to name would be another one.
    assert "h100-sxm" not in text


def test_a_plan_shows_bands_and_how_many_layouts_are_expected_to_fail(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = json.loads(planned(capsys, file, "--json"))["cells"]
    text = planned(capsys, file)
    titles = r"tokens/s/GPU +4 of 5 within +GiB of 139\.7 +4 of 5 within +OOM +fails "
    assert re.search(titles, text)
    for best in row["best"]:
        rate, seconds = best["predicted_tokens_per_second_per_gpu"], best["predicted_step_seconds"]
        fastest, slowest = (rate * seconds / time for time in best["step_seconds_band"])
        assert slowest < rate < fastest
        size = best["predicted_memory_bytes"] / 2**30
        least, most = (bound / 2**30 for bound in best["memory_bytes_band"])
        assert least < size < most
        oom, other = best["probability_of_out_of_memory"], best["probability_of_another_failure"]
        # Nothing has failed yet: the usual share of those that fit.
        assert other == pytest.approx(FAILS_UNTIL_KNOWN * (1 - oom))
        cells = [f"{rate:,.0f}", f"{slowest:,.0f} - {fastest:,.0f}"]
        cells += [f"{size:.1f}", f"{least:.1f} - {most:.1f}", f"{oom:.0%}", f"{other:.0%}"]
        assert re.search(f"{best['short']} +{' +'.join(cells)} ", text), cells
    assert (len(row["best"]), row["num_to_run"]) == (2, 2)
    oom, other = (
        sum(best[f"probability_of_{kind}"] for best in row["best"])
        for kind in ("out_of_memory", "another_failure")
    )
    assert f"if all run: {oom:.1f} out of memory, {other:.1f} for another reason" in text
    assert "if all run: 0.2 for another reason" in planned(capsys, file, "device=cpu")


@pytest.mark.parametrize("price", ["0", "-1", "free", ".nan"])
def test_a_price_is_a_positive_number(
    file: Path, price: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(file), f"price_per_gpu_hour={price}"]) == 2
    assert "price_per_gpu_hour" in capsys.readouterr().err


def test_where_no_layout_is_legal_that_is_said_before_anything_is_started(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", f"sqlite:///{tmp_path}/none.sqlite")
    assert cli.main(["run", str(file), "device=cpu", "gpus=1", "axes.recompute=full:999"]) == 2
    said = capsys.readouterr().err
    assert "no layout is legal in any cell" in said
    assert re.search(r": of [\d,]+ layouts?, recomputes more than the model's \d+ layers", said)
    assert not (tmp_path / "none.sqlite").exists()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has GPUs")
def test_more_cores_than_there_are_and_a_batch_too_small_for_them_are_said_together(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert cli.main(["run", str(file), "device=cpu", "gpus=64", "global_batch_size=8"]) == 2
    said = capsys.readouterr().err
    assert "here is 1 node with 2 cores" in said
    assert "a global batch of 8 cannot be split over 64 replicas" in said


def test_a_bound_is_refused_where_the_strategy_expects_nothing(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(file), "search.bound=0.01", "search.strategy=random"]) == 2
    assert "search.bound: strategy random predicts no gain of a layout" in capsys.readouterr().err


# -- time limits --

LARGE = [
    "workload=synthetic",
    "model=llama-3.1-70b",
    "gpus=16",
    "global_batch_size=256",
    "axes.tensor_parallel_size=8",
    "axes.pipeline_parallel_size=2",
]


def test_a_plan_warns_of_a_number_that_a_predicted_step_comes_near(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = planned(capsys, file, *LARGE, "measurement.limits.steady=60")
    assert re.search(
        r"llama-3\.1-70b_16gpu_s4096_gb256: measurement\.limits\.steady is 1 min 00 s,"
        r" and a step of tp8 pp2 mbs\d ga\d+ full\S* bf16 is predicted to take [\d.]+ s"
        r" and may well take [\d.]+ s \(and 1 more of 2 layouts that should fit\): they may end as"
        r" hung\."
        r" Write auto, or at least \d{3,} seconds",
        " ".join(text.split()).replace("dp1 ", ""),
    ), text
    (cell,) = json.loads(planned(capsys, file, *LARGE, "measurement.limits.steady=60", "--json"))[
        "cells"
    ]
    assert len(cell["limit_warnings"]) == 1


@pytest.mark.parametrize("limits", ["steady=auto", "steady=1h", "start=1", "teardown=1"])
def test_a_plan_warns_of_no_other_limit(
    file: Path, limits: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (cell,) = json.loads(planned(capsys, file, *LARGE, f"measurement.limits.{limits}", "--json"))[
        "cells"
    ]
    assert cell["limit_warnings"] == []


def test_no_minutes_of_compilation_are_added_to_a_limit_on_cores(file: Path) -> None:
    on_gpus = sweep_file.planning(sweep_file.load(file, ["measurement.limits.first_step=1"]), None)
    (cell,) = on_gpus.spec.cells()
    planned = on_gpus.plan(cell)
    on_cores = replace(
        on_gpus,
        spec=on_gpus.spec.model_copy(update={"device": "auto"}),
        knowledge=replace(on_gpus.knowledge, device=Device.CPU),
    )
    advised = [
        int(line.split()[-2])
        for known in (on_gpus, on_cores)
        for line in sweep_file.cell_limit_warnings(known, planned)
    ]
    assert advised[0] - advised[1] == COMPILE_SECONDS


def test_a_plan_names_a_gpu_without_a_data_sheet_as_its_driver_does(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_monitor, "device_name", lambda: "Some GPU")
    document = json.loads(planned(capsys, file, "device=auto", "--json"))
    assert document["device"] == "Some GPU"
    assert not document["cells"][0]["on_cores"]


def test_validate_warns_as_well(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["validate", str(file), *LARGE, "measurement.limits={first_step: 60, total: 10min}"]
    assert cli.main(arguments) == 0
    told = capsys.readouterr().err
    assert (
        "warning: llama-3.1-70b_16gpu_s4096_gb256: measurement.limits.first_step is 1 min 00 s"
        in told
    )
    assert "measurement.limits.total is 10 min 00 s" in told
    assert cli.main([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == 2


def test_a_cell_that_hangs_is_told_at_the_end_in_the_exit_code_and_in_the_status(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setenv("SWEEP_DB", f"sqlite:///{tmp_path}/s.sqlite")
    slow = ["model=[llama-3.1-8b, llama-3.1-70b]", "gpus=16", "global_batch_size=256",
            "axes.tensor_parallel_size=8", "axes.pipeline_parallel_size=[1, 2]",
            "axes.zero_stage=[0, 1]", "axes.micro_batch_size=[1, 2, 4]",
            "search.confirm.repeats=0"]  # fmt: skip
    assert cli.main(["run", str(file), *slow, "measurement.limits.steady=30", "--simulate"]) == 4
    told = capsys.readouterr().err
    assert (
        "llama-3.1-70b_16gpu_s4096_gb256 was stopped: its attempts failed again and again" in told
    )
    assert (
        "steady limit of 30 s passed without a new step after step 2 (measurement.limits.steady of"
        " the sweep file" in told
    )
    assert cli.main(["status", "priced-simulated"]) == 0
    assert (
        "stopped (every layout is known; its attempts failed again and again)"
        in capsys.readouterr().out
    )
    assert cli.main(["run", str(file), *slow, "--simulate", "-q"]) == 0, (
        "without the number the same sweep goes on, and measures it"
    )


COMMAND = {
    "device": "cpu",
    "workload": {"name": "command", "options": {"argv": ["train", "{micro_batch_size}"]}},
}


def full(micro_batch_size: int) -> Layout:
    """A layout of the file."""
    return Layout(
        data_parallel_size=8,
        micro_batch_size=micro_batch_size,
        grad_accum_steps=8 // micro_batch_size,
        recompute=Recompute.parse("full"),
    )


def command_sweep(file: Path, store: Store, **changes: Any) -> tuple[Bench, SweepSpec]:
    """The sweep of the file with a program of one's own, and the same in the store."""
    file.write_text(json.dumps({**SPEC, **COMMAND, **changes}))
    spec = SweepSpec.model_validate(json.loads(file.read_text()))
    sweep_id = store.ensure_sweep(spec.name, spec.model_dump_json(), spec.conditions())
    epoch = store.acquire(sweep_id, host="here", pid=1)
    return Bench(store, sweep_id, store.ensure_cell(sweep_id, spec.cells()[0], epoch), epoch), spec


def test_where_trials_ran_that_do_not_tell_the_device_that_is_said_and_not_that_none_ran(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/own.sqlite")
    wanted = full(1)
    with Store.open(url) as store:
        bench, _ = command_sweep(file, store)
        assert cli.main(["explain", str(file), "mbs=1"]) == 0
        assert (
            "cores have no data sheet, and nothing of this workload was measured on them yet: have"
            " the program write peak_flops" in capsys.readouterr().out
        )
        trial_id, attempt = begin_trial(
            store, bench.cell_id, wanted, epoch=bench.epoch, nodes=["here"]
        )
        told = measurement(mfu=None, hfu=None, peak_flops=None, peak_flops_source=None)
        record_measurement(
            store,
            trial_id,
            attempt,
            epoch=bench.epoch,
            measurement=told,
            fingerprint=CPU,
            gpu_seconds=8.0,
        )
    for arguments in (["explain", str(file), "mbs=1"], ["calibration"]):
        assert cli.main(arguments) == 0
        said = capsys.readouterr().out
        assert (
            "1 trial of this workload ran on them, and none says how fast they are: have the"
            " program write peak_flops" in said
        )
        assert "nothing" not in said


def test_a_plan_counts_what_earlier_calls_left(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", url := f"sqlite:///{tmp_path}/own.sqlite")

    def left(*overrides: str) -> tuple[int, int]:
        (found,) = json.loads(planned(capsys, file, *overrides, "--json"))["cells"]
        return found["num_done"], found["num_to_run"]

    assert left() == (0, 2)
    with Store.open(url) as store:
        spec = SweepSpec.model_validate(SPEC)
        sweep_id = store.ensure_sweep(spec.name, spec.model_dump_json(), spec.conditions())
        epoch = store.acquire(sweep_id, host="here", pid=1)
        bench = Bench(store, sweep_id, store.ensure_cell(sweep_id, spec.cells()[0], epoch), epoch)
        for micro_batch_size in (1, 2):
            known = full(micro_batch_size)
            trial_id, attempt = begin_trial(
                store, bench.cell_id, known, epoch=epoch, nodes=["here"]
            )
            record_measurement(
                store,
                trial_id,
                attempt,
                epoch=epoch,
                measurement=measurement(),
                fingerprint=CPU,
                gpu_seconds=8.0,
            )
            assert left() == (micro_batch_size, 2 - micro_batch_size)
            assert left("search.max_trials=1") == (micro_batch_size, 0)
    assert "known 2, left to run 0" in planned(capsys, file)
    assert left("axes.micro_batch_size=[2, 4]") == (1, 1), (
        "one of the two that are known is no candidate any more"
    )
    both = json.loads(planned(capsys, file, "gpus=[8, 16]", "--json"))
    assert [cell["num_to_run"] for cell in both["cells"]] == [0, 2]
    assert both["cost"]["gpu_hours"] == both["cells"][1]["gpu_hours"] > 0, (
        "a cell that is finished costs nothing, and hides no other's cost"
    )


def test_what_is_to_change_for_a_layout_to_fit_reads_as_from_and_to(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(
        json.dumps(SPEC | {"axes": {"micro_batch_size": [1, 8], "recompute": ["none", "full"]}})
    )
    assert cli.main(["explain", str(file), "mbs=8", "recompute=none"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"To fit: .*mbs 8 -> 1", said), said
    assert " > " not in said


def test_sizes_of_messages_that_no_line_can_be_told_from_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", f"sqlite:///{tmp_path}/none.sqlite")
    assert cli.main(["netbench", "--max-bytes", "4096"]) == 2
    said = capsys.readouterr().err
    assert "2 sizes (1024, 4096 bytes)" in said
    assert "--max-bytes 16384 at least" in said
    assert not list(tmp_path.glob("*.sqlite"))


def test_a_cell_that_a_budget_did_not_reach_is_said_and_is_exit_code_4(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SWEEP_DB", f"sqlite:///{tmp_path}/sweep.db")
    short = ["run", str(file), "--simulate", "--quiet", "sequence_length=[2048,4096]"]
    assert cli.main([*short, "search.max_wall_time=20"]) == 4
    said = capsys.readouterr().err
    assert (
        "Nothing was measured for llama-3.1-8b_8gpu_s4096_gb64: max_wall_time reached before its"
        " first trial." in said
    )
    assert cli.main([*short, "search.max_wall_time=20"]) == 0  # the next call begins with it


def test_where_the_machine_drifted_status_names_the_layout_that_best_names(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest by its numbers was measured while the machine was faster."""
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setenv("SWEEP_DB", f"sqlite:///{tmp_path}/s.sqlite")
    drift = [{"kind": "step", "size": 0.33, "seconds": 697.6}]
    axes = {
        "micro_batch_size": [1, 2, 4, 8],
        "zero_stage": [1],
        "recompute": ["none", "selective_attention", "selective_ops", "full"],
    }
    workload = {"name": "synthetic", "options": {"drift": drift}}
    content = SPEC | {
        "model": "llama-3.2-1b",
        "global_batch_size": 128,
        "device": "h100-sxm",
        "axes": axes,
        "workload": workload,
    }
    file.write_text(json.dumps(content | {"search": {"seed": 9}}))
    assert cli.main(["run", str(file), "--simulate", "-q"]) == 0
    shown = capsys.readouterr().out

    def answer(*arguments: str) -> dict[str, Any]:
        assert cli.main([*arguments, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    best = answer("best", "priced-simulated")["best"][0]["trial_id"]
    assert answer("status", "priced-simulated")["sweeps"][0]["cells"][0]["best"]["trial_id"] == best
    assert answer("sql", "select trial_id from v_best where is_current")["rows"] != [[best]]
    assert "The order is that of speeds without drift and the load of others" in shown
    assert "without drift" in shown.splitlines()[1]  # the column that they are in
    assert cli.main(["report", "priced-simulated", "--format", "md"]) == 0
    page = capsys.readouterr().out
    titles, _, first = [line for line in page.splitlines() if line.startswith("|")][:3]
    assert titles.startswith("| trial | without drift | ±95% | tokens/s/GPU |")
    assert first.startswith(f"| {best} |")
    assert "- The order is that of speeds without drift and the load of others" in page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"argv": ["no-such-program"]}, "no-such-program"),
        ({"argv": ["/bin/sh", "no-such.sh"], "cwd": "/"}, "no-such.sh"),
        ({"argv": ["/bin/true"], "cwd": "/no/such/folder"}, "/no/such/folder"),
        ({"argv": ["/bin/true"]}, ""),
    ],
)
def test_validate_warns_of_a_program_that_is_not_on_this_machine(
    options: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be on another, for which the file is meant."""
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({**SPEC, "workload": {"name": "command", "options": options}}))
    assert cli.main(["validate", str(path), "--json"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert len(warnings) == bool(said)
    assert all("on this machine" in one and said in one for one in warnings)


def test_validate_warns_of_a_value_that_may_not_reach_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = tmp_path / "train.py", tmp_path / "mine.yaml"
    script.write_text("print()")
    options = {"argv": ["python3", str(script), "{grad_accum_steps}"]}
    axes = {"micro_batch_size": [1, 2], "recompute": ["none"]}
    workload = {"name": "command", "options": options}
    path.write_text(json.dumps({**SPEC, "axes": axes, "workload": workload}))
    assert cli.main(["validate", str(path)]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: micro_batch_size may not reach the program: it varies")
    # A run says the same before it opens its store, and a simulation starts no program.
    run = ["run", str(path), "--db", "mysql://nowhere/at-all", "gpus=1"]
    for options, is_said in ((["device=cpu"], True), (["--simulate"], False)):
        assert cli.main([*run, *options]) == 2
        said = capsys.readouterr().err
        assert "database 'mysql' is not supported" in said
        assert (warning in said.splitlines()) is is_said


def test_validate_warns_if_no_layout_is_legal(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", str(file), "gpus=3", "axes.data_parallel_size=[2]"]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(
        "warning: `sweep run` would refuse it: no layout is legal in any cell"
    )


@pytest.mark.parametrize("name", ["8b", "playbook", "quickstart"])
def test_no_limit_of_our_own_files_is_near_what_it_limits(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(__file__).parents[2] / "sweeps" / f"{name}.yaml"
    assert cli.main(["validate", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
