"""Names in braces, and what is said of one that is not known."""

from __future__ import annotations

import pytest

from orchestrator.core.sweepfile.template import checked


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
