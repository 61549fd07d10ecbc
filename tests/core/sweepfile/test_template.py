"""Names in braces, and what is said of one that is not known."""

from __future__ import annotations

import pytest

from orchestrator.core.sweepfile.template import checked, fill_known, names_in


@pytest.mark.parametrize(
    ("template", "meant"),
    [
        ("--mbs={mbs}", "micro_batch_size"),
        ("{tp}", "tensor_parallel_size"),
        ("{ga}", "grad_accum_steps"),
        ("{micro_batch}", "micro_batch_size"),
    ],
)
def test_a_short_or_misspelled_name_is_answered_with_the_one_that_is_meant(
    template: str, meant: str
) -> None:
    with pytest.raises(ValueError, match=rf"did you mean \{{{meant}\}}\?"):
        checked(template)


def test_braces_that_are_no_name_are_answered_with_how_they_stay() -> None:
    with pytest.raises(ValueError, match=r"write \{\{ and \}\} for braces that stay"):
        checked("{wq}")


def test_names_are_those_in_single_braces() -> None:
    assert names_in("--a={micro_batch_size} {{b}} {seed}{seed}") == {"micro_batch_size", "seed"}
    assert names_in("{{}}") == set()


def test_a_template_is_filled_only_if_all_of_its_names_are_known() -> None:
    values = {"seed": "7", "rank": "0"}
    assert fill_known("{seed}-{{x}}", values) == "7-{x}"
    assert fill_known("plain", {}) == "plain"
    assert fill_known("{seed}{node}", values) is None


@pytest.mark.parametrize(("length", "is_whole"), [(78, True), (79, False)])
def test_a_long_template_is_shown_up_to_80_characters(length: int, *, is_whole: bool) -> None:
    template = "{wq}".ljust(length, "x")
    with pytest.raises(ValueError, match="is not a name that can be filled in") as caught:
        checked(template)
    shown = repr(template) if is_whole else f"{repr(template)[:77]}..."
    assert str(caught.value).startswith(f"'{{wq}}' in {shown} is not a name")
