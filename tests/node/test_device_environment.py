from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.trial.communication import counted, recorded
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.node.device_environment import LLAMA, compile_caches
from orchestrator.node.gang_environment import gang_environment, gang_interfaces, gang_settings
from tests.node.launching import order

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def on_gpus(program: str = LLAMA, **known: Any) -> LaunchOrder:
    return order(program, devices=["0", "1"], **known)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch itself sets the folder of its compiler, in a process that has imported it.
    caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    for name in (*NAMES, *caches, "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)


def told(asked: LaunchOrder, tmp_path: Path) -> dict[str, str]:
    return gang_environment(asked, 29500, tmp_path, root=tmp_path / "home" / "runs" / "a-sweep")


def test_our_ranks_on_gpus_allocate_in_segments_that_grow(tmp_path: Path) -> None:
    environment = told(on_gpus(), tmp_path)
    assert {name: environment[name] for name in NAMES if name in environment} == EXPANDABLE


@pytest.mark.parametrize("asked", [order(LLAMA), on_gpus("workloads.command")])
def test_no_other_rank_is_told_how_to_allocate(asked: LaunchOrder, tmp_path: Path) -> None:
    assert not set(NAMES) & told(asked, tmp_path).keys()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_passed", [False, True])
def test_who_chooses_the_allocator_keeps_the_choice(
    name: str, is_passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = "expandable_segments:False"
    if not is_passed:
        monkeypatch.setenv(name, mine)
    asked = on_gpus(environment={name: mine} if is_passed else {})
    environment = told(asked, tmp_path)
    assert {other: environment[other] for other in NAMES if other in environment} == (
        {name: mine} if is_passed else {}
    ), "a rank inherits what its launcher has"


def test_the_allocators_mode_is_a_setting_that_keeps_numbers_apart() -> None:
    asked = on_gpus()
    environment = recorded(gang_settings(asked))
    assert EXPANDABLE.items() <= environment.items()
    assert counted(environment, by_launcher=gang_interfaces(asked)) == EXPANDABLE


def test_what_ranks_compile_is_kept_for_later_ones_of_the_same_stack(tmp_path: Path) -> None:
    environment = told(on_gpus(), tmp_path)
    folder = Path(environment["TRITON_CACHE_DIR"])
    assert folder.is_relative_to(tmp_path / "home" / "compiled"), "one for all sweeps of a home"
    assert folder.parent.name.startswith("torch-")
    assert folder.parent == Path(environment["TORCHINDUCTOR_CACHE_DIR"]).parent
    assert compile_caches(on_gpus("workloads.command"), tmp_path) == {}


def test_a_cache_that_somebody_chose_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/triton")
    assert "TRITON_CACHE_DIR" not in told(on_gpus(), tmp_path), "inherited"


def test_the_last_collectives_of_a_gang_on_gpus_are_written_into_its_run_folder(
    tmp_path: Path,
) -> None:
    environment = told(on_gpus("workloads.command"), tmp_path)
    assert environment["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == f"{tmp_path}/nccl-trace-"
    assert int(environment["TORCH_NCCL_TRACE_BUFFER_SIZE"]) > 0
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    alone = order(LLAMA, world_size=1, devices=["0"])
    for asked in (order(LLAMA), alone):
        assert not any(name.startswith("TORCH_NCCL_") for name in told(asked, tmp_path))
