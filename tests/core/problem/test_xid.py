"""Errors of NVIDIA's driver, as the kernel logs them."""

from __future__ import annotations

from orchestrator.core.problem.xid import XIDS, XidCause, first_of, named, xids_in

LOG = """\
[12.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, Ch 00000008
[13.0] usb 1-1: new device
[14.0] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.
"""


def test_numbers_are_found_in_the_lines_of_the_driver_in_their_order() -> None:
    assert xids_in(LOG) == (31, 79)
    assert xids_in("Xid 79") == ()


def test_the_first_number_with_a_cause_is_taken_and_unknown_ones_have_none() -> None:
    assert first_of(xids_in(LOG), XidCause.DEVICE) == 79
    assert first_of((9999,), XidCause.DEVICE) is None


# NVIDIA's catalogue: what an application did, what the device recovered from or noted, what other
# errors leave behind; all else is the hardware.
CAUSES = {
    XidCause.PROGRAM: {13, 31, 32, 43, 69, 137},
    XidCause.NOTICE: {61, 63, 92},
    XidCause.AFTERMATH: {45},
    XidCause.DEVICE: {48, 62, 64, 74, 79, 94, 95, 119, 120, 140},
}


def test_each_number_has_the_cause_of_the_catalogue() -> None:
    found = {
        cause: {number for number, xid in XIDS.items() if xid.cause is cause} for cause in XidCause
    }
    assert found == CAUSES
    # "Contained": the error ends the program that met it alone.
    assert {number for number, xid in XIDS.items() if xid.is_contained} == {94}


def test_a_number_is_named_with_its_meaning_if_it_is_known() -> None:
    assert named(79) == f"Xid 79 ({XIDS[79].meaning})"
    assert named(9999) == "Xid 9999"
