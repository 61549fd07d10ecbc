from __future__ import annotations

import pytest

from orchestrator.core.frameworks.framework import Framework
from orchestrator.core.frameworks.translation import translate, version_remark
from orchestrator.core.frameworks.tried_versions import TriedVersions
from tests.core.frameworks.test_translation import job

SEVERAL = TriedVersions(package="trainer", oldest="5.17", newest="5.24")


@pytest.mark.parametrize(
    ("installed", "is_tried"),
    [
        ("5.16.9", False),
        ("5.17", True),
        ("5.17.0", True),
        ("5.20.2.post1", True),
        ("5.24.3", True),
        ("5.25.0.dev0", False),
        ("6", False),
        ("10.0", False),
        ("unknown", True),
    ],
)
def test_a_version_is_tried_from_the_first_of_the_oldest_to_the_last_of_the_newest(
    installed: str, is_tried: bool
) -> None:
    expected = None if is_tried else installed
    assert SEVERAL.other_than_tried({"trainer": installed}) == expected


def test_a_package_that_is_not_installed_is_no_other_version() -> None:
    assert SEVERAL.other_than_tried({"other": "1"}) is None


def test_one_version_is_no_range_in_words() -> None:
    assert str(SEVERAL) == "trainer 5.17 to 5.24"
    assert str(TriedVersions(package="a", oldest="0.3", newest="0.3")) == "a 0.3"


# As HfArgumentParser of transformers says it.
REFUSED = "ValueError: Some keys are not used by the HfArgumentParser: ['gradient_checkpointing']"


def test_a_failure_that_names_a_setting_is_told_the_versions_that_were_tried() -> None:
    found = translate(job(), Framework.TRANSFORMERS)
    remark = version_remark(found, {"transformers": "6.0.0"}, REFUSED)
    assert remark is not None
    assert remark.startswith(
        "`framework: transformers` writes gradient_checkpointing; it was tried"
    )
    assert remark.endswith("and this is 6.0.0: if that is the cause, install one of those")
    assert version_remark(found, {"transformers": "5.20.0"}, REFUSED) is None
    assert version_remark(found, {}, REFUSED) is None
    assert version_remark(found, {"transformers": "6.0.0"}, "ValueError: my own mistake") is None


def test_a_framework_without_versions_has_no_remark() -> None:
    found = translate(job(), Framework.MEGATRON)
    assert version_remark(found, {"megatron-core": "1"}, "unrecognized: --seq-length") is None


def test_a_setting_of_a_section_is_found_by_its_last_name() -> None:
    found = translate(job(zero_stage=3), Framework.TORCHTITAN)
    text = "Unrecognized options: --parallelism.fsdp_reshard_after_forward"
    remark = version_remark(found, {"torchtitan": "0.4"}, text)
    assert remark is not None and "writes parallelism.fsdp_reshard_after_forward;" in remark
