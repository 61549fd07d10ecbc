"""Gangs that span nodes: simulated nodes of a real Ray cluster, with declared slots."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tests.programs import told

# It takes 80 s on idle cores, half of it waiting.
pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(700)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return told("tests.cluster.ray.two_nodes", str(tmp_path_factory.mktemp("runs")), seconds=600)


def test_every_node_says_how_it_is_and_leaves_its_slots_free(out: dict[str, Any]) -> None:
    """The first two calls are lost, and repeated."""
    assert set(out["probed"]) == set(out["names"])
    assert {host for host, _, _ in out["probed"].values()} == {socket.gethostname()}
    assert all(abs(offset) < 0.5 for _, offset, _ in out["probed"].values()), (
        "both have this machine's clock"
    )
    assert all(rate is None for _, _, rate in out["probed"].values()), (
        "of two that differ nobody could tell which is slow"
    )
    assert out["unfit"] == []


def test_an_attempt_begins_and_ends_while_another_node_is_probed(out: dict[str, Any]) -> None:
    assert sorted(out["order"]) == ["attempt", "slow", "well"]
    assert out["order"].index("attempt") < out["order"].index("slow"), (
        "it was told to answer once the attempt had ended"
    )


def test_a_node_that_does_not_answer_is_given_up_and_nothing_of_the_probe_is_left(
    out: dict[str, Any],
) -> None:
    assert out["silent"] == ["no answer within 1 s"]
    assert out["probes_left"] == 0


def test_gpus_that_a_probe_holds_are_held_and_idle_until_it_has_ended(out: dict[str, Any]) -> None:
    assert 2 * 1.0 <= out["probe_held"] <= 2 * out["probe_seconds"], (
        "two GPUs, for a second and the time of a probe"
    )
    assert out["probe_idle"] == out["probe_held"]
    assert out["held_after_probe"] == 0.0


def test_a_gang_over_two_nodes_meets_and_measures(out: dict[str, Any]) -> None:
    assert out["slots"] == [2, 2]
    assert out["ranks"] == [0, 1, 2, 3]
    assert out["first"] is None


def test_nodes_of_one_host_have_names_of_their_own(out: dict[str, Any]) -> None:
    first, second = out["names"]
    assert first == socket.gethostname()
    assert second.startswith(f"{first}-")


def test_agents_stand_where_their_gang_was_placed(out: dict[str, Any]) -> None:
    assert out["placed"] == out["names"]
    assert out["standing"] == [{}, dict.fromkeys(out["names"], 0), dict.fromkeys(out["names"], 2)]


def test_gangs_of_fewer_and_of_more_nodes_share_the_agents_that_stand(out: dict[str, Any]) -> None:
    assert out["split"] == [None] * 7
    assert out["full"] == dict.fromkeys(out["names"], 0)
    assert out["same_agents"]


def test_a_gang_that_is_cancelled_where_it_meets_leaves_its_agents_to_the_next(
    out: dict[str, Any],
) -> None:
    assert out["cancelled"] == ["cancelled", 0]
    assert out["after_cancelled"] is None
    assert out["kept_when_cancelled"]


def test_a_gang_of_which_another_job_holds_a_half_gives_the_other_half_back(
    out: dict[str, Any],
) -> None:
    assert out["given_up"] == ["launch_failed", True]
    assert out["standing_when_given_up"] == {}, (
        "the other may wait for it, and both would wait for ever"
    )


def test_gangs_beside_one_agent_have_gpus_of_their_own(out: dict[str, Any]) -> None:
    assert out["one_agent"]
    assert out["gpus"] == ["0", "1"]


def test_a_gang_lands_on_the_nodes_that_were_chosen_and_ranks_are_numbered_in_their_order(
    out: dict[str, Any],
) -> None:
    assert out["landed"] == [True, True]
    assert out["numbered"]


def test_a_hang_on_the_second_node_shows_in_the_progress(out: dict[str, Any]) -> None:
    assert out["reached"] == ["steady", 3]


def test_a_rank_that_fails_on_one_node_ends_those_of_the_other_at_once(out: dict[str, Any]) -> None:
    assert out["crash"] == ["user_error", 3]
    assert out["ended_by_themselves"] == [3]
    assert out["crash_seconds"] < 15  # they would hang for 30


def test_numbers_that_are_enough_stand_when_the_second_node_fails_because_the_first_ends(
    out: dict[str, Any],
) -> None:
    assert out["failed_meanwhile"]
    assert out["enough"] is None
    assert out["enough_of"] == [True, False]


def test_the_loss_of_a_node_ends_its_gang(out: dict[str, Any]) -> None:
    assert out["lost"] == "node_lost"
    assert out["lost_seconds"] < 30
    assert out["names"] == sorted([out["lost_on"], out["left"]]), (
        "nothing more is put on a node that is gone"
    )


def test_the_agents_of_other_nodes_outlive_the_loss_of_one(out: dict[str, Any]) -> None:
    assert out["kept_agents"] == [2, 1, True, True]
    assert out["standing_after_loss"] == {out["left"]: 2}
    assert out["after_loss"] is None


def test_a_node_that_comes_back_has_its_name_again_and_is_used(out: dict[str, Any]) -> None:
    assert out["names_after_return"] == out["names"]
    assert out["has_another_start"], "Ray has it under another id, so it is probed again"
    assert out["after_return"] is None


def test_a_gang_that_cannot_form_since_its_node_is_dead_does_not_wait_out_its_time(
    out: dict[str, Any],
) -> None:
    assert out["unformed"] == ["node_lost", None]
    assert out["unformed_seconds"] < 45, "of the 120 and more for which a gang may form"
    assert out["kept_when_unformed"]
