"""Checks of nodes: one fact of a healthy node is changed at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.machines.check import Check, Status
from orchestrator.core.machines.node_health import (
    GpuFacts,
    NodeFacts,
    baseline_bytes,
    judge_nodes,
    unfit,
    xids_since,
)
from orchestrator.core.problem.xid import XIDS, XidCause

GIB = 1 << 30
H100 = "NVIDIA H100 80GB HBM3"
# bf16, of 989e12 on the data sheet: what torch reaches with 8192 x 8192.
RATE = 700e12


def gpu(index: int = 0, **changes: Any) -> GpuFacts:
    healthy = GpuFacts(
        index=str(index),
        name=H100,
        memory_used_bytes=GIB // 2,
        memory_total_bytes=80 * GIB,
        ecc_uncorrected=0,
        ecc_corrected=3,
        row_remap_pending=False,
        row_remap_failed=False,
        matmul_flops=RATE,
    )
    return replace(healthy, **changes)


def node(
    name: str = "n0", *, gpus: tuple[GpuFacts, ...] | None = None, **changes: Any
) -> NodeFacts:
    healthy = NodeFacts(
        node=name,
        host=name,
        kernel="6.8.0",
        python="3.11.9",
        packages={
            "layout-sweep": "0.1.0",
            "code": "abc",
            "ray": "2.60.0",
            "torch": "2.13.0",
            "pydantic": "2.12.0",
            "numpy": "2.1.0",
        },
        driver="580.1",
        cuda="13.0",
        nccl="2.29",
        gpus=tuple(gpu(i) for i in range(8)) if gpus is None else gpus,
        xids={},
        cpu_name="EPYC",
        num_cores=64,
        free_disk_bytes=900 * GIB,
        clock_offset_seconds=0.01,
        clock_uncertainty_seconds=0.002,
    )
    return replace(healthy, **changes)


def checks(*nodes: NodeFacts, of: str = "n0", **kwargs: Any) -> dict[str, Check]:
    return {check.name: check for check in judge_nodes(nodes, **kwargs)[of]}


def test_a_healthy_cluster_has_nothing_to_mend() -> None:
    found = judge_nodes([node(f"n{i}") for i in range(3)])
    assert {check.status for some in found.values() for check in some} == {Status.OK}
    assert [unfit(some) for some in found.values()] == [None] * 3


OF_ONE_GPU: list[tuple[dict[str, Any], str, Status, str]] = [
    (
        {"processes": ("process 4711 with 3072 MiB",)},
        "gpus",
        Status.FAIL,
        "GPU 0 is held by process 4711",
    ),
    (
        {"memory_used_bytes": 12 * GIB},
        "gpus",
        Status.FAIL,
        "GPU 0 has 12.0 GiB in use by no process that can be seen",
    ),
    ({"memory_used_bytes": None}, "gpus", Status.OK, "clean"),
    ({"name": "NVIDIA H200"}, "gpus", Status.WARN, "1 x NVIDIA H200, 7 x NVIDIA H100"),
    ({"ecc_uncorrected": 1}, "ecc", Status.FAIL, "GPU 0: 1 uncorrected"),
    ({"row_remap_failed": True}, "ecc", Status.FAIL, "could not be replaced"),
    ({"ecc_corrected": 5000}, "ecc", Status.WARN, "5000 corrected"),
    ({"ecc_corrected": 1000}, "ecc", Status.WARN, "1000 corrected"),
    ({"ecc_corrected": 999}, "ecc", Status.OK, "no errors"),
    ({"ecc_corrected": None}, "ecc", Status.OK, "no errors"),
    ({"row_remap_pending": True}, "ecc", Status.WARN, "wait to be replaced"),
    ({"matmul_flops": 0.9 * RATE}, "matmul", Status.WARN, "GPU 0 at 90% of the median of its kind"),
    ({"matmul_flops": 0.8 * RATE}, "matmul", Status.FAIL, "GPU 0 at 80%"),
    ({"matmul_flops": 0.97 * RATE}, "matmul", Status.OK, "679 to 700 TFLOP/s"),
    ({"matmul_flops": 0.95 * RATE}, "matmul", Status.OK, "665 to 700 TFLOP/s per GPU"),
    ({"matmul_flops": 0.85 * RATE}, "matmul", Status.WARN, "GPU 0 at 85%"),
    ({"memory_used_bytes": GIB}, "gpus", Status.OK, "clean"),
    ({"memory_used_bytes": GIB + 1}, "gpus", Status.FAIL, "GPU 0 has 1.0 GiB in use"),
    ({"memory_total_bytes": None}, "gpus", Status.OK, "clean"),
    (
        {"matmul_flops": None, "matmul_error": "AcceleratorError: ECC"},
        "matmul",
        Status.FAIL,
        "GPU 0: AcceleratorError: ECC",
    ),
    ({"matmul_flops": None}, "matmul", Status.OK, "700 to 700"),
]


@pytest.mark.parametrize(("changes", "name", "status", "said"), OF_ONE_GPU)
def test_one_gpu_of_eight_decides_about_its_node(
    changes: dict[str, Any], name: str, status: Status, said: str
) -> None:
    found = checks(node(gpus=(gpu(0, **changes), *(gpu(i) for i in range(1, 8)))))[name]
    assert (found.status, said in found.found) == (status, True), found
    assert bool(found.advice) == (status is not Status.OK)


OF_A_NODE: list[tuple[dict[str, Any], str, Status, str]] = [
    ({"xids": {79: 1}}, "xid", Status.FAIL, "1 x Xid 79 (GPU has fallen off the bus)"),
    ({"xids": {63: 2, 13: 9}}, "xid", Status.WARN, "2 x Xid 63 (memory row remapped)"),
    (
        {"xids": {13: 40, 31: 2, 43: 1, 45: 8}},
        "xid",
        Status.OK,
        "none",
    ),  # what programs do to themselves
    ({"xids": None}, "xid", Status.OK, "cannot be read"),
    ({"free_disk_bytes": 100 << 20}, "disk", Status.FAIL, "0.1 GiB free; 0.2 GiB are needed"),
    (
        {"free_disk_bytes": 100 << 20, "home": "/data/me"},
        "disk",
        Status.FAIL,
        "0.1 GiB free in /data/me; 0.2 GiB are needed",
    ),
    ({"free_disk_bytes": 2 * GIB}, "disk", Status.WARN, "2.0 GiB free, less than 5"),
    ({"free_disk_bytes": (200 << 20) - 1}, "disk", Status.FAIL, "0.2 GiB free; 0.2"),
    ({"free_disk_bytes": 200 << 20}, "disk", Status.WARN, "0.2 GiB free, less than 5"),
    ({"free_disk_bytes": 5 * GIB - 1}, "disk", Status.WARN, "5.0 GiB free, less than 5"),
    ({"free_disk_bytes": 5 * GIB}, "disk", Status.OK, "5.0 GiB free"),
    ({"free_disk_bytes": None}, "disk", Status.WARN, "unknown"),
    ({"disk_error": "/sweep is read-only"}, "disk", Status.FAIL, "read-only"),
    ({"clock_offset_seconds": -7.0}, "clock", Status.WARN, "-7.000 s against the head"),
    (
        {"clock_offset_seconds": 2.5, "clock_uncertainty_seconds": 0.9},
        "clock",
        Status.OK,
        "+2.500 s",
        # The round trip may be all of it.
    ),
    ({"clock_offset_seconds": None}, "clock", Status.WARN, "unknown"),
    (
        {"clock_offset_seconds": 2.0, "clock_uncertainty_seconds": None},
        "clock",
        Status.OK,
        "+2.000 s against the head, known to 0.000 s",
    ),
    (
        {"clock_offset_seconds": 2.5, "clock_uncertainty_seconds": None},
        "clock",
        Status.WARN,
        "+2.500 s against the head, known to 0.000 s",
    ),
    (
        {},
        "versions",
        Status.OK,
        "python 3.11.9, ray 2.60.0, torch 2.13.0, cuda 13.0, nccl 2.29, driver 580.1",
    ),
    ({"gpus": ()}, "gpus", Status.OK, "none; 64 cores"),
    ({"gpus": (), "num_cores": None}, "gpus", Status.OK, "none; unknown cores"),
    ({"gpus": (), "xids": None}, "xid", Status.OK, "no GPU"),
    ({"gpus": ()}, "matmul", Status.OK, "not tried"),
    ({"python": "3.12.1"}, "versions", Status.FAIL, "python 3.12.1, elsewhere 3.11.9"),
    ({"nccl": "2.27"}, "versions", Status.FAIL, "nccl 2.27, elsewhere 2.29"),
    ({"driver": "570.9"}, "versions", Status.WARN, "driver 570.9, elsewhere 580.1"),
    ({"packages": {}}, "versions", Status.FAIL, "torch absent, elsewhere 2.13.0"),
]


@pytest.mark.parametrize(("changes", "name", "status", "said"), OF_A_NODE)
def test_a_node_is_judged_by_itself_and_beside_two_others(
    changes: dict[str, Any], name: str, status: Status, said: str
) -> None:
    found = checks(node(**changes), node("n1"), node("n2"))[name]
    assert (found.status, said in found.found) == (status, True), found


def test_only_what_fails_keeps_a_node_from_being_used() -> None:
    warned, failed = node(clock_offset_seconds=9.0), node("n1", xids={48: 1})
    found = judge_nodes([warned, failed, node("n2")])
    assert unfit(found["n0"]) is None
    assert unfit(found["n1"]) == "xid: 1 x Xid 48 (double-bit ECC error)"


def test_where_nodes_are_split_evenly_this_machine_decides() -> None:
    two = node(packages={"torch": "2.13.0"}), node("n1", packages={"torch": "2.9.0"})
    assert checks(*two, own={"torch": "2.9.0"})["versions"].status is Status.FAIL
    assert checks(*two, own={"torch": "2.9.0"}, of="n1")["versions"].status is Status.OK
    assert (
        checks(*two, own={"torch": "1.0"})["versions"].status is Status.OK
    )  # then the first one is right


def test_of_two_devices_that_differ_neither_is_called_slow() -> None:
    pair = node(gpus=(gpu(),)), node("n1", gpus=(gpu(matmul_flops=0.8 * RATE),))
    assert {checks(*pair, of=name)["matmul"].status for name in ("n0", "n1")} == {Status.OK}


def test_of_three_devices_one_is_called_slow() -> None:
    rates = (0.8 * RATE, RATE, RATE)
    three = [node(f"n{i}", gpus=(gpu(matmul_flops=rate),)) for i, rate in enumerate(rates)]
    found = checks(*three)["matmul"]
    assert found.status is Status.FAIL
    assert found.found == "560 TFLOP/s; GPU 0 at 80% of the median of its kind"


def test_a_gpu_that_reaches_half_of_its_data_sheet_is_fast_enough() -> None:
    found = checks(node(gpus=(gpu(matmul_flops=989e12 / 2),)))["matmul"]
    assert (found.status, found.found) == (Status.OK, "494 TFLOP/s")


@pytest.mark.parametrize(("share", "status"), [(0.69, Status.WARN), (0.7, Status.OK)])
def test_cores_are_slow_below_seven_tenths_of_their_kind(share: float, status: Status) -> None:
    rates = (share * 1e12, 1e12, 1e12)
    cores = [node(f"n{i}", gpus=(), cpu_matmul_flops=rate) for i, rate in enumerate(rates)]
    assert checks(*cores)["matmul"].status is status
    # Fewer cores, or others, are of another kind.
    for change in ({"num_cores": 32}, {"cpu_name": None}):
        assert checks(replace(cores[0], **change), *cores[1:])["matmul"].status is Status.OK


def test_gpus_that_are_all_slow_are_seen_by_their_data_sheet() -> None:
    found = checks(*(node(f"n{i}", gpus=(gpu(matmul_flops=400e12),)) for i in range(4)))["matmul"]
    assert found.status is Status.WARN
    assert "GPU 0 at 40% of its data sheet" in found.found


def test_slow_cores_are_told_and_no_more() -> None:
    cores = [
        node(f"n{i}", gpus=(), cpu_matmul_flops=rate)
        for i, rate in enumerate((2e11, 1e12, 1e12, 1e12))
    ]
    found = checks(*cores)["matmul"]
    assert (found.status, found.found) == (
        Status.WARN,
        "0.2 TFLOP/s; cores at 20% of the median of its kind",
    )


def test_other_devices_are_not_compared_with_each_other() -> None:
    slow = node(gpus=(gpu(name="NVIDIA A10", matmul_flops=60e12),))
    assert checks(slow, *(node(f"n{i}") for i in range(1, 4)))["matmul"].status is Status.OK


def test_an_idle_driver_may_hold_more_of_a_larger_gpu() -> None:
    assert baseline_bytes(80 * GIB) == GIB
    assert baseline_bytes(180 * GIB) == int(1.8 * GIB)


def test_every_known_error_number_means_something() -> None:
    assert all(xid.meaning for xid in XIDS.values())


def test_a_node_is_as_sick_as_the_errors_of_its_device() -> None:
    status = {number: checks(node(xids={number: 1}))["xid"].status for number in XIDS}
    failed = {number for number, one in status.items() if one is Status.FAIL}
    warned = {number for number, one in status.items() if one is Status.WARN}
    assert failed == {number for number, xid in XIDS.items() if xid.cause is XidCause.DEVICE} - {94}
    assert warned == {number for number, xid in XIDS.items() if xid.cause is XidCause.NOTICE} | {94}


def test_the_kernels_log_tells_errors_of_gpus_by_their_number() -> None:
    records = [
        "4,1200,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has "
        "fallen off the bus.",
        "4,1201,90000000,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=4711, name=python, Graphics "
        "Exception",
        "6,1202,91000000,-,caller=T1;NVRM: Xid (PCI:0000:5e:00): 13, Ch 00000008",
        "6,1203,92000000,-;usb 1-1: new device",
        " SUBSYSTEM=pci",
    ]
    assert xids_since(records, 0) == {79: 1, 13: 2}
    assert xids_since(records, 5e6) == {79: 1, 13: 2}
    assert xids_since(records, 80e6) == {13: 2}
    assert xids_since(records, 0, addresses={"0000:3b:00"}) == {79: 1, 13: 1}


def test_errors_of_memory_are_unknown_where_no_gpu_counts_them() -> None:
    silent = node(gpus=(gpu(0, ecc_uncorrected=None, ecc_corrected=None),))
    assert checks(silent)["ecc"].found == "unknown"
    assert checks(node(gpus=()))["ecc"].found == "no GPU"
