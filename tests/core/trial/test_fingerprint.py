"""The identity of a fingerprint, which keeps numbers apart."""

from __future__ import annotations

from orchestrator.core.trial.fingerprint import Fingerprint, Stack


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
