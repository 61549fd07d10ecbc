"""Proposals of a search: a layout, its predictions, and the reason in one line for people."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, isnan

from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.memory_text import memory_of_limit_text, memory_text
from orchestrator.core.search.planner import Candidates
from orchestrator.core.search.proposer import ExpectedOutcome, Reason
from orchestrator.core.trial.limits import PredictedStep
from orchestrator.search.score_scale import ScoreScale


@dataclass(frozen=True, kw_only=True)
class Proposal:
    layout: Layout
    why: str  # one line, for people
    predicted_tokens_per_second_per_gpu: float | None
    predicted_memory_bytes: int | None
    # None: nothing is predicted on this device.
    predicted_step: PredictedStep | None = None


@dataclass(frozen=True, kw_only=True)
class DoubtfulResult:
    """A measured layout to measure once more."""

    layout: Layout
    why: str


class Proposals:
    """Makes the proposals of one cell from the rows that its search chooses."""

    def __init__(self, candidates: Candidates, scores: ScoreScale) -> None:
        self._candidates, self._scores = candidates, scores
        self._step_log_sd = candidates.step_log_sd()

    def of(self, row: int, reason: Reason, *, rank: int) -> Proposal:
        """Return the proposal of a row that the search chose.

        `rank`: its place by prediction, from 0.
        """
        tokens = float(self._candidates.tokens_per_second_per_gpu[row])
        memory = float(self._candidates.memory_bytes[row])
        if isinstance(reason, str):
            expected = None
            ranked = self._ranked(row, rank)
            why = f"{reason}; {ranked}" if reason else ranked
        else:
            expected = reason
            why = self._in_words(row, expected)
            # Measured neighbours predict a layout also on a device that physics does not know.
            is_predicted = not isnan(tokens) or expected.improvement is not None
            if expected.score is not None and is_predicted:
                speed = self._scores.tokens_per_second_per_gpu(expected.score)
                tokens = tokens if speed is None else speed
            if expected.memory_bytes is not None and not isnan(memory):
                memory = expected.memory_bytes
        return Proposal(
            layout=self._candidates.table.layout(row),
            why=why,
            predicted_tokens_per_second_per_gpu=None if isnan(tokens) else tokens,
            predicted_memory_bytes=None if isnan(memory) else int(memory),
            predicted_step=self.predicted_step(row, expected),
        )

    def predicted_step(
        self, row: int, expected: ExpectedOutcome | None = None
    ) -> PredictedStep | None:
        """The step time by physics, or by the search's model if measured trials show it longer."""
        if self._step_log_sd is None:
            return None
        seconds, log_sd = float(self._candidates.step_seconds[row]), self._step_log_sd
        if expected is not None and expected.score is not None and exp(expected.score) > seconds:
            seconds, log_sd = exp(expected.score), max(expected.score_sd, log_sd)
        return PredictedStep(seconds=seconds, log_sd=log_sd)

    def _in_words(self, row: int, expected: ExpectedOutcome) -> str:
        """Describe what `auto` expects, for example:

        predicted 9,800 tokens/s/GPU, give or take a factor of 1.10 (6% better than the best so
        far), 71.0 of 79.0 GiB, 93% likely to fit
        """
        if expected.score is None:
            return "far from every known layout; nothing is predicted yet"
        if expected.improvement is None and isnan(self._candidates.step_seconds[row]):
            return "the least work per token; nothing is predicted on this device yet"
        score, factor = self._scores.text(expected.score), exp(expected.score_sd)
        facts = [f"predicted {score}, give or take a factor of {factor:.2f}"]
        if expected.front_gain is not None:
            facts[0] += f" (expected to enlarge the front by {expected.front_gain:.1%})"
        elif (better := expected.improvement) is not None:
            gain = self._scores.gain(better)
            word = "better" if gain > 0 else "worse"
            facts[0] += f" ({abs(gain):.0%} {word} than the best so far)"
        limit = self._candidates.memory_limit_bytes
        if expected.memory_bytes is not None and limit is not None:
            facts.append(memory_of_limit_text(expected.memory_bytes, limit))
        if expected.fits is not None:
            facts.append(f"{expected.fits:.0%} likely to fit")
        if expected.fails > 0.15:
            facts.append(f"{expected.fails:.0%} likely to fail as similar layouts did")
        return ", ".join(facts)

    def _ranked(self, row: int, rank: int) -> str:
        candidates = self._candidates
        tokens, memory = candidates.tokens_per_second_per_gpu[row], candidates.memory_bytes[row]
        limit = candidates.memory_limit_bytes
        facts = []
        if not isnan(tokens):
            facts.append(f"{tokens:,.0f} tokens/s/GPU")
        if not isnan(memory):
            peak = float(memory)
            needs = memory_text(peak) if limit is None else memory_of_limit_text(peak, limit)
            facts.append(needs)
        if not candidates.fits[row]:
            facts.append("predicted not to fit")
        ranked = f"prediction ranks it {rank + 1} of {len(candidates)}"
        return f"{ranked}: {', '.join(facts)}" if facts else ranked
