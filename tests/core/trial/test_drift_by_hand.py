"""The drift of a machine, computed once more from the formulas of Gaussian values, run by run.

Covariances are sums of products of numbers here, weights follow from the textbook's restricted
likelihood, and layouts' times from that of a Gaussian vector given another.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
import pytest

from orchestrator.core.problem.normal import normal_cdf
from orchestrator.core.trial.drift import fit
from orchestrator.core.trial.drift_prior import prior
from orchestrator.core.trial.run import Run

# Four runs of layout 1 and two of layout 2, at four times on two nodes; two were disturbed.
RUNS = {
    1: [
        Run(step_seconds=1.00, relative_confidence=0.01, at=100.0, nodes=("a",)),
        Run(step_seconds=1.04, relative_confidence=0.02, at=130.0, nodes=("b",), load_sd=0.05),
        Run(step_seconds=1.09, relative_confidence=0.01, at=180.0, nodes=("a", "b")),
        Run(step_seconds=1.13, at=200.0, nodes=("a",)),
    ],
    2: [
        Run(step_seconds=1.30, relative_confidence=0.01, at=130.0, nodes=("a",), load_sd=0.02),
        Run(step_seconds=1.45, relative_confidence=0.015, at=200.0, nodes=("b",)),
    ],
}
ALL = [(key, run) for key, some in RUNS.items() for run in some]
LAST = 3  # the first of the newest runs
STEP_SD = 0.4  # of a step's logarithm
LEVEL_SD = 3.0  # of a layout's
KEPT_WEIGHT = 0.998  # of the likeliest hypotheses
Y = np.log([run.step_seconds for _, run in ALL])


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    drift_sd: float
    length: float
    is_smooth: bool
    steps: tuple[float, float]
    node_sd: float
    run_sd: float
    load_scale: float
    weight: float

    def covariance(self, one: Run, other: Run) -> float:
        """Return that of drift and nodes: Matern 5/2 or exponential, steps, and common nodes."""
        first, second = (((run.at or 0.0) - 100.0) / 100.0 for run in (one, other))
        apart = abs(first - second) / self.length
        r = sqrt(5.0) * apart
        alike = (1 + r + r * r / 3) * exp(-r) if self.is_smooth else exp(-apart)
        found = self.drift_sd**2 * alike
        before, between = self.steps
        if first < before and second < before:
            found += STEP_SD**2
        if before <= first < between and before <= second < between:
            found += STEP_SD**2
        common = len(set(one.nodes) & set(other.nodes))
        return found + self.node_sd**2 * common / sqrt(len(one.nodes) * len(other.nodes))

    def noise(self, run: Run) -> float:
        own = 0.02 if run.relative_confidence is None else run.relative_confidence / 1.96
        return own**2 + (self.load_scale * run.load_sd) ** 2 + self.run_sd**2

    def of_runs(self) -> np.ndarray:
        return np.array([[self.covariance(one, other) for _, other in ALL] for _, one in ALL])

    def whole(self, level_variance: float) -> np.ndarray:
        """Return the covariance of the runs, with noise, and with layouts of such a variance."""
        same = np.array([[float(one == other) for other, _ in ALL] for one, _ in ALL])
        noise = np.diag([self.noise(run) for _, run in ALL])
        found: np.ndarray = self.of_runs() + noise + level_variance * same
        return found

    def log_likelihood(self) -> float:
        """Restricted, of the runs given that the layouts' levels are unknown."""
        design = np.array([[float(key == layout) for layout in RUNS] for key, _ in ALL])
        inverse = np.linalg.inv(self.whole(0.0))
        information = design.T @ inverse @ design
        rest = Y - design @ np.linalg.inv(information) @ design.T @ inverse @ Y
        return float(
            -0.5 * np.linalg.slogdet(self.whole(0.0))[1]
            - 0.5 * np.linalg.slogdet(information)[1]
            - 0.5 * rest @ inverse @ rest
        )


