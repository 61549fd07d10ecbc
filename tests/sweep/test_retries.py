"""Which trials wait for another attempt, and where each may start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from db.read.rows import TrialRow
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.sweep.retries import Retries


def trial(trial_id: int) -> TrialRow:
    return cast(TrialRow, SimpleNamespace(id=trial_id))


def test_what_lost_its_node_starts_only_where_it_is_alone() -> None:
    retries = Retries()
    lost, crashed = trial(1), trial(2)
    retries.add(lost, FailureKind.NODE_LOST, ["a"])
    retries.add(crashed, FailureKind.KILLED, ["a"])
    assert retries.startable(alone=False) == [crashed]
    assert retries.startable(alone=True) == [lost, crashed]
    assert not retries.are_all_suspects
    retries.waiting.remove(crashed)
    assert retries.are_all_suspects
    retries.waiting.remove(lost)
    assert not retries.are_all_suspects, "nothing waits"


def test_what_hung_is_known_by_all_nodes_that_it_ran_on() -> None:
    retries = Retries()
    hung, refused = trial(1), trial(2)
    retries.add(hung, FailureKind.HUNG, ["a", "b"])
    retries.add(refused, FailureKind.KILLED, ["a", "b"])
    assert retries.avoids(hung, ["b", "c"])
    assert not retries.avoids(hung, ["c"])
    assert not retries.avoids(refused, ["a"])


def test_a_node_out_of_memory_gives_every_later_trial_nodes_of_its_own() -> None:
    retries = Retries()
    retries.add(trial(1), FailureKind.OOM_HOST, ["a"])
    retries.add(trial(2), FailureKind.KILLED, ["a"])
    assert retries.needs_own_nodes


def test_faults_of_earlier_calls_replace_what_was_known() -> None:
    retries = Retries()
    retries.add(trial(1), FailureKind.NODE_LOST, ["a"])
    retries.restore(lost_a_node=[2], avoided={2: frozenset("b")}, needs_own_nodes=False)
    assert retries.startable(alone=False) == retries.waiting
    assert retries.avoids(trial(2), ["b"])
