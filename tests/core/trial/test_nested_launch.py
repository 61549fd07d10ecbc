"""Processes below a rank that show that its program starts ranks itself, and those that do not."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.nested_launch import (
    SeenProcess,
    launcher_in,
    nested_launch,
    wrong_world_size,
)

OWN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "sweep/1/1"}


def seen(
    pid: int, parent: int, *, argv: tuple[str, ...] = ("python", "train.py"), **environment: str
) -> SeenProcess:
    return SeenProcess(pid=pid, parent=parent, argv=argv, environment=OWN | environment)


@pytest.mark.parametrize(
    ("argv", "launcher"),
    [
        (["torchrun", "train.py"], "torchrun"),
        (["/opt/venv/bin/torchrun", "--nproc-per-node", "8", "train.py"], "torchrun"),
        (["/usr/bin/python3.12", "/opt/venv/bin/torchrun", "train.py"], "torchrun"),
        (["python", "-u", "-m", "torch.distributed.run", "train.py"], "torchrun"),
        (["python", "-um", "torch.distributed.launch", "train.py"], "torch.distributed.launch"),
        (["python", "-X", "dev", "-m", "torch.distributed.run"], "torchrun"),
        (["python", "-m", "deepspeed.launcher.launch", "--world_info=e30"], "deepspeed"),
        (["python", "train.py", "--launcher", "torchrun"], None),
        (["python", "-c", "import torch", "torchrun"], None),
        (["bash", "train.sh"], None),
        # One process is started in its place.
        (["accelerate", "launch", "train.py"], None),
        (["python", "-m", "train"], None),
        (["python"], None),
        ([], None),
    ],
)
def test_a_launcher_is_known_by_its_command_line(argv: list[str], launcher: str | None) -> None:
    assert launcher_in(argv) == launcher


@pytest.mark.parametrize(
    ("processes", "said"),
    [
        ([seen(10, 9, WORLD_SIZE="4")], "WORLD_SIZE=4, not 2"),
        ([seen(10, 9, TORCHELASTIC_RUN_ID="none")], "another TORCHELASTIC_RUN_ID"),
        (
            [seen(9, 1), seen(10, 9, RANK="0"), seen(11, 9, RANK="1")],
            "a process below it started others with RANK 0, 1",
        ),
        ([seen(9, 1, argv=("python", "/bin/torchrun", "train.py"))], "it runs torchrun"),
    ],
)
def test_ranks_of_another_gang_show_a_launcher(processes: list[SeenProcess], said: str) -> None:
    assert said in (nested_launch(processes, OWN) or "")


@pytest.mark.parametrize(
    "processes",
    [
        # A program with loader workers, which inherit everything.
        [seen(9, 1), seen(10, 9), seen(11, 9, argv=("python", "-c", "from multiprocessing..."))],
        # A compiler in an empty environment, and a process that may not be read.
        [SeenProcess(pid=10, parent=9, argv=("/usr/bin/nvcc",), environment={})],
        # A program that replaced itself, with another rank for its own purposes.
        [seen(9, 1, RANK="1"), seen(10, 9, RANK="1"), seen(11, 9, RANK="1")],
        [],
    ],
)
def test_children_of_a_rank_show_none(processes: list[SeenProcess]) -> None:
    assert nested_launch(processes, OWN) is None


def test_a_launcher_that_starts_too_few_ranks_is_told_once_none_has_the_right_number() -> None:
    ranks = [SeenProcess(pid=9, parent=1, argv=(), environment={})]
    assert wrong_world_size(ranks, 8) is None, "they may still come, or need no variables"
    ranks += [SeenProcess(pid=10, parent=9, argv=(), environment={"WORLD_SIZE": "1"})]
    assert "have WORLD_SIZE=1, and the layout has 8" in (wrong_world_size(ranks, 8) or "")
    ranks += [SeenProcess(pid=11, parent=9, argv=(), environment={"WORLD_SIZE": "8"})]
    assert wrong_world_size(ranks, 8) is None