def likely() -> list[tuple[float, Hypothesis]]:
    """The likely hypotheses with their weights. Each interval between runs is one place."""
    times = sorted({run.at for _, run in ALL if run.at is not None})
    of = prior(times, repeated=set(times), is_one_place=False, is_load_repeated=True)
    every = [
        Hypothesis(
            drift_sd=of.drift_sd[i],
            length=of.length[i],
            is_smooth=of.is_smooth[i] > 0,
            steps=(of.step_at[i], of.next_step_at[i]),
            node_sd=of.node_sd[i],
            run_sd=of.run_sd[i],
            load_scale=of.load_scale[i],
            weight=of.weights[i],
        )
        for i in range(len(of.weights))
    ]
    logs = [log(one.weight) + one.log_likelihood() for one in every]
    weights = [exp(each - max(logs)) for each in logs]
    total, passed, kept = sum(weights), 0.0, []
    for i in sorted(range(len(every)), key=lambda i: -weights[i]):
        if passed < KEPT_WEIGHT * total:
            kept.append((weights[i], every[i]))
        passed += weights[i]
    share = sum(weight for weight, _ in kept)
    return [(weight / share, one) for weight, one in kept]


@pytest.fixture(scope="module")
def hypotheses() -> list[tuple[float, Hypothesis]]:
    return likely()


def test_a_run_varies_by_the_mean_of_the_likely_hypotheses(
    hypotheses: list[tuple[float, Hypothesis]],
) -> None:
    variance = sum(weight * one.run_sd**2 for weight, one in hypotheses)
    assert fit(RUNS).run_sd == pytest.approx(sqrt(variance), rel=1e-6)


def test_runs_are_corrected_by_the_mean_drift_up_to_the_last_repeat(
    hypotheses: list[tuple[float, Hypothesis]],
) -> None:
    # Also of a run that says nothing of drift, on a node that nobody knows.
    asked = [*(run for _, run in ALL), Run(step_seconds=9.0, at=150.0, nodes=("c",))]
    wanted = np.zeros(len(asked))
    for weight, one in hypotheses:
        alpha = np.linalg.inv(one.whole(LEVEL_SD**2)) @ (Y - Y.mean())
        drift = [alpha @ [one.covariance(run, other) for _, other in ALL] for run in asked]
        wanted -= weight * (np.array(drift) - drift[LAST])
    assert fit(RUNS).corrections(asked) == pytest.approx(wanted, abs=1e-9)


def test_layouts_take_what_a_gaussian_vector_says_of_them_given_the_runs(
    hypotheses: list[tuple[float, Hypothesis]],
) -> None:
    means, variances, apart, ahead = [], [], [], []
    last = ALL[LAST][1]
    for _, one in hypotheses:
        inverse = np.linalg.inv(one.whole(LEVEL_SD**2))
        # The covariance of each layout's time on the machine of the last repeat with each run.
        to = np.array(
            [
                [LEVEL_SD**2 * (key == layout) + one.covariance(last, run) for key, run in ALL]
                for layout in RUNS
            ]
        )
        alone = LEVEL_SD**2 * np.eye(2) + one.covariance(last, last)
        after = alone - to @ inverse @ to.T
        mean = Y.mean() + to @ inverse @ (Y - Y.mean())
        means.append(mean)
        variances.append(np.diag(after))
        apart.append(after[0, 0] + after[1, 1] - 2 * after[0, 1])
        ahead.append((mean[0] - mean[1]) / sqrt(apart[-1]))
    weights = np.array([weight for weight, _ in hypotheses])
    mean = weights @ np.array(means)
    sd = np.sqrt(weights @ (np.array(variances) + (np.array(means) - mean) ** 2))
    estimate = fit(RUNS).estimate(RUNS, (1, 2))
    assert estimate.keys == (1, 2)
    found, faster = estimate.faster()
    assert found == pytest.approx(mean, abs=1e-7)
    assert estimate.sd() == pytest.approx(sd, rel=1e-5)
    # Layout 1 is the faster: the other beats it so surely.
    assert faster[0] == 1.0
    assert faster[1] == pytest.approx(weights @ normal_cdf(np.array(ahead)), rel=1e-4)
    by = np.array([one[1] - one[0] for one in means])
    spread = np.array(apart) + (by - weights @ by) ** 2
    assert estimate.ahead(1, 2) == pytest.approx((weights @ by, sqrt(weights @ spread)), rel=1e-4)
    assert estimate.ahead(2, 1)[0] == pytest.approx(-estimate.ahead(1, 2)[0])


def test_the_change_is_shown_by_the_layout_whose_runs_differ_most() -> None:
    change = fit(RUNS).change
    assert change is not None
    # 1.13 / 1.00 is more than 1.45 / 1.30.
    assert (change.key, change.first_seconds, change.then_seconds) == (1, 1.00, 1.13)
    assert change.apart_seconds == 100.0
    largest = max(abs(fit(RUNS).corrections([run for _, run in ALL])))
    assert change.largest_correction == pytest.approx(exp(largest) - 1)
