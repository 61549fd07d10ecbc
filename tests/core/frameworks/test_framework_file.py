from __future__ import annotations

from orchestrator.core.frameworks.framework_file import with_settings
from orchestrator.core.frameworks.translation import Framework, translate
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
