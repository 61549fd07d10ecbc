"""Runs that W&B itself writes offline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.report.mirrors.mirroring import Mirroring
from orchestrator.report.mirrors.wandb_mirror import WandbMirror
from tests.db.builders import Bench
from tests.report.mirrors.test_mirroring import runs

pytest.importorskip("wandb", reason="W&B is not installed: pip install -e '.[wandb]'")


def test_a_trial_is_one_offline_run_with_its_id(sqlite_store: Store, tmp_path: Path) -> None:
    bench = Bench.on(sqlite_store)
    bench.measure(1, 1234.0)
    bench.measure(2)
    found = runs(bench)

    def mirroring() -> Mirroring:
        return Mirroring("wandb", lambda: WandbMirror(tmp_path, sweep="tiny", run_token="t"), str)

    first = mirroring()
    assert first.catch_up(found).num_written == 2
    assert first.catch_up(found).num_written == 0
    again = mirroring()
    assert again.catch_up([replace(found[0], version="2"), found[1]]).num_written == 1
    first.close()
    files = sorted(path.name for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert set(files) == {f"run-{run.key}.wandb" for run in found}
    written = b"".join(
        path.read_bytes() for path in tmp_path.glob(f"wandb/*/run-{found[0].key}.wandb")
    )
    for text in (b"micro_batch_size", b"tokens_per_second_per_gpu", b"1234"):
        assert text in written
