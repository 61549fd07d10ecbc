"""The budgets of a sweep file as one number, and what money needs to be one."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.sweepfile.budget import Budget, Limit, budget_of, check_objectives, price_of
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import Device


def spec(search: dict[str, Any], **changes: Any) -> SweepSpec:
    values = {
        "name": "t",
        "model": "llama-tiny",
        "gpus": 1,
        "sequence_length": 64,
        "global_batch_size": 8,
        "search": search,
    }
    return SweepSpec.model_validate(values | changes)


def found(search: dict[str, Any], **changes: Any) -> Budget | None:
    chosen = spec(search, **changes)
    return budget_of(chosen, price_of(chosen, DEVICES.get(chosen.device)))


def test_the_tighter_of_hours_and_money_holds() -> None:
    assert found({"max_gpu_hours": 10.0}) == Budget(gpu_seconds=36_000.0, limit=Limit.GPU_HOURS)
    both = {"max_gpu_hours": 10.0, "max_cost": 20.0}
    assert found(both, price_per_gpu_hour=4.0) == Budget(
        gpu_seconds=18_000.0, limit=Limit.COST
    )  # 20 / 4 = 5 hours
    assert found(both, price_per_gpu_hour=1.0) == Budget(
        gpu_seconds=36_000.0, limit=Limit.GPU_HOURS
    )
    assert found({}) is None


def test_money_goes_by_the_list_price_where_the_file_gives_none() -> None:
    price = DEVICES["h100-sxm"].price_per_hour
    assert price is not None
    assert found({"max_cost": price}, device="h100-sxm") == Budget(
        gpu_seconds=3600.0, limit=Limit.COST
    )


@pytest.mark.parametrize("device", ["cpu", "h800"])
def test_money_without_a_price_is_refused_with_the_file(device: str) -> None:
    with pytest.raises(
        ValidationError,
        match=rf"search.max_cost\s+device {device} has no list price; give price_per_gpu_hour",
    ):
        spec({"max_cost": 5.0}, device=device)
    assert found({"max_cost": 5.0}, device=device, price_per_gpu_hour=0.1) == Budget(
        gpu_seconds=180_000.0, limit=Limit.COST
    )


def test_money_without_a_price_is_refused_where_the_device_turns_out_to_have_none() -> None:
    with pytest.raises(
        UsageInvalid,
        match=r"max_cost 5: the price of device auto is unknown here; give price_per_gpu",
    ):
        found({"max_cost": 5.0})


def test_a_sweep_without_a_limit_of_money_reads_as_it_did_before_there_was_one() -> None:
    assert "max_cost" not in spec({}).model_dump_json()
    assert '"max_cost":2.5' in spec({"max_cost": 2.5}).model_dump_json()


def test_an_objective_needs_a_price_or_a_memory_size_that_somebody_knows() -> None:
    dollars = spec({}, objective="dollars_per_billion_tokens", price_per_gpu_hour=2.0)
    room = spec({}, objective="memory_headroom", device_memory_gib=80)
    price = price_of(dollars, None)
    check_objectives(dollars, price, device=Device.CPU, memory_limit_bytes=None)
    check_objectives(room, None, device=Device.CUDA, memory_limit_bytes=8e10)
    with pytest.raises(UsageInvalid, match="the price of device auto is unknown"):
        check_objectives(dollars, None, device=Device.CPU, memory_limit_bytes=8e10)
    with pytest.raises(UsageInvalid, match=r"no memory size is known .* give device_memory_gib"):
        check_objectives(room, price, device=Device.CUDA, memory_limit_bytes=None)
    with pytest.raises(UsageInvalid, match=r"give workload\.options\.memory_limit_bytes"):
        check_objectives(room, price, device=Device.CPU, memory_limit_bytes=None)
    joules = spec({}, objective="joules_per_token", device="h100-sxm")
    with pytest.raises(UsageInvalid, match="joules_per_token"):
        check_objectives(joules, price, device=Device.CPU, memory_limit_bytes=8e10)
