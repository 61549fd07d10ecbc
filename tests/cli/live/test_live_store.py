"""A store that is opened when it can be, and opened anew once its file is another."""

from __future__ import annotations

from pathlib import Path

import pytest

from db.store import Store
from orchestrator.cli.live.live_store import LiveStore
from orchestrator.core.errors import StoreUnavailable
from tests.db.builders import Bench


def filled(file: Path, num_trials: int) -> None:
    with Store.open(f"sqlite:///{file}") as store:
        bench = Bench.on(store)
        for power in range(num_trials):
            bench.measure(2**power)


def test_a_store_is_read_once_it_is_there_and_again_once_another_takes_its_place(
    tmp_path: Path,
) -> None:
    file = tmp_path / "live.sqlite"
    live = LiveStore(f"sqlite:///{file}", "tiny")
    with pytest.raises(StoreUnavailable):
        live.read()
    filled(file, 1)
    assert len(live.read().rows.trials) == 1
    filled(tmp_path / "other.sqlite", 2)
    for part in ("", "-wal", "-shm"):
        Path(f"{file}{part}").unlink(missing_ok=True)
    (tmp_path / "other.sqlite").rename(file)
    assert len(live.read().rows.trials) == 2
    live.close()
