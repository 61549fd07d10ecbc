"""The benchmark of the search on a small table of our own, in every mode."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import search_efficiency, search_problem
from orchestrator.core.physics.trainer import TRAINERS, Trainer
from orchestrator.core.pretend.replay import read_table

MODEL = {
    "model": "ours-1B",
    "n_params": 1.1e9,
    "layers": 16,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 16,
    "ffn": 5504,
    "vocab": 32000,
    "tied_embeddings": "True",
}


def rows(table_id: str, *, fits: bool = True) -> list[dict[str, Any]]:
    """16 layouts on 8 GPUs with two kernels, of which the second is a third faster.

    Large micro-batches run out of memory, and one layout crashes.
    """
    found = []
    for tp in (1, 2):
        for mbs in (1, 2, 4, 8):
            for kernel in ("plain", "fused"):
                seconds = (
                    (4.0 + 1.0 / mbs)
                    * (1.2 if tp == 2 else 1.0)
                    * (1.0 if kernel == "fused" else 1.33)
                )
                memory = 20 + 8 * mbs / tp
                status = (
                    "oom"
                    if memory > 60 or not fits
                    else "error"
                    if (tp, mbs, kernel) == (2, 8, "plain")
                    else "ok"
                )
                found.append(
                    MODEL
                    | {
                        "table_id": table_id, "hardware": "A100-80GB",
                        "gpu_mem_gb": 80 if fits else 4, "n_gpus": 8, "gpus_per_node": 8,
                        "seq_len": 2048, "gbs": 128, "dp": 8 // tp, "tp": tp, "pp": 1, "cp": 1,
                        "mbs": mbs, "grad_acc": 128 * tp // (8 * mbs), "recompute": "none",
                        "zero_stage": 1, "precision": "bf16", "attention_kernel": kernel,
                        "status": status, "peak_mem_kind": "torch GiB", "replay": "True",
                        "step_time_s": seconds if status == "ok" else "",
                        "tokens_per_s_per_gpu": 128 * 2048 / 8 / seconds if status == "ok" else "",
                        "peak_mem_gb": memory if status == "ok" else "",
                    }
                )  # fmt: skip
    return found


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    folder = tmp_path / "tables"
    folder.mkdir()
    with (folder / "ours.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows("one")[0]))
        writer.writeheader()
        writer.writerows(rows("one") + rows("another") + rows("none", fits=False))
        duplicate = rows("one")[0] | {"tokens_per_s_per_gpu": 1e9, "replay": "False"}
        writer.writerow(duplicate)
    return folder


def measure(monkeypatch: pytest.MonkeyPatch, tables: Path, options: str) -> dict[str, Any]:
    out = tables.parent / "result.json"
    arguments = ["search_efficiency", "--tables", str(tables), "--out", str(out), *options.split()]
    monkeypatch.setattr(sys, "argv", arguments)
    search_efficiency.main()
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("mode", ["cold", "warm", "blind"])
def test_every_method_finds_the_best_row_and_is_charged_for_failed_launches(
    monkeypatch: pytest.MonkeyPatch, tables: Path, mode: str
) -> None:
    result = measure(
        monkeypatch,
        tables,
        f"--methods auto,tpe:1,random:3,heuristic --seeds 2 --mode {mode} --table [oa]*",
    )
    assert result["summary"]["auto"]["problems"] == 2
    for method, seeds in (("auto", 2), ("tpe", 1), ("random", 3), ("heuristic", 2)):
        one = result["problems"][method]["one/8gpu_gb128"]
        assert (one["rows"], one["seeds"]) == (16, seeds)
        assert 1 <= one["launches_to_5_percent"]["median"] <= 16
        assert one["launches_to_1_percent"]["median"] >= one["launches_to_5_percent"]["median"]
        assert one["gpu_seconds"] >= 8 * 60
        curve = result["summary"][method]["best_after"]
        assert curve == sorted(curve)
        assert curve[-1] >= 0.99
    auto = result["problems"]["auto"]["one/8gpu_gb128"]
    assert ("auc_cold" in auto) == (mode != "blind")
    if mode != "blind":
        assert result["summary"]["auto"]["launches_to_5_percent"]["median"] <= 5
        # Layouts run out of memory by their micro-batch alone, which no prediction misses.
        assert auto["auc_cold"] > 0.9
    picture = tables.parent / "picture.svg"
    # Here, because matplotlib costs a second in each process that collects tests.
    from benchmarks import search_picture

    result_file = str(tables.parent / "result.json")
    monkeypatch.setattr(sys, "argv", ["search_picture", result_file, "--out", str(picture)])
    search_picture.main()
    assert all(
        name in picture.read_text(encoding="utf-8")
        for name in ("auto", "tpe", "random", "heuristic", mode)
    )


def test_a_file_that_is_not_a_table_of_runs_is_skipped_and_named(
    monkeypatch: pytest.MonkeyPatch, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tables / "another.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    (tables / "binary.csv").write_bytes(b"\x80\x81")
    result = measure(monkeypatch, tables, "--methods heuristic --seeds 1 --table one another")
    assert set(result["problems"]["heuristic"]) == {"one/8gpu_gb128", "another/8gpu_gb128"}
    skipped = capsys.readouterr().err
    assert "skipped another.csv: line 1: no column table_id, hardware, n_gpus, status" in skipped
    assert "skipped binary.csv: " in skipped


def test_tables_are_named_together_or_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tables: Path
) -> None:
    methods = "--methods heuristic --seeds 1"
    together = measure(monkeypatch, tables, f"{methods} --table one another")
    apart = measure(monkeypatch, tables, f"{methods} --table one --table another")
    assert together["problems"] == apart["problems"]


def test_launches_until_nothing_fits_is_declared_are_counted(
    monkeypatch: pytest.MonkeyPatch, tables: Path
) -> None:
    result = measure(monkeypatch, tables, "--methods auto,random --seeds 1 --table none")
    assert result["summary"]["auto"]["problems"] == 0
    launches = result["problems"]["auto"]["none/8gpu_gb128"]["nothing_fits"]
    assert launches <= 6
    assert result["summary"]["auto"]["nothing_fits"] == {"problems": 1, "launches": launches}


def test_a_search_without_a_reason_gains_nothing_from_the_order_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tables: Path
) -> None:
    """Files are sorted by speed.

    A blind search that takes the first row of a tie would always begin with the best one.
    """
    path = tables / "ours.csv"
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    reverse = [
        header,
        *sorted(lines, key=lambda line: float(line.split(",")[-2] or 0), reverse=True),
    ]
    firsts = []
    for text in ([header, *lines], reverse):
        path.write_text("\n".join(text), encoding="utf-8")
        problem = search_problem.read_problems(tables, ["one"])[0]
        firsts.append({problem.shuffled(seed).layouts[0] for seed in range(20)})
    assert all(len(layouts) > 5 for layouts in firsts)


def test_the_command_in_the_result_names_no_folder_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tables: Path
) -> None:
    options = f"--methods random --seeds 1 --table one --warm={tables}"
    command = measure(monkeypatch, tables, options)["command"]
    assert "--tables DIR " in command
    assert "--warm=DIR" in command
    assert str(tables) not in command.partition("--out")[0] + command.partition("--methods")[2]


def test_the_trainer_is_that_of_the_generated_sweep_file_or_the_plain_one(tables: Path) -> None:
    path = tables / "ours.csv"
    path.write_text(
        path.read_text(encoding="utf-8").replace(",bf16,", ",bf16(fp32 grad accum),"),
        encoding="utf-8",
    )
    (named,) = search_problem.read_problems(tables, ["one"])
    (plain,) = search_problem.read_problems(tables, ["one"], trainer="llama")
    (wrong,) = search_problem.read_problems(tables, ["one"], trainer="wrong")
    table = read_table(path.read_text(encoding="utf-8"), "one")
    assert table.sweep(name=None, path="t.csv")["trainer"] == named.profile == "nanotron"
    assert (named.trainer, plain.trainer) == (TRAINERS["nanotron"], Trainer())
    assert wrong.profile in set(TRAINERS) - {"llama", "nanotron", "nanotron-early"}


def test_larger_problems_are_searched_with_what_smaller_ones_of_the_model_showed(
    monkeypatch: pytest.MonkeyPatch, tables: Path
) -> None:
    # Twice the GPUs and twice the batch: twice the replicas of each layout.
    doubled = [
        row | {"table_id": "large", "n_gpus": 16, "gbs": 256, "dp": 2 * row["dp"]}
        for row in rows("one")
    ]
    with (tables / "large.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(doubled[0]))
        writer.writeheader()
        writer.writerows(doubled)
    options = "--methods auto --seeds 1 --mode warm --warm-gpus 8 --table one another large"
    result = measure(monkeypatch, tables, options)
    assert set(result["problems"]["auto"]) == {"large/16gpu_gb256"}
    assert result["summary"]["auto"]["launches_to_5_percent"]["median"] <= 2


def test_the_same_problem_under_another_id_is_not_a_relative(tables: Path) -> None:
    one, another = (search_problem.read_problems(tables, [name])[0] for name in ("one", "another"))
    assert search_problem.calibration_of(one, [one, another]) is None


def test_an_unknown_method_or_table_is_refused(
    monkeypatch: pytest.MonkeyPatch, tables: Path
) -> None:
    with pytest.raises(SystemExit):
        measure(monkeypatch, tables, "--methods magic")
    with pytest.raises(SystemExit):
        measure(monkeypatch, tables, "--table absent")
