"""The section `notify`: a webhook by the name of a variable, or a command; never an address."""

from __future__ import annotations

import pytest

from orchestrator.core.errors import SpecInvalid
from orchestrator.core.sweepfile.notify_section import NotifyTarget
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.spec_yaml import load
from tests.core.sweepfile.bounds import check_bounds

FILE = """
name: t
model: llama-tiny
gpus: 2
sequence_length: 64
global_batch_size: 8
"""
ADDRESS = "https://hooks.example/services/T0/B0/verysecret"


def spec(notify: str) -> SweepSpec:
    return load(f"{FILE}notify: {notify}\n", source="t.yaml")


def test_one_target_or_several() -> None:
    (one,) = spec("{url: '${SLACK_URL}'}").notify
    assert one.variable == "SLACK_URL" and one.command is None
    first, second = spec("[{url: '${A}'}, {command: [./tell.sh, -q]}]").notify
    assert first.variable == "A" and second.command == ("./tell.sh", "-q")


def test_without_it_the_stored_file_is_as_before() -> None:
    assert "notify" not in load(FILE, source="t.yaml").model_dump_json()


def test_a_stored_file_reads_the_same_and_is_no_condition() -> None:
    found = spec("[{url: '${A}'}, {command: [./tell.sh]}]")
    assert SweepSpec.model_validate_json(found.model_dump_json()) == found
    assert found.conditions() == load(FILE, source="t.yaml").conditions()


@pytest.mark.parametrize(
    ("notify", "said"),
    [
        (f"{{url: '{ADDRESS}'}}", "notify.url: a webhook's URL is a secret"),
        (f"{{url: '{ADDRESS}/${{TOKEN}}'}}", "notify.url: a webhook's URL is a secret"),
        (f"'{ADDRESS}'", "expected a section"),
        (f"{{urls: '{ADDRESS}'}}", "urls"),
        (f"{{command: '{ADDRESS}'}}", "expected a list of words"),
        ("{command: []}", "the list is empty"),
        ("{}", "give either url or command"),
        ("{url: '${A}', command: [x]}", "give either url or command"),
        ("[{}, {}, {}, {}, {}, {}, {}, {}, {}]", "9 targets; at most 8"),
    ],
)
def test_a_mistake_is_named_and_no_address_repeated(notify: str, said: str) -> None:
    with pytest.raises(SpecInvalid) as mistake:
        spec(notify)
    assert said in str(mistake.value)
    assert "verysecret" not in str(mistake.value)


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        ([["x"], ["x"] * 64], [[], ["x"] * 65]),
        ([["x" * 4096]], [[""], ["x" * 4097], ["a\0b"]]),
    ],
)
def test_a_command_has_up_to_64_words_of_a_line(taken: list[object], refused: list[object]) -> None:
    check_bounds(NotifyTarget, "command", taken=taken, refused=refused)


def test_eight_targets_are_not_too_many() -> None:
    assert len(spec("[" + "{command: [x]}, " * 8 + "]").notify) == 8


@pytest.mark.parametrize(("length", "is_name"), [(255, True), (256, False)])
def test_a_variable_has_a_name_of_up_to_255_characters(length: int, *, is_name: bool) -> None:
    reference = "${" + "A" * length + "}"
    given = (
        {"taken": [reference], "refused": []} if is_name else {"taken": [], "refused": [reference]}
    )
    check_bounds(NotifyTarget, "url", **given)
