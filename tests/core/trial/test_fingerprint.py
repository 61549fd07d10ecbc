"""The identity of a fingerprint, which keeps numbers apart."""

from __future__ import annotations

from orchestrator.core.trial.fingerprint import Fingerprint, Stack, changes, completes


def fingerprint(**known: str) -> Fingerprint:
    return Fingerprint(
        orchestrator_version="0.1.0",
        git_sha="0123abcd",
        stack=Stack(torch="2.13.0"),
        settings=tuple(sorted(known.items())),
    )


def test_numbers_taken_with_other_settings_of_communication_are_kept_apart() -> None:
    digests = {
        fingerprint().digest,
        fingerprint(NCCL_P2P_DISABLE="1").digest,
        fingerprint(NCCL_P2P_DISABLE="0").digest,
        fingerprint(NCCL_P2P_DISABLE="1", NCCL_ALGO="Ring").digest,
    }
    assert len(digests) == 4


def test_without_settings_a_fingerprint_is_what_it_was_before_they_were_known() -> None:
    # As the program of schema 0004 wrote it.
    assert fingerprint().digest == "ec984f20471d9bed"


def with_packages(**versions: str) -> Fingerprint:
    return fingerprint().model_copy(update={"packages": tuple(sorted(versions.items()))})


def test_another_version_of_a_package_is_another_fingerprint_and_is_named() -> None:
    before = with_packages(torch="2.9.0", numpy="2.1", old="1")
    after = with_packages(torch="2.9.1", numpy="2.1", new="3")
    assert before.digest != after.digest != fingerprint().digest
    assert changes(before, after) == "new 3 added, old 1 removed, torch 2.9.0 -> 2.9.1"
    assert changes(before, before) == ""


def test_what_else_differs_is_named_too() -> None:
    before, after = fingerprint(NCCL_ALGO="Ring"), fingerprint(NCCL_ALGO="Tree")
    after = after.model_copy(update={"git_sha": "4567", "stack": Stack(torch="2.14.0")})
    assert changes(before, after) == (
        "git 0123abcd -> 4567, torch 2.13.0 -> 2.14.0, NCCL_ALGO Ring -> Tree"
    )
    dirty = fingerprint().model_copy(update={"dirty_diff_digest": "x"})
    assert changes(fingerprint(), dirty) == "the program's files"


def test_a_commit_is_named_by_its_first_twelve_digits() -> None:
    before, after = (
        fingerprint().model_copy(update={"git_sha": digits * 8}) for digits in ("01234", "56789")
    )
    assert changes(before, after) == "git 012340123401 -> 567895678956"


def test_of_very_many_changes_the_first_are_named() -> None:
    before, after = (with_packages(**{f"p{n:02}": v for n in range(20)}) for v in ("1", "2"))
    text = changes(before, after)
    assert text.startswith("p00 1 -> 2, p01") and text.endswith("p07 1 -> 2, and 12 more")


def test_a_list_of_packages_that_is_not_known_adds_no_change() -> None:
    assert changes(fingerprint(), with_packages(numpy="2.1")) == ""


def of_program(**told: str) -> Fingerprint:
    """The fingerprint of a program whose Python nobody found, with what the program tells."""
    return fingerprint().model_copy(update={"stack": Stack(device_name="cpu", **told)})


WHOLE = of_program(python="3.12.1", torch="2.9.0").model_copy(
    update={"packages": (("numpy", "2.1"), ("torch", "2.9.0"))}
)


def test_software_that_is_not_known_is_completed_by_what_another_attempt_found() -> None:
    assert completes(WHOLE, of_program())
    assert completes(WHOLE, of_program(torch="2.9.0"))
    assert changes(of_program(), WHOLE) == changes(WHOLE, of_program()) == ""


def test_what_is_known_and_differs_keeps_two_fingerprints_apart() -> None:
    assert not completes(WHOLE, of_program(torch="2.9.1"))
    assert not completes(WHOLE, of_program().model_copy(update={"git_sha": "4567"}))
    other_device = of_program().model_copy(update={"stack": Stack(device_name="gpu")})
    assert not completes(WHOLE, other_device)
    assert not completes(of_program(), WHOLE)
    assert changes(of_program(torch="2.9.1"), WHOLE) == "torch 2.9.1 -> 2.9.0"


def test_without_packages_on_either_side_nothing_is_unknown() -> None:
    """A rank of this program tells its whole stack: a torch without CUDA is another one."""
    without, with_cuda = (
        fingerprint().model_copy(update={"stack": Stack(python="3.12", torch="2.9", cuda=cuda)})
        for cuda in (None, "13.0")
    )
    assert not completes(with_cuda, without)
    assert changes(without, with_cuda) == "cuda 13.0 added"


def test_eight_changes_are_named_and_of_nine_one_is_counted() -> None:
    before = fingerprint(**{f"NCCL_{number}": "1" for number in range(9)})
    for num, end in ((8, "NCCL_7 1 -> 2"), (9, "NCCL_7 1 -> 2, and 1 more")):
        values = {f"NCCL_{number}": "2" if number < num else "1" for number in range(9)}
        assert changes(before, fingerprint(**values)).endswith(end)


def test_settings_that_were_not_recorded_are_no_change() -> None:
    assert changes(fingerprint(), fingerprint(NCCL_ALGO="Ring")) == ""
    assert changes(fingerprint(NCCL_ALGO="Ring"), fingerprint()) == ""


def test_the_code_is_the_commit_and_what_is_not_committed() -> None:
    one = fingerprint()
    assert one.has_code_of(fingerprint(NCCL_ALGO="Ring"))
    for change in ({"git_sha": "4567"}, {"dirty_diff_digest": "x"}):
        assert not one.has_code_of(one.model_copy(update=change))
