"""`sweep best` shows below a tie what would decide it."""

from __future__ import annotations

from db.store import Store
from tests.cli.conftest import Sweep
from tests.db.builders import Bench, fingerprint, measurement, record_measurement


def test_best_shows_it_below_the_tie(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    for micro_batch_size in (1, 2):
        trial_id, attempt = bench.start(micro_batch_size)
        record_measurement(
            store,
            trial_id,
            attempt,
            epoch=bench.epoch,
            measurement=measurement(1000.0),
            fingerprint=fingerprint(),
        )
    lines = sweep("best")[0].splitlines()
    place = next(n for n, line in enumerate(lines) if "No single winner" in line)
    assert "take trial 1, the simplest of them" in lines[place + 1]
