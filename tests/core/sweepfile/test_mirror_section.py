"""The section `mirror`: a folder, or an address by the name of a variable; never an address."""

from __future__ import annotations

import pytest

from orchestrator.core.errors import SpecInvalid
from orchestrator.core.sweepfile.mirror_section import MirrorSection
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.spec_yaml import load
from tests.core.sweepfile.bounds import check_bounds
from tests.core.sweepfile.test_notify_section import FILE

ADDRESS = "https://me:verysecret@mlflow.example"


def spec(mirror: str) -> SweepSpec:
    return load(f"{FILE}mirror: {mirror}\n", source="t.yaml")


def test_a_variable_has_the_address_and_a_folder_needs_none() -> None:
    by_variable = spec("{mlflow: '${MLFLOW_TRACKING_URI}'}").mirror
    assert by_variable is not None and by_variable.variable == "MLFLOW_TRACKING_URI"
    folders = spec("{mlflow: ./mlruns, wandb: ~/wandb}").mirror
    assert folders is not None and folders.variable is None
    assert (folders.mlflow, folders.wandb) == ("./mlruns", "~/wandb")


def test_it_is_no_condition_and_a_file_without_it_is_stored_as_before() -> None:
    found, plain = spec("{wandb: runs}"), load(FILE, source="t.yaml")
    assert SweepSpec.model_validate_json(found.model_dump_json()) == found
    assert found.conditions() == plain.conditions()
    assert "mirror" not in plain.model_dump_json()


@pytest.mark.parametrize(
    ("mirror", "said"),
    [
        (f"{{mlflow: '{ADDRESS}'}}", "mirror.mlflow: an address may hold a password"),
        ("{mlflow: 'postgresql:verysecret'}", "mirror.mlflow: an address may hold a password"),
        (f"{{wandb: '{ADDRESS}'}}", "mirror.wandb: runs of W&B are written offline"),
        ("{wandb: '${WANDB}'}", "mirror.wandb: runs of W&B are written offline"),
        ("{mlflow: 'x/${HOME}'}", "mirror.mlflow: write a folder without `$`"),
        ("{mlflow: ''}", "mirror.mlflow"),
        ("{}", "give mlflow, wandb or both"),
        ("mlruns", "mirror"),
        ("{mlfow: runs}", "did you mean mlflow?"),
    ],
)
def test_a_mistake_is_named_and_no_address_repeated(mirror: str, said: str) -> None:
    with pytest.raises(SpecInvalid) as mistake:
        spec(mirror)
    assert said in str(mistake.value)
    assert "verysecret" not in str(mistake.value)


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_folder_has_up_to_4096_characters(name: str) -> None:
    check_bounds(
        MirrorSection,
        name,
        taken=["x", "x" * 4096],
        refused=["", "x" * 4097, " x", "x ", "a\0b", "x/$HOME"],
    )
