"""Hints at the word that was probably meant."""

from __future__ import annotations

from orchestrator.core.sweepfile.suggestion import did_you_mean


def test_the_nearest_allowed_word_is_named_and_none_if_all_are_far() -> None:
    assert did_you_mean("lama", ["llama", "command"]) == "; did you mean llama?"
    assert did_you_mean("torch", ["llama", "command"]) == ""
    assert did_you_mean(7, ["llama"]) == ""


def test_of_several_near_words_the_nearest_is_named() -> None:
    assert did_you_mean("modell", ["models", "model", "mode"]) == "; did you mean model?"
