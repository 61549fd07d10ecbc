"""The budgets of a sweep file as one number, and what money needs to be one."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.sweepfile.budget import Budget, Limit, budget_of, price_of
from orchestrator.core.sweepfile.spec import SweepSpec


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
        match=r"max_cost 5: no price is known of what device auto means here; give price_per_gpu",
    ):
        found({"max_cost": 5.0})


def test_a_sweep_without_a_limit_of_money_reads_as_it_did_before_there_was_one() -> None:
    assert "max_cost" not in spec({}).model_dump_json()
    assert '"max_cost":2.5' in spec({"max_cost": 2.5}).model_dump_json()
