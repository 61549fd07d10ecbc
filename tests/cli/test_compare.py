"""`sweep compare`: two sweeps, or two versions of the code that one sweep measured."""

from __future__ import annotations

import json

from db.store import Store
from tests.cli.conftest import Sweep
from tests.db.builders import Bench


def test_two_sweeps_are_compared_and_noise_is_called_noise(store: Store, sweep: Sweep) -> None:
    for name, speeds in (("old", (1000.0, 500.0, 400.0)), ("new", (1010.0, 700.0))):
        bench = Bench.on(store, name)
        for size, speed in zip((1, 2, 4), speeds, strict=False):
            bench.measure(size, speed)
    out, _ = sweep("compare", "old", "new")
    assert "+40.0%  faster" in out
    assert "+1.0%  noise" in out
    assert "of 2 layouts that both measured, 1 faster, 0 slower, 1 noise." in out
    assert "1 were measured in old alone" in out
    assert "`sweep best` shows another" in out
    found = json.loads(sweep("compare", "old", "new", "--json")[0])
    assert [one["change"] for one in found["layouts"]] == ["faster", "noise"]
    assert sweep("compare", "old", "new", "--format", "md")[0].startswith("| cell | before |")


def test_one_sweep_is_compared_with_its_older_software(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store, "one")
    bench.measure(1, 1000.0, torch="2.9.0")
    _, err = sweep("compare", "one", code=2)
    assert "measured with one fingerprint" in err
    bench.measure(2, 1000.0, torch="2.13.0")
    out, _ = sweep("compare", "one")
    assert "changed: torch 2.9.0 -> 2.13.0" in out
