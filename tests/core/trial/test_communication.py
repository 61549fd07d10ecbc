"""Which variables reach nodes, are recorded with an attempt, and keep numbers apart."""

from __future__ import annotations

from orchestrator.core.trial.communication import (
    counted,
    over_nodes,
    passed,
    recorded,
)

OF_A_DRIVER = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_DEBUG_SUBSYS": "INIT",
    "GLOO_SOCKET_IFNAME": "eth1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron-LM asks for it
    "HF_HOME": "/scratch/hf",
    "HF_TOKEN": "hf_secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "PATH": "/bin",
}


def test_nodes_are_told_how_to_communicate_and_nothing_of_the_rest() -> None:
    assert set(passed(OF_A_DRIVER)) == set(OF_A_DRIVER) - {
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "PATH",
    }


def test_only_settings_of_communication_are_kept() -> None:
    assert list(recorded(OF_A_DRIVER)) == [
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "GLOO_SOCKET_IFNAME",
        "NCCL_DEBUG_SUBSYS",
        "NCCL_P2P_DISABLE",
    ]


def test_a_variable_that_a_sweep_file_hands_over_is_not_kept_whatever_its_name() -> None:
    assert "NCCL_P2P_DISABLE" not in recorded(OF_A_DRIVER, without={"NCCL_P2P_DISABLE": "1"})


def test_a_long_value_is_cut() -> None:
    assert recorded({"NCCL_IB_HCA": "m" * 10_000}) == {"NCCL_IB_HCA": "m" * 500}


def test_bytes_that_are_no_text_are_kept_as_what_they_were() -> None:
    told = recorded({"GLOO_SOCKET_IFNAME": b"eth\xff0".decode(errors="surrogateescape")})
    assert told == {"GLOO_SOCKET_IFNAME": "eth\\xff0"}
    assert told["GLOO_SOCKET_IFNAME"].encode(), "a database takes it"


def test_what_was_chosen_here_and_what_is_only_printed_keep_no_numbers_apart() -> None:
    assert counted(recorded(OF_A_DRIVER), by_launcher=["GLOO_SOCKET_IFNAME"]) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_P2P_DISABLE": "1",
    }


def test_environments_of_nodes_are_one_where_they_agree_and_told_by_node_where_not() -> None:
    a, b = (
        {"NCCL_ALGO": "Ring", "GLOO_SOCKET_IFNAME": "eth0"},
        {"NCCL_ALGO": "Ring", "GLOO_SOCKET_IFNAME": "ens3", "NCCL_PROTO": "LL"},
    )
    assert over_nodes({"a": a, "b": b}) == {
        "GLOO_SOCKET_IFNAME": {"a": "eth0", "b": "ens3"},
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": {"a": None, "b": "LL"},
    }
    assert over_nodes({}) == {}
