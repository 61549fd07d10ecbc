"""Which code a cell has, if attempts began before an edit and ended after it."""

from __future__ import annotations

from db.store import Store
from tests.db.builders import Bench, counted_statements, edited, end_of, start_repeat


def test_an_attempt_that_began_before_an_edit_and_ends_after_it_changes_no_cell(
    store: Store,
) -> None:
    bench, old, new = Bench.on(store), edited("a"), edited("b")
    early, late, later = (bench.start(size) for size in (1, 2, 4))
    for attempt, code, is_current in ((late, new, True), (early, old, False), (later, new, True)):
        (recorded,) = store.record_ends([end_of(attempt, code)], epoch=bench.epoch)
        assert recorded.counts
        assert recorded.is_current is is_current
    rows = {t.id: t.is_current_fingerprint for t in store.trials(bench.sweep_id)}
    assert rows == {early[0]: False, late[0]: True, later[0]: True}


def test_so_it_is_if_both_are_written_together(store: Store) -> None:
    bench, old, new = Bench.on(store), edited("a"), edited("b")
    early, late = bench.start(1), bench.start(2)
    store.record_ends([end_of(late, new), end_of(early, old)], epoch=bench.epoch)
    rows = {t.id: t.is_current_fingerprint for t in store.trials(bench.sweep_id)}
    assert rows == {early[0]: False, late[0]: True}


def test_so_it_is_if_the_same_write_finds_the_software_of_the_new_code(store: Store) -> None:
    packages = (("numpy", "2.1"),)
    old, new = (edited(code).model_copy(update={"packages": packages}) for code in "ab")
    bench = Bench.on(store)
    early, late = bench.start(1), bench.start(2)
    partly_known = new.model_copy(update={"packages": ()})
    store.record_ends([end_of(late, partly_known)], epoch=bench.epoch)
    repeated = (late[0], start_repeat(store, late[0], bench.epoch, ["node-a"]))
    recorded = store.record_ends([end_of(early, old), end_of(repeated, new)], epoch=bench.epoch)
    assert [(one.counts, one.is_current) for one in recorded] == [(True, False), (True, True)]
    trials = {one.id: one for one in store.trials(bench.sweep_id)}
    assert [trials[i].is_current_fingerprint for i in (early[0], late[0])] == [False, True]
    assert trials[late[0]].num_measurements == 2


def test_of_several_ends_with_the_new_code_the_one_that_began_last_counts(store: Store) -> None:
    """They are written in the order of their ends: the one that began last is not the last."""
    bench, old, new = Bench.on(store), edited("a"), edited("b")
    first, early, late = (bench.start(size) for size in (1, 2, 4))
    ends = [end_of(late, new), end_of(first, new), end_of(early, old)]
    recorded = store.record_ends(ends, epoch=bench.epoch)
    assert [one.is_current for one in recorded] == [True, True, False]


def test_many_ends_with_older_code_take_no_more_statements_than_one(store: Store) -> None:
    counts = []
    for num in (1, 5):
        bench, old, new = Bench.on(store, f"of-{num}"), edited("a"), edited("b")
        early, late = [bench.start(2**i) for i in range(num)], bench.start(64)
        store.record_ends([end_of(late, new)], epoch=bench.epoch)
        with counted_statements(store) as found:
            store.record_ends([end_of(one, old) for one in early], epoch=bench.epoch)
        counts.append(len(found))
    assert counts[0] == counts[1]
