"""What out-of-memories rule out: at once if the memory is known, else when two agree; and nothing
once a run contradicts them.
"""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.problem.layout import Layout, Recompute, RecomputeMode
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.proofs import Dominance, MemoryProof, Proofs

NONE, FULL = Recompute(), Recompute(mode=RecomputeMode.FULL)
LAYOUTS = [
    Layout(micro_batch_size=m, grad_accum_steps=16 // m, recompute=r)
    for r in (FULL, NONE)
    for m in (1, 2, 4, 8)
]
TABLE = LayoutTable.of(LAYOUTS)


def row(recompute: Recompute, micro_batch_size: int) -> int:
    return next(
        n
        for n, layout in enumerate(LAYOUTS)
        if (layout.recompute, layout.micro_batch_size) == (recompute, micro_batch_size)
    )


def proof(
    recompute: Recompute, micro_batch_size: int, *, num_attempts: int = 1, is_measured: bool = False
) -> MemoryProof:
    return MemoryProof(
        layout=LAYOUTS[row(recompute, micro_batch_size)],
        num_attempts=num_attempts,
        is_measured=is_measured,
    )


def proofs(dominance: Dominance, *some: MemoryProof) -> Proofs:
    found = Proofs(TABLE, num_layers=4, dominance=dominance)
    for one in some:
        found.add(one)
    return found


def ruled_out(found: Proofs) -> set[tuple[str, int]]:
    return {
        (str(LAYOUTS[n].recompute), LAYOUTS[n].micro_batch_size)
        for n in np.flatnonzero(found.ruled_out)
    }


def test_one_is_enough_where_the_memory_is_known() -> None:
    found = proofs(Dominance.TRUSTED, proof(FULL, 4))
    assert ruled_out(found) == {("full", 4), ("full", 8), ("none", 4), ("none", 8)}
    assert found.of(row(NONE, 8)) == (proof(FULL, 4),)


@pytest.mark.parametrize(
    ("some", "expected"),
    [
        ([proof(FULL, 1)], set()),  # the program's own mistake, perhaps
        (
            [proof(FULL, 1), proof(FULL, 2)],
            {("full", 2), ("full", 4), ("full", 8)},
        ),  # still, perhaps, of recomputing alone
        ([proof(FULL, 1), proof(NONE, 2)], {("none", 2), ("none", 4), ("none", 8)}),
        ([proof(NONE, 4), proof(NONE, 2)], {("none", 4), ("none", 8)}),
        ([proof(NONE, 4, num_attempts=2)], {("none", 4), ("none", 8)}),
        ([proof(FULL, 4, is_measured=True)], {("full", 4), ("full", 8)}),
    ],
)
def test_else_two_that_agree_are_and_one_of_them_of_its_own_kind(
    some: list[MemoryProof], expected: set[tuple[str, int]]
) -> None:
    for order in (some, some[::-1]):
        found = proofs(Dominance.CONFIRMED, *order)
        assert ruled_out(found) == expected
        for n in np.flatnonzero(found.ruled_out):
            assert sum(one.weight for one in found.of(int(n))) >= 2
            assert len(set(found.of(int(n)))) == len(found.of(int(n)))


def test_nothing_is_ruled_out_where_that_is_off() -> None:
    assert (
        ruled_out(
            proofs(
                Dominance.OFF,
                *[proof(FULL, m, num_attempts=2, is_measured=True) for m in (1, 2, 4)],
            )
        )
        == set()
    )


@pytest.mark.parametrize("ran_first", [True, False])
def test_a_layout_that_ran_contradicts_every_proof_that_it_cannot(*, ran_first: bool) -> None:
    found = proofs(Dominance.TRUSTED)
    if ran_first:
        assert not found.ran(row(NONE, 2))
    found.add(proof(FULL, 1))
    found.add(proof(NONE, 4))
    if not ran_first:
        assert ruled_out(found) >= {("none", 2), ("full", 1)}
        assert found.ran(row(NONE, 2))
    assert ruled_out(found) == {("none", 4), ("none", 8)}  # by the proof that is left


def test_what_is_withdrawn_rules_out_nothing_and_contradicts_nothing() -> None:
    found = proofs(Dominance.TRUSTED, proof(FULL, 1))
    found.ran(row(NONE, 2))
    assert ruled_out(found) == set()
    # The run that contradicted it was invalidated.
    found.replace([proof(FULL, 1)], np.array([], dtype=np.int64))
    assert len(ruled_out(found)) == 8
    found.replace([], np.array([], dtype=np.int64))
    assert ruled_out(found) == set()


def test_an_attempt_that_ran_out_counts_once_unless_it_is_measured() -> None:
    assert MemoryProof(layout=LAYOUTS[0]).weight == 1
    assert MemoryProof(layout=LAYOUTS[0], num_attempts=2).weight == 2
    assert MemoryProof(layout=LAYOUTS[0], is_measured=True).weight == 2


@pytest.mark.parametrize("is_told_at_once", [False, True])
def test_the_first_proof_of_a_row_s_kind_is_shown_and_then_the_one_that_agrees(
    *, is_told_at_once: bool
) -> None:
    """Told at once, those that need least come first."""
    some = [proof(FULL, 2), proof(FULL, 1), proof(FULL, 4)]
    found = proofs(Dominance.CONFIRMED, *([] if is_told_at_once else some))
    if is_told_at_once:
        found.replace(some, np.array([], dtype=np.int64))
    shown = (some[1], some[0]) if is_told_at_once else (some[0], some[1])
    assert found.of(row(FULL, 8)) == shown
    # Nobody ran out without recomputation.
    assert ruled_out(found) == {("full", 2), ("full", 4), ("full", 8)}


def test_what_ran_contradicts_what_is_told_with_it() -> None:
    found = proofs(Dominance.TRUSTED)
    found.replace([proof(FULL, 1), proof(NONE, 4)], np.array([row(NONE, 2)]))
    assert ruled_out(found) == {("none", 4), ("none", 8)}
