"""Real training, end to end: Ray schedules, Optuna proposes, SQL stores, each command shows it."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.acceptance.command import Command, CommandHere, write_sweep

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

SEQUENCE_LENGTH = 128


def test_layouts_of_a_real_llama_are_measured_and_told(
    command: Command, here: CommandHere, tmp_path: Path
) -> None:
    file = write_sweep(
        tmp_path,
        gpus=[1, 2],
        global_batch_size=8,
        sequence_length=SEQUENCE_LENGTH,
        precision="fp32",
        axes={
            "micro_batch_size": [4],
            "recompute": ["none", "full"],
            "options": {"attention": ["flash", "eager"]},
        },
        constraints=["attention == 'flash' or (recompute == 'none' and num_gpus == 1)"],
        measurement={"warmup_steps": 2, "min_steps": 2, "max_steps": 3},
        workload="llama",
    )
    ended = command.ok("run", file)
    assert "tokens/s/GPU" in ended.stdout

    best = here.json("best", "t")["best"]
    assert {row["num_gpus"] for row in best} == {1, 2}
    rows = command.sql(
        "select num_gpus, data_parallel_size, tokens_per_second_per_gpu, mfu, hfu,"
        " peak_memory_allocated_bytes, recompute, options ->> 'attention' from v_trial"
    )
    assert len(rows) == 5
    for gpus, dp, tokens, mfu, hfu, memory, _, _ in rows:
        assert dp == gpus
        assert tokens > 0
        assert 0 < mfu <= hfu <= 1
        assert memory > 16 * 1_200_000  # fp32 weights, gradients, two moments
    sources = here.json(
        "sql", "select distinct peak_flops, substr(peak_flops_source, 1, 17) from v_trial"
    )["rows"]
    assert [source for _, source in sources] == ["measured: matmul "], (
        "MFUs of one table rest on one peak"
    )
    by_layout = {
        (gpus, recompute, attention): memory
        for gpus, _, _, _, _, memory, recompute, attention in rows
    }
    assert all(
        by_layout[gpus, "full", "flash"] < by_layout[gpus, "none", "flash"] for gpus in (1, 2)
    )
    # Scores and probabilities in fp32: at least batch x heads x s^2 x 4 bytes in each of 4 layers.
    assert (
        by_layout[1, "none", "eager"] - by_layout[1, "none", "flash"]
        > 4 * 4 * 4 * SEQUENCE_LENGTH**2 * 4
    ), "llama runs the attention that its layout says"

    trial = str(command.sql("select min(trial_id) from v_trial")[0][0])
    shown = here.ok("show", trial).stdout
    assert "torch" in shown
    assert "2 cells" in here.ok("status", "t").stdout
    assert here.run("logs", trial).returncode == 0
    exported = list(csv.DictReader(io.StringIO(here.ok("export", "csv").stdout)))
    assert len(exported) == 5


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A sweep whose largest layouts do not fit, and whose stderr was a full device."""

    command: Command
    stdout: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("too-large")
    command = Command(folder, f"sqlite:///{folder}/sweep.sqlite")
    file = write_sweep(
        folder,
        model="llama-3.1-8b",
        sequence_length=4096,
        global_batch_size=16,
        axes={"micro_batch_size": "auto", "recompute": ["none", "full"], "zero_stage": [0, 3]},
        search={"strategy": "random", "seed": 1},
    )
    with Path("/dev/full").open("w") as full:
        return Ended(command=command, stdout=command.ok("run", file, stderr=full).stdout)


@pytest.mark.long
def test_an_out_of_memory_is_a_result_and_condemns_without_a_launch(ended: Ended) -> None:
    states = dict(ended.command.sql("select state, count(*) from v_trial group by state"))
    assert states["out_of_memory"] >= 1
    assert states.get("pruned", 0) >= 1
    assert sum(states.values()) == 16
    launched = ended.command.sql("select count(*) from v_event where event = 'gang_placed'")[0][0]
    assert launched == 16 - states["pruned"]
    assert ended.command.sql(
        "select count(*) from v_trial where state = 'pruned' and condemned_by is null"
    ) == [[0]]


@pytest.mark.long
def test_a_full_stderr_that_ray_and_launchers_inherit_stops_nothing(ended: Ended) -> None:
    states = dict(ended.command.sql("select state, count(*) from v_trial group by state"))
    assert set(states) == {"measured", "out_of_memory", "pruned"}
    assert "tokens/s/GPU" in ended.stdout
