from __future__ import annotations

import pytest

from orchestrator.core.frameworks.framework import Framework
from orchestrator.core.frameworks.framework_file import with_settings
from orchestrator.core.frameworks.translation import translate
from tests.core.frameworks.test_translation import job


def test_the_layout_is_written_over_the_users_keys_and_keeps_the_others() -> None:
    files = {
        "nanotron.yaml": {"parallelism": {"tp_mode": "REDUCE_SCATTER", "tp": 8}, "data": [1]},
        "other.txt": "text",
    }
    found = with_settings(files, translate(job(), Framework.NANOTRON))
    assert found["other.txt"] == "text"
    assert found["nanotron.yaml"]["data"] == [1]
    assert found["nanotron.yaml"]["parallelism"]["tp_mode"] == "REDUCE_SCATTER"
    assert found["nanotron.yaml"]["parallelism"]["tp"] == 1
    assert found["nanotron.yaml"]["tokens"]["sequence_length"] == 4096
    assert files["nanotron.yaml"]["parallelism"] == {"tp_mode": "REDUCE_SCATTER", "tp": 8}


def test_a_framework_has_its_file_without_a_users_one_and_none_if_it_takes_arguments() -> None:
    assert set(with_settings({}, translate(job(), Framework.DEEPSPEED))) == {"deepspeed.json"}
    assert with_settings({}, translate(job(), Framework.MEGATRON)) == {}


@pytest.mark.parametrize("stage", [0, 3])
def test_the_layout_replaces_a_users_key_by_its_other_name_too(stage: int) -> None:
    """transformers 5.23 prefers activation_checkpointing, the new name, if both are given."""
    files = {"transformers.json": {"activation_checkpointing": True, "learning_rate": 1e-4}}
    found = with_settings(files, translate(job(zero_stage=stage), Framework.TRANSFORMERS))
    written = found["transformers.json"]
    assert "activation_checkpointing" not in written
    assert written["gradient_checkpointing"] is False
    assert written["learning_rate"] == 1e-4
