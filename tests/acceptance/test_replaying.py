"""A search without a GPU: `sweep replay`, `sweep run` on the file that it writes, and Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import measured_table
from tests.acceptance.command import Command, CommandHere

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]
BEST = "dp8_tp1_pp1_cp1_mbs2_ga2_none_z1_bf16-attention_kernel=flash"
BEST_SPEED = 32 * 4096 / 4.4 / 8


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "runs.csv"
    file.write_text(measured_table.text())
    return file


def test_a_table_is_searched_and_told_like_any_sweep(
    here: CommandHere, table: Path, tmp_path: Path
) -> None:
    told = here.ok(
        "replay", table, "--table", "formula-8gpu", "search.max_trials=12", "search.seed=3"
    )
    assert "attention_kernel=flash" in told.stdout
    (best,) = here.json("best", "replay-formula-8gpu")["best"][:1]
    assert best["options"]["attention_kernel"] in ("flash", "eager")
    attempts = here.sql("select count(*) from attempt")
    assert attempts == [[12]]

    file = tmp_path / "mine.yaml"
    file.write_text(here.ok("replay", table, "--table", "formula-8gpu", "--file").stdout)
    # Goes on: the same sweep without the bound.
    here.ok("run", file, "-q")
    (best,) = here.json("best", "replay-formula-8gpu")["best"][:1]
    assert best["layout"] == BEST
    assert best["tokens_per_second_per_gpu"] == pytest.approx(BEST_SPEED)
    assert here.sql(
        "select count(*) from v_trial where options ->> 'attention_kernel' = 'flash'"
    ) == [[10]]
    assert "not in the table" in here.ok("plan", file).stdout
    table.write_text(
        measured_table.text(
            {**measured_table.rows()[0], "mbs": "4", "grad_acc": "1", "step_time_s": "4.0"}
        )
    )
    # What a table has gained is searched too.
    here.ok("run", file, "-q", "axes.micro_batch_size=[1, 2, 4, 8]")
    assert here.sql("select count(*) from v_trial where micro_batch_size = 4") == [[1]]
    exported = here.ok("export", "csv").stdout
    assert 'attention_kernel"": ""flash"' in exported


@pytest.mark.long
def test_the_same_goes_through_ray_and_the_launcher(command: Command, table: Path) -> None:
    command.ok(
        "replay",
        table,
        "--table",
        "formula-8gpu",
        "search.strategy=exhaustive",
        "workload.options.through_ray=true",
        "-q",
    )
    states = dict(command.sql("select state, count(*) from v_trial group by state"))
    assert states["measured"] == 17
    assert states["failed"] == 1
    ((layout, speed, seconds),) = command.sql(
        "select layout, tokens_per_second_per_gpu, gpu_seconds from v_trial"
        " order by tokens_per_second_per_gpu desc limit 1"
    )
    assert layout == BEST
    assert speed == pytest.approx(BEST_SPEED)
    assert seconds == pytest.approx((60 + 8 * 4.4) * 8)


def test_what_cannot_be_replayed_is_one_line(here: CommandHere, table: Path) -> None:
    ended = here.run("replay", table, "--table", "formula-8")
    assert ended.returncode == 2
    assert (
        ended.stderr.strip()
        == f"error: {table}: the file has no table 'formula-8'; did you mean formula-8gpu?"
    )
    assert (
        "it has formula-8b: gpus=8"
        in here.run("replay", table, "--table", "formula-8gpu", "gpus=16").stderr
    )
