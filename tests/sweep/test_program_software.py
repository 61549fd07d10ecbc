"""What a user's program was measured with, where some attempts do not tell."""

from __future__ import annotations

from db.store import Store
from orchestrator.core.trial.fingerprint import Software
from orchestrator.core.trial.protocol import TrialRequest
from tests.sweep.fake_scheduler import FakeScheduler
from tests.sweep.test_implausible import foreign, told
from tests.sweep.test_loop import run


def packages_of(store: Store) -> list[tuple[tuple[str, str], ...]]:
    return [one.packages for one in store.fingerprints(store.sweep_named("t").id)]


def test_attempts_whose_packages_were_not_found_are_compared_with_the_others(
    sqlite_store: Store,
) -> None:
    known = Software(packages=(("numpy", "2.1"),))

    def software(request: TrialRequest) -> Software:
        return Software() if request.layout.micro_batch_size == 2 else known

    # The first layout that runs has another micro-batch.
    for _ in ("the first call", "another call, which knows it from the store"):
        run(
            sqlite_store,
            told,
            scheduler=FakeScheduler(told, software=software),
            spec=foreign(repeats=1),
        )
    assert packages_of(sqlite_store) == [known.packages]
    (cell_best,) = sqlite_store.best(sqlite_store.sweep_named("t").id, 10).values()
    assert len(cell_best) == 6


def test_packages_that_changed_are_still_kept_apart(sqlite_store: Store) -> None:
    def software(request: TrialRequest) -> Software:
        version = "2.2" if request.layout.micro_batch_size == 2 else "2.1"
        return Software(packages=(("numpy", version),))

    run(sqlite_store, told, scheduler=FakeScheduler(told, software=software), spec=foreign())
    assert sorted(packages_of(sqlite_store)) == [(("numpy", "2.1"),), (("numpy", "2.2"),)]
