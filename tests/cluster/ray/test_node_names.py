"""The names of nodes that come, go and come back."""

from __future__ import annotations

from orchestrator.cluster.ray.node_names import SETTLE_SECONDS, NodeNames


def test_nodes_are_called_like_their_hosts() -> None:
    assert NodeNames().update({"1" * 56: "gpu-1", "2" * 56: "gpu-2"}, 0.0) == {
        "1" * 56: "gpu-1",
        "2" * 56: "gpu-2",
    }


def test_nodes_that_share_a_host_have_names_of_their_own() -> None:
    assert NodeNames().update({"aaaaaaaa1": "here", "bbbbbbbb2": "here"}, 0.0) == {
        "aaaaaaaa1": "here",
        "bbbbbbbb2": "here-bbbbbbbb",
    }


def test_a_node_that_comes_back_has_its_name_again() -> None:
    names = NodeNames()
    names.update({"a": "gpu-1", "b": "gpu-2"}, 0.0)
    assert names.update({"b": "gpu-2"}, 5.0) == {"b": "gpu-2"}
    assert names.update({"b": "gpu-2", "c": "gpu-1"}, 10.0) == {"b": "gpu-2", "c": "gpu-1"}


def test_a_node_whose_place_another_may_have_is_named_once_that_is_dead() -> None:
    names = NodeNames()
    names.update({"a": "gpu-1"}, 0.0)
    assert names.update({"a": "gpu-1", "b": "gpu-1"}, 5.0) == {"a": "gpu-1"}, (
        "its raylet was started anew, and Ray has not seen the end of the old one"
    )
    assert names.update({"b": "gpu-1"}, 20.0) == {"b": "gpu-1"}


def test_one_more_node_of_a_host_is_named_once_it_is_plain_that_both_live() -> None:
    names = NodeNames()
    names.update({"a": "here"}, 0.0)
    both = {"a": "here", "bbbbbbbb2": "here"}
    assert names.update(both, 5.0) == {"a": "here"}
    assert names.update(both, 5.0 + SETTLE_SECONDS) == {"a": "here", "bbbbbbbb2": "here-bbbbbbbb"}


def test_of_two_that_come_back_each_has_a_name_that_was_had_before() -> None:
    names = NodeNames()
    names.update({"a1234567": "here", "b1234567": "here"}, 0.0)
    names.update({}, 5.0)
    assert sorted(names.update({"c1234567": "here", "d1234567": "here"}, 10.0).values()) == [
        "here",
        "here-b1234567",
    ]
