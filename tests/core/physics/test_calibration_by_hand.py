"""Calibration, fits and bands by arithmetic: small cases whose result is known exactly."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, log2, sqrt

import numpy as np
import pytest

from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.physics.calibration_fit import calibrate
from orchestrator.core.physics.collective_group import ring_seconds
from orchestrator.core.physics.link_sample import Collective, LinkSample, Span
from orchestrator.core.physics.links import Network, fit_links, network_of
from orchestrator.core.physics.memory import predict_memory
from orchestrator.core.physics.observation import Observation, by_cell
from orchestrator.core.physics.prediction_band import FitErrors, step_spreads
from orchestrator.core.physics.residual import Residual, left_out_errors, places_of
from orchestrator.core.physics.robust_fit import fit, jacobian, robust_sd
from orchestrator.core.physics.step_time import predict_step_time
from orchestrator.core.physics.step_time_constants import CONSTANTS, PRIORS, StepTimeConstants
from orchestrator.core.physics.trainer import GIB, MEMORY_CONSTANTS, TRAINERS, Trainer
from orchestrator.core.problem.arrays import Floats
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.layout_table import BLOCK_ROWS, LayoutTable
from orchestrator.core.problem.model_shape import PRESETS

H100 = DEVICES["h100-sxm"]
MODEL = PRESETS["llama-3.2-1b"]


def cell(num_gpus: int = 1, *, batch: int = 16, model: str = "llama-3.2-1b") -> Cell:
    return Cell(
        model=PRESETS[model], num_gpus=num_gpus, sequence_length=4096, global_batch_size=batch
    )


def alone(micro_batch_size: int = 1) -> Layout:
    return Layout(micro_batch_size=micro_batch_size, grad_accum_steps=16 // micro_batch_size)


# Priors


@pytest.mark.parametrize(
    ("name", "median", "log_sd"),
    # Published figures are in their docstrings; the rest are beliefs.
    [
        ("peak_efficiency", 0.6, 0.15),
        ("half_efficiency_seconds", 60e-6, 0.8),
        ("kernel_seconds_per_layer", 150e-6, 0.8),
        ("host_seconds_per_layer", 0.6e-3, 0.7),
        ("activation_traffic_bytes", 60.0, 0.5),
        ("intra_node_share", 0.6, 0.35),
        ("inter_node_share", 0.4, 0.5),
        ("collective_seconds", 30e-6, 0.7),
        ("inter_node_collective_seconds", 150e-6, 0.8),
        ("exposed_data_parallel_share", 0.5, 0.4),
        ("exposed_zero_1_share", 0.9, 0.3),
        ("zero_1_passes", 3.0, 0.3),
        ("pipeline_hop_seconds", 300e-6, 1.0),
        ("bubble_factor", 1.1, 0.25),
        ("optimizer_traffic_bytes", 28.0, 0.4),
        ("fixed_seconds", 5e-3, 1.0),
        ("node_congestion", 0.1, 0.8),
    ],
)
def test_a_constant_is_believed_to_be_so_before_any_trial(
    name: str, median: float, log_sd: float
) -> None:
    assert (PRIORS[name].median, PRIORS[name].log_sd) == (median, log_sd)
    assert getattr(StepTimeConstants(), name) == median
    prior, at = Calibration.prior(), CONSTANTS.index(name)
    assert prior.log_constants[at] == pytest.approx(log(median))
    assert prior.step_covariance[at, at] == pytest.approx(log_sd**2)
    assert np.count_nonzero(prior.step_covariance) == len(CONSTANTS)


@pytest.mark.parametrize(
    ("share", "of", "measured"),
    [
        # Galvatron's table of A100: 8 in one node over 300 GB/s, 16 in two over 200 GB/s.
        ("intra_node_share", 300e9, 155e9),
        ("inter_node_share", 200e9, 44.7e9),
    ],
)
def test_published_bandwidths_are_not_surprising(share: str, of: float, measured: float) -> None:
    prior = PRIORS[share]
    assert abs(log(measured / of / prior.median)) < 1.2 * prior.log_sd


# 8 B: fp32 master and two moments; 6: in bf16 and summed in fp32; 4: in fp32.
NAMED = {
    "llama": {},
    "nanotron": {
        "gradient_bytes": 6.0,
        "bucket_bytes": 1.0,
        "activation_factor": 1.05,
        "pipeline_activation_factor": 1.2,
        "stages_by_work": True,
        "logit_bytes": 10.5,
        "accumulated_logits": 0.2,
        "reserve_bytes": 0.25 * GIB,
        "gathered_inputs": 0.0,
        "gathered_inputs_in_pipeline": 0.7,
    },
    "megatron": {
        "gradient_bytes": 4.0,
        "gathered_inputs": 0.0,
        "gathered_inputs_in_pipeline": 0.0,
        "reserve_bytes": 1.0 * GIB,
    },
    "fsdp": {"gathered_units": 3.0, "reserve_bytes": 2.0 * GIB},
    "bf16-states": {
        "optimizer_bytes": 4.0,
        "stepping_bytes": 2.0,
        "logit_bytes": 8.0,
        "gathered_units": 3.0,
    },
}
NAMED["nanotron-early"] = {
    **NAMED["nanotron"],
    "gathered_inputs": 1.0,
    "gathered_inputs_in_pipeline": 0.0,
}
DEFAULTS = {
    "parameter_bytes": 2.0,
    "gradient_bytes": 2.0,
    "bucket_bytes": 0.0,
    "optimizer_bytes": 12.0,
    "stepping_bytes": 0.0,
    "eager_attention": False,
    "repeats_keys": (),
    "sequence_parallel": True,
    "gathered_inputs": 1.0,
    "gathered_inputs_in_pipeline": 1.0,
    "activation_factor": 1.0,
    "pipeline_activation_factor": 1.0,
    "stages_by_work": False,
    "logit_bytes": 12.0,
    "accumulated_logits": 0.0,
    "gathered_units": 2.0,
    "reserve_bytes": 0.0,
    "fully_shards": False,
    "replicas": 1,
    "scatters_each": True,
    "reduce_bytes": 0.0,
    "reduction_bucket_bytes": 26_214_400.0,
    "copied_reductions": 0.0,
    "frees_gradients": False,
    "loss_chunks": 0,
    "pipeline_buffers": False,
    "gathers_context": False,
    "has_masks": False,
    "compiled": False,
    "keeps_recomputed_products": False,
    "launch_share": 1.0,
    "traffic_share": 1.0,
    "half_efficiency_share": 1.0,
    "host_share": 0.0,
    "counted": False,
    "usable_share": 0.955,
    "traced": None,
}


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_a_named_trainer_differs_from_plain_torch_in_what_its_comment_says(name: str) -> None:
    expected = {**DEFAULTS, **NAMED[name]}
    found = {part: getattr(TRAINERS[name], part) for part in Trainer.__slots__}
    assert found == {part: pytest.approx(value) for part, value in expected.items()}


COUNTED_SDS = [0.03, 0.05, 0.05, 0.05, 0.01, 0.1, 0.1, 1.0]
KNOWN_SDS = [0.12, 0.2, 0.25, 0.2, 0.05, 0.5, 0.5, 1.0]
UNKNOWN_SDS = [0.35, sqrt(0.2**2 + 0.35**2), 0.6, 0.5, 0.25, 0.5, 0.5, 2.0]


def test_memory_of_a_known_trainer_is_uncertain_by_so_much_and_of_an_unknown_one_by_more() -> None:
    known, unknown = (Calibration.prior(is_known=known) for known in (True, False))
    counted = Calibration.prior(replace(Trainer(), counted=True), is_known=True)
    assert np.sqrt(np.diag(counted.memory_covariance)) == pytest.approx(COUNTED_SDS)
    assert np.sqrt(np.diag(known.memory_covariance)) == pytest.approx(KNOWN_SDS)
    assert np.sqrt(np.diag(unknown.memory_covariance)) == pytest.approx(UNKNOWN_SDS)
    # Kernels keep as much in pipelines as without.
    plain = MEMORY_CONSTANTS.index("activation_factor")
    pipeline = MEMORY_CONSTANTS.index("pipeline_activation_factor")
    assert unknown.memory_covariance[plain, pipeline] == pytest.approx(0.35**2)
    assert unknown.memory_covariance[pipeline, plain] == pytest.approx(0.35**2)
    assert np.count_nonzero(known.memory_covariance) == len(MEMORY_CONSTANTS)
    assert np.count_nonzero(unknown.memory_covariance) == len(MEMORY_CONSTANTS) + 2


def test_memory_constants_are_logarithms_shares_and_a_reserve_in_gib() -> None:
    trainer = Trainer(
        activation_factor=2.0,
        logit_bytes=8.0,
        optimizer_bytes=0.0,
        gathered_inputs=0.25,
        gathered_inputs_in_pipeline=0.75,
        reserve_bytes=3.0 * GIB,
    )
    prior = Calibration.prior(trainer)
    found = dict(zip(MEMORY_CONSTANTS, prior.memory_values, strict=True))
    assert found["activation_factor"] == pytest.approx(log(2))
    assert found["logit_bytes"] == pytest.approx(log(8))
    assert found["optimizer_bytes"] == pytest.approx(log(1e-3))
    assert (found["gathered_inputs"], found["reserve_bytes"]) == (0.25, 3.0)
    assert found["gathered_inputs_in_pipeline"] == 0.75
    assert prior.trainer.logit_bytes == pytest.approx(8.0)
    assert prior.trainer.reserve_bytes == 3.0 * GIB
    assert prior.trainer.optimizer_bytes == pytest.approx(1e-3)
    negative = replace(prior, memory_values=np.where(prior.memory_values == 3.0, -1.0, 0.0))
    assert negative.trainer.reserve_bytes == 0.0


def test_relatives_differ_by_three_tenths_of_what_was_believed() -> None:
    prior = Calibration.prior(is_known=True)
    wider = prior.widened()
    assert np.diag(wider.step_covariance) == pytest.approx(1.09 * np.diag(prior.step_covariance))
    assert np.diag(wider.memory_covariance) == pytest.approx(
        1.09 * np.diag(prior.memory_covariance)
    )
    assert np.count_nonzero(wider.step_covariance) == len(CONSTANTS)


def test_measured_links_replace_what_was_believed_of_them() -> None:
    network = Network(
        names=("inter_node_share", "node_congestion"),
        log_means=np.array([-1.0, -2.0]),
        log_covariance=np.array([[0.04, 0.01], [0.01, 0.09]]),
        num_samples=3,
        residual_sd=0.1,
    )
    correlated = replace(
        Calibration.prior(), step_covariance=np.full((len(CONSTANTS), len(CONSTANTS)), 0.5)
    )
    found = correlated.informed(network)
    at = [CONSTANTS.index(name) for name in network.names]
    other = CONSTANTS.index("peak_efficiency")
    assert found.log_constants[at].tolist() == [-1.0, -2.0]
    assert found.log_constants[other] == pytest.approx(log(0.6))
    assert found.step_covariance[np.ix_(at, at)].tolist() == [[0.04, 0.01], [0.01, 0.09]]
    assert (found.step_covariance[at[0], other], found.step_covariance[other, at[0]]) == (0, 0)
    assert found.step_covariance[other, other] == 0.5
    assert network.value("inter_node_share") == pytest.approx(exp(-1))


# Predictions


def test_a_peak_depends_on_a_factor_by_the_share_of_what_it_multiplies() -> None:
    table = LayoutTable.of([alone(4), alone(1), alone(2)])
    parts = predict_memory(table, cell(), Trainer())
    share = parts.activations / parts.total
    found = Calibration.prior(is_known=True).predict(table, cell(), H100, gpus_per_node=8)
    assert found.activation_share == pytest.approx(share, rel=1e-3)
    slopes = dict(zip(MEMORY_CONSTANTS, found.memory_jacobian[0], strict=True))
    assert slopes["optimizer_bytes"] == pytest.approx(parts.optimizer[0] / parts.total[0], rel=1e-3)
    assert slopes["reserve_bytes"] == pytest.approx(GIB / parts.total[0], rel=1e-3)
    # A relative's constants are off by 0.3 of what was believed; the formula, by 8 %.
    of_constants = (found.memory_jacobian[0] * 0.3 * np.array(KNOWN_SDS)) ** 2
    assert found.memory_relative_sd[0] == pytest.approx(sqrt(bounded(of_constants) + 0.08**2))
    unknown = Calibration.prior().predict(table, cell(), H100, gpus_per_node=8)
    assert not Calibration.prior().knows_trainer
    variance = (unknown.memory_jacobian[0] * UNKNOWN_SDS) ** 2
    assert unknown.memory_relative_sd[0] == pytest.approx(sqrt(bounded(variance) + 0.08**2))


def bounded(variance: Floats) -> float:
    """The log variance by the variances of five factors and three amounts."""
    share = variance[5:].sum() / variance.sum()
    return float((1 - share) * variance.sum() + share * log(1 + variance.sum()))


def test_a_reserve_far_larger_than_the_peak_leaves_a_band_that_a_person_can_use() -> None:
    """A GiB more or less is 40 times the peak of a tiny model."""
    tiny = replace(cell(), model=PRESETS["llama-tiny"], sequence_length=64)
    found = Calibration.prior(is_known=True).predict(
        LayoutTable.of([alone(4)]), tiny, H100, gpus_per_node=8
    )
    assert abs(found.memory_jacobian[0, MEMORY_CONSTANTS.index("reserve_bytes")]) > 10
    (highest,) = found.memory_bytes * found.memory_band()[1]
    assert 0.1 * GIB < highest < 2 * GIB
    assert found.probability_of_fitting(80.0 * GIB)[0] > 0.98


@pytest.mark.parametrize(("is_known", "sd"), [(True, 1.0), (False, 2.0)])
def test_a_large_amount_moves_a_search_s_belief_by_the_logarithm_of_its_variance(
    sd: float, *, is_known: bool
) -> None:
    """A GiB more or less is 40 times the peak: the log variance is log(1 + 40²), not 40²."""
    tiny = replace(cell(), model=PRESETS["llama-tiny"], sequence_length=64)
    prior = Calibration.prior(is_known=is_known)
    found = prior.predict(LayoutTable.of([alone(4)]), tiny, H100, gpus_per_node=8)
    reserve = MEMORY_CONSTANTS.index("reserve_bytes")
    slope = found.memory_jacobian[0, reserve]
    assert slope > 10
    moved = found.memory_basis[0, reserve] * sd
    assert moved == pytest.approx(sqrt(log(1 + (slope * sd) ** 2)))
    # A factor stays lognormal, however large.
    assert found.memory_basis[0, :5].tolist() == found.memory_jacobian[0, :5].tolist()


def test_a_small_amount_moves_a_search_s_belief_by_its_derivative() -> None:
    table = LayoutTable.of([alone(4)])
    found = Calibration.prior().predict(table, cell(model="llama-3.1-8b"), H100, gpus_per_node=8)
    assert found.memory_bytes[0] > 100 * GIB
    assert found.memory_basis == pytest.approx(found.memory_jacobian, rel=1e-3)


def test_a_step_is_uncertain_by_its_constants_and_the_formula() -> None:
    table = LayoutTable.of([alone()])
    prior = Calibration.prior()
    found = prior.predict(table, cell(), H100, gpus_per_node=8)
    variance = (found.step_jacobian[0] ** 2 * np.diag(prior.step_covariance)).sum()
    assert found.log_step_sd[0] == pytest.approx(sqrt(variance))
    total = prior.step_log_sd(table, cell(), H100, gpus_per_node=8)
    assert total[0] == pytest.approx(sqrt(variance + 0.2**2))
    # All of the time depends on the efficiency but the traffic, launches and the fixed part.
    parts = predict_step_time(table, cell(), H100, gpus_per_node=8)
    fixed = dict(zip(CONSTANTS, found.step_jacobian[0], strict=True))["fixed_seconds"]
    assert fixed == pytest.approx(parts.fixed[0] / parts.total[0], rel=1e-3)


def test_bands_hold_four_of_five() -> None:
    found = Calibration.prior(is_known=True).predict(
        LayoutTable.of([alone()]), cell(), H100, gpus_per_node=8
    )
    below, above = found.memory_band()
    assert below[0] == pytest.approx(exp(-1.2816 * 0.08))
    assert above[0] == pytest.approx(exp(1.2816 * found.memory_relative_sd[0]))
    low, high = found.step_band()
    assert (low[0], high[0]) == pytest.approx((exp(-1.2816 * 0.15), exp(1.2816 * 0.15)))


def test_nine_of_ten_fit_that_are_predicted_so_far_below_the_limit() -> None:
    found = Calibration.prior().predict(LayoutTable.of([alone()]), cell(), H100, gpus_per_node=8)
    peak = found.memory_bytes[0]
    far = peak * exp(1.2816 * found.memory_relative_sd[0])
    assert found.probability_of_fitting(far)[0] == pytest.approx(0.9, abs=1e-4)
    assert found.probability_of_fitting(peak)[0] == pytest.approx(0.5, abs=1e-4)
    # Above the limit only the formula errs, by 8 %.
    assert found.probability_of_fitting(peak * exp(-1.2816 * 0.08))[0] == pytest.approx(
        0.1, abs=1e-4
    )


def test_corrections_of_a_cell_and_of_such_layouts_are_added() -> None:
    table = LayoutTable.of([alone()])
    places = places_of(table, cell())
    residual = Residual(places=places, weights=np.array([5.0]))
    prior = replace(
        Calibration.prior(),
        cell_offsets={(cell(), H100.name): 0.25},
        residuals={H100.name: (residual, residual)},
    )
    # Two residuals of 5 at distance 0, each times 0.2².
    assert prior.residual(table, cell(), H100)[0] == pytest.approx(0.4)
    assert prior.log_correction(table, cell(), H100)[0] == pytest.approx(0.65)
    plain = Calibration.prior().expect(table, cell(), H100, gpus_per_node=8)[0][0]
    seconds = prior.expect(table, cell(), H100, gpus_per_node=8)[0][0]
    assert seconds == pytest.approx(plain * exp(0.65))


# Fits


def test_small_residuals_are_weighed_against_the_prior() -> None:
    """w (x - a)² + x² / 4 is least at w a / (w + 1/4), with curvature w + 1/4."""
    for weight in (1.0, 3.0):
        found = fit(
            lambda x: x - 1e-3,
            mean=np.zeros(1),
            covariance=np.eye(1) * 4.0,
            weights=np.array([weight]),
        )
        assert found.parameters[0] == pytest.approx(1e-3 * weight / (weight + 0.25), rel=1e-3)
        assert found.covariance[0, 0] == pytest.approx(1.0 / (weight + 0.25), rel=1e-4)


def test_a_large_residual_pulls_little() -> None:
    """log(1 + (x - 10)²) + x² is least where x (1 + (x - 10)²) = 10 - x: near 0.1."""
    found = fit(lambda x: x - 10.0, mean=np.zeros(1), covariance=np.eye(1), weights=np.array([1.0]))
    assert found.parameters[0] == pytest.approx(0.1, abs=1e-3)
    assert found.residuals[0] == pytest.approx(-9.9, abs=1e-3)
    assert found.covariance[0, 0] == pytest.approx(1.0 / (1.0 + 1.0 / 99.0), abs=1e-3)


def test_derivatives_are_differences() -> None:
    def line(x: Floats) -> Floats:
        return np.array([2.0 * x[0] - 3.0 * x[1], x[1]])

    at = np.array([1.0, 1.0])
    assert jacobian(line, at, line(at)) == pytest.approx(np.array([[2.0, -3.0], [0.0, 1.0]]))
    assert jacobian(lambda x: np.zeros(2), np.zeros(0), np.zeros(2)).shape == (2, 0)


def test_the_spread_is_that_of_the_median_residual_and_of_what_was_expected() -> None:
    """1.4826 times the median size is the standard deviation of normal residuals."""
    residuals = np.array([-1.0, 0.5, 2.0])
    found = robust_sd(residuals, expected=0.5, prior_count=2.0, count=3.0)
    assert found == pytest.approx(sqrt((2 * 0.25 + 3 * 1.4826**2) / 5))


def exact(of: Cell, *sizes: int) -> list[Observation]:
    """What the formulas predict, as if it had been measured."""
    layouts = [
        Layout(micro_batch_size=size, grad_accum_steps=of.global_batch_size // size)
        for size in sizes
    ]
    table = LayoutTable.of(layouts)
    seconds = predict_step_time(table, of, H100, gpus_per_node=8).total
    peaks = predict_memory(table, of, Trainer()).total
    return [
        Observation(
            cell=of,
            layout=layout,
            hardware=H100,
            gpus_per_node=8,
            step_seconds=float(s),
            peak_memory_bytes=float(b),
            memory_limit_bytes=1e15,
        )
        for layout, s, b in zip(layouts, seconds, peaks, strict=True)
    ]


def test_rows_of_a_cell_weigh_less_the_more_they_are() -> None:
    """n rows weigh n / (1 + (n - 1) / 10); what was believed before, as five."""
    rows = exact(cell(), 1, 2, 4)
    found = calibrate(rows, Calibration.prior())
    assert found.step_residual_sd == pytest.approx(0.2 * sqrt(5 / (5 + 3 / 1.2)), rel=1e-3)
    assert (found.num_times, found.num_peaks, found.num_out_of_memory) == (3, 3, 0)
    two = calibrate([*rows, *exact(cell(batch=32), 1, 2)], Calibration.prior())
    assert two.step_residual_sd == pytest.approx(0.2 * sqrt(5 / (5 + 3 / 1.2 + 2 / 1.1)), rel=1e-3)


def test_a_step_is_that_of_the_trainer_that_was_timed() -> None:
    """A row that names none was timed with the trainer that is calibrated."""
    named, other = Trainer(reduce_bytes=4.0), Trainer(reduce_bytes=8.0)
    problem = cell(4)
    of = Layout(data_parallel_size=4, grad_accum_steps=4)
    rows = [
        Observation(
            cell=problem,
            layout=of,
            hardware=H100,
            gpus_per_node=8,
            step_seconds=1.0,
            trainer=trainer,
        )
        for trainer in (named, None)
    ]
    (group,) = by_cell(rows)
    found = group.step_time_model(other).seconds(StepTimeConstants()).total
    expected = [
        predict_step_time(LayoutTable.of([of]), problem, H100, gpus_per_node=8, trainer=each).total
        for each in (named, other)
    ]
    assert found == pytest.approx(np.concatenate(expected))
    assert found[0] != found[1]


def test_a_single_row_that_is_as_predicted_moves_no_constant() -> None:
    prior = Calibration.prior()
    found = calibrate(exact(cell(), 2), prior)
    assert found.num_times == 1
    assert found.log_constants == pytest.approx(prior.log_constants, abs=1e-6)
    assert found.cell_offsets[cell(), H100.name] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("batches", "num"), [((16,), 0), ((16, 32), 1), ((16, 32, 64), 1)])
def test_errors_of_one_cell_alone_say_nothing_of_other_cells(
    batches: tuple[int, ...], num: int
) -> None:
    rows = [row for batch in batches for row in exact(cell(batch=batch), 1, 2)]
    found = calibrate(rows, Calibration.prior())
    assert len(found.residuals.get(H100.name, ())) == num


def test_peaks_of_another_model_weigh_half_a_row_together() -> None:
    """n rows of another model weigh n / (1 + 2 (n - 1)); of its own, n / (1 + (n - 1) / 10).

    The cells of a model share that.
    """
    rows = exact(cell(), 1, 2, 4)
    other, own = (
        calibrate(rows, Calibration.prior(), model=model).memory_residual_sd
        for model in (PRESETS["llama-3.1-8b"], MODEL)
    )
    assert other == pytest.approx(0.08 * sqrt(5 / (5 + 3 / 5)), rel=1e-3)
    assert own == pytest.approx(0.08 * sqrt(5 / (5 + 3 / 1.2)), rel=1e-3)
    both = calibrate([*rows, *exact(cell(batch=32), 1, 2)], Calibration.prior(), model=MODEL)
    assert both.memory_residual_sd == pytest.approx(
        0.08 * sqrt(5 / (5 + (3 / 1.2 + 2 / 1.1) / 2)), rel=1e-3
    )


def test_a_cell_s_own_offset_takes_what_all_its_rows_share() -> None:
    rows = [
        replace(row, step_seconds=row.step_seconds * 1.1)
        for row in exact(cell(), 1, 2, 4)
        if row.step_seconds is not None
    ]
    fixed = replace(Calibration.prior(), step_covariance=np.eye(len(CONSTANTS)) * 1e-12)
    found = calibrate(rows, fixed)
    # Small errors: weight (3 / 1.2) / 0.2² against 2 / 0.15² and the prior's 1 / 3².
    pull, back = 2.5 / 0.04, 2 / 0.0225 + 1 / 9
    expected = log(1.1) * pull / (pull + back)
    assert found.cell_offsets[cell(), H100.name] == pytest.approx(expected, rel=0.1)


def test_an_offset_of_twenty_times_is_held_back_by_little() -> None:
    """Where the derivatives of both logarithms and of the normal prior of sd 3 add up to 0."""
    offset = log(20.0)
    rows = [
        replace(row, step_seconds=row.step_seconds * 20.0)
        for row in exact(cell(), 1, 2, 4, 8, 16)
        if row.step_seconds is not None
    ]
    fixed = replace(Calibration.prior(), step_covariance=np.eye(len(CONSTANTS)) * 1e-12)
    place = cell(), H100.name
    begin = replace(fixed, cell_offsets={place: offset})
    found = calibrate(rows, fixed, begin=begin).cell_offsets[place]
    back = 2 * 2 * found / (0.15**2 + found**2) + 2 * found / 3**2
    # The rows pull with (5 / 1.4) 2 off / (0.2² + off²).
    off = offset - found
    assert 5 / 1.4 * 2 * off / (0.2**2 + off**2) == pytest.approx(back, rel=0.05)


def test_a_run_above_ninety_four_percent_of_its_limit_thrashes() -> None:
    row = exact(cell(), 1)[0]
    at = replace(row, peak_memory_bytes=0.94 * GIB, memory_limit_bytes=float(GIB))
    assert not at.thrashes
    assert replace(at, peak_memory_bytes=0.9401 * GIB).thrashes
    assert not replace(at, peak_memory_bytes=None).thrashes
    # Its ranks tell of retries themselves, and had none.
    counted = replace(Trainer(), counted=True)
    assert not replace(at, peak_memory_bytes=0.99 * GIB, trainer=counted).thrashes
    assert replace(row, memory_limit_bytes=None).limit_bytes == H100.memory_bytes


# Residuals


def test_a_residual_falls_by_a_third_of_itself_for_each_length() -> None:
    """0.2² e^(-d / 3), d in doublings."""
    residual = Residual(places=np.zeros((1, 1)), weights=np.array([10.0]))
    found = residual.at(np.array([[0.0], [3.0], [-6.0]]))
    assert found == pytest.approx([0.4, 0.4 * exp(-1), 0.4 * exp(-2)])
    assert len(residual.at(np.zeros((0, 1)))) == 0


def test_one_run_is_believed_in_part() -> None:
    """0.04 / (0.04 + noise) of an error e: 0.1² and half of what is left, squared, four times."""
    left = error = 0.3
    weight = 0.0
    for _ in range(4):
        weight = error / (0.04 + 0.01 + (left / 2) ** 2)
        left = error - 0.04 * weight
    found = Residual.fit(np.zeros((1, 2)), np.array([error]))
    assert found.weights[0] == pytest.approx(weight)


def test_layouts_have_places_in_doublings() -> None:
    of = Layout(
        data_parallel_size=2,
        tensor_parallel_size=4,
        pipeline_parallel_size=8,
        context_parallel_size=16,
        micro_batch_size=2,
        grad_accum_steps=32,
        zero_stage=3,
        precision=Precision.FP32,
        recompute=Recompute.parse("full"),
    )
    found = places_of(LayoutTable.of([of]), cell())[0]
    share = MODEL.recomputed_flops_per_token(4096, of.recompute) / MODEL.flops_per_token(4096)
    assert found.tolist() == pytest.approx(
        [1, 2, 3, 4, 13, 5, 2, log2(16), 2.0 * 3, 6.0 * share, 1.5 * log2(2048)]
    )


def test_a_left_out_cell_is_predicted_from_the_others() -> None:
    """Each of two runs at one place, in two cells, predicts the other."""
    errors = np.array([0.1, 0.1])
    rows, left = left_out_errors(np.zeros((2, 1)), errors, np.array([0, 1]))
    assert rows.tolist() == [0, 1]
    # Noise of four rounds, as in a fit to both.
    rest = errors
    noise = np.zeros(2)
    for _ in range(4):
        noise = 0.01 + (rest / 2) ** 2
        rest = errors - 0.04 * np.linalg.solve(np.full((2, 2), 0.04) + np.diag(noise), errors).sum()
    assert left[0] == pytest.approx(0.1 - 0.1 * 0.04 / (0.04 + noise[1]))


def test_a_left_out_cell_of_several_runs_is_predicted_from_all_the_others() -> None:
    """errors - K (K + noise)^-1 errors of the others, each cell in turn."""
    at, errors, cells = np.array([0.0, 1.0, 3.0, 4.0]), np.array([0.2, 0.1, 0.3, 0.0]), [0, 0, 1, 2]
    covariance = 0.04 * np.exp(-np.abs(at[:, None] - at[None, :]) / 3.0)
    noise, rest = np.zeros(4), errors
    for _ in range(4):
        noise = 0.01 + (rest / 2) ** 2
        rest = errors - covariance @ np.linalg.solve(covariance + np.diag(noise), errors)
    expected = np.empty(4)
    for mine in ([0, 1], [2], [3]):
        others = [row for row in range(4) if row not in mine]
        known = covariance[np.ix_(others, others)] + np.diag(noise[others])
        predicted = covariance[np.ix_(mine, others)] @ np.linalg.solve(known, errors[others])
        expected[mine] = errors[mine] - predicted
    _, left = left_out_errors(at[:, None], errors, np.array(cells))
    assert left == pytest.approx(expected)


# Bands


def test_widths_grow_with_what_is_sent_between_nodes() -> None:
    def spreads(num_gpus: int, device: str = "h100-sxm", **sizes: int) -> tuple[float, float]:
        below, above = step_spreads(
            LayoutTable.of([Layout(**sizes)]), cell(num_gpus), DEVICES[device], gpus_per_node=8
        )
        return float(below[0]), float(above[0])

    assert spreads(4) == spreads(8) == (0.15, pytest.approx(0.15))
    assert spreads(64) == (0.15, pytest.approx(sqrt(0.15**2 + 0.24**2)))
    assert spreads(64, tensor_parallel_size=8)[1] == spreads(64)[1]
    crossing = sqrt(0.15**2 + 0.24**2 + 0.5**2)
    assert spreads(64, tensor_parallel_size=16)[1] == pytest.approx(crossing)
    assert spreads(64, tensor_parallel_size=4, context_parallel_size=4)[1] == pytest.approx(
        crossing
    )
    assert spreads(64, pipeline_parallel_size=2)[1] == pytest.approx(
        sqrt(0.15**2 + 0.24**2 + 1.2**2)
    )
    unknown = sqrt(0.15**2 + 0.3**2)
    assert spreads(8, "v100-32gb") == pytest.approx((unknown, unknown))


def test_quantiles_of_errors_narrow_the_widths_with_the_number_of_cells() -> None:
    """Ten cells: weight 10 / 12 of the errors, and 2 / 12 of the widths of before."""
    errors = np.array([-0.4, -0.2, -0.1, 0.0, 0.0, 0.0, 0.0, 0.3, 0.6, 1.2])
    found = FitErrors(
        places=np.zeros((10, 1)),
        errors=errors,
        offsets=np.zeros(10),
        cells=np.arange(10),
        below=np.full(10, 0.2),
        above=np.full(10, 0.6),
    )
    # In spreads -2, -1, ..., 1, 2; the 10th percentile is between the first two, the 90th between
    # the last two.
    assert found.quantiles_within == pytest.approx(
        (-1.5 * 10 / 12 - 1.2816 / 6, 1.5 * 10 / 12 + 1.2816 / 6)
    )


def test_many_rows_of_a_cell_weigh_as_the_root_of_their_number() -> None:
    """Four rows of one cell weigh 1/2 each, beside one of another."""
    found = FitErrors(
        places=np.zeros((5, 1)),
        errors=np.array([0.0, 1.0, 2.0, 3.0, 4.0]),
        offsets=np.zeros(5),
        cells=np.array([0, 0, 0, 0, 1]),
        below=np.ones(5),
        above=np.ones(5),
    )
    # Centres of the weights: 0.25, 0.75, 1.25, 1.75 and 2.5 of 3; 2.7 is beyond the last, 0.3 a
    # tenth of the way from the first to the second. Two cells weigh as much as before.
    assert found.quantiles_within == pytest.approx((min(0.05 - 0.6408, 0.0), 2.0 + 0.6408))


def test_errors_of_other_cells_include_their_offsets() -> None:
    found = FitErrors(
        places=np.zeros((2, 1)),
        errors=np.zeros(2),
        offsets=np.array([0.5, 0.5]),
        cells=np.array([0, 1]),
        below=np.ones(2),
        above=np.ones(2),
    )
    assert found.quantiles_across == pytest.approx((min(0.25 - 0.6408, 0.0), 0.25 + 0.6408))


# Links


def samples(span: Span, sizes: list[int], *, latency: float, bandwidth: float) -> list[LinkSample]:
    factor = (span.num_ranks - 1) / span.num_ranks
    return [
        LinkSample(
            collective=Collective.ALL_GATHER,
            span=span,
            message_bytes=size,
            seconds=latency + size * factor / bandwidth,
        )
        for size in sizes
    ]


def test_a_line_through_exact_calls_is_known_to_a_tenth_over_their_number() -> None:
    four = samples(
        Span(num_ranks=4, num_nodes=1), [1 << 10, 1 << 16, 1 << 22], latency=1e-4, bandwidth=1e9
    )
    (found,) = fit_links(four)
    assert found.latency_seconds == pytest.approx(1e-4, rel=0.02)
    assert found.bus_bytes_per_second == pytest.approx(1e9, rel=0.02)
    assert found.residual_sd == pytest.approx(0.1 * sqrt(1 / 4), rel=0.05)


def test_a_latency_that_no_call_shows_is_held_by_the_shortest_call() -> None:
    """Where the derivatives of the logarithms and of the normal prior of sd 3 add up to 0."""
    calls = samples(
        Span(num_ranks=2, num_nodes=1), [1 << 20, 1 << 21, 1 << 22], latency=0.0, bandwidth=1e9
    )
    (found,) = fit_links(calls)
    pull = 0.0
    for call in calls:
        line = found.latency_seconds + call.message_bytes / 2 / found.bus_bytes_per_second
        off = log(line / call.seconds) / 0.1
        pull += 2 * off / (1 + off**2) * found.latency_seconds / line / 0.1
    shortest = min(call.seconds for call in calls)
    back = 2 * log(shortest / found.latency_seconds) / 3**2
    assert pull == pytest.approx(back, rel=0.1)


def test_exact_collectives_give_their_constants_and_no_better_than_a_tenth() -> None:
    true = StepTimeConstants(intra_node_share=0.5, collective_seconds=60e-6)
    rings = []
    for ranks in (2, 4, 8):
        for power in (12, 18, 24, 28):
            one = ring_seconds(
                num_ranks=np.array([float(ranks)]),
                num_nodes=np.array([1.0]),
                num_bytes=np.array([float(1 << power)]),
                hardware=H100,
                constants=true,
            )
            rings.append(
                LinkSample(
                    collective=Collective.ALL_REDUCE,
                    span=Span(num_ranks=ranks, num_nodes=1),
                    message_bytes=1 << power,
                    seconds=2.0 * float(one[0]),
                )
            )
    found = network_of(rings, H100)
    assert found is not None
    assert found.names == ("intra_node_share", "collective_seconds")
    assert found.value("intra_node_share") == pytest.approx(0.5, rel=0.01)
    assert found.value("collective_seconds") == pytest.approx(60e-6, rel=0.01)
    assert found.residual_sd == pytest.approx(0.15 * sqrt(1 / 13), rel=0.02)
    # 0.1² of every constant, and what 12 calls leave at 0.15 each.
    assert np.all(np.diag(found.log_covariance) > 0.01)
    assert np.all(np.diag(found.log_covariance) < 0.01 + 0.15**2)
    assert found.num_samples == 12


def test_a_single_rank_and_a_pair_that_sends_tell_nothing_of_rings() -> None:
    one = samples(Span(num_ranks=1, num_nodes=1), [1 << 20], latency=1e-4, bandwidth=1e9)
    pair = [
        LinkSample(
            collective=Collective.SEND_RECV,
            span=Span(num_ranks=2, num_nodes=1),
            message_bytes=1 << 20,
            seconds=1e-3,
        )
    ]
    assert network_of([*one, *pair], H100) is None
    two = samples(Span(num_ranks=2, num_nodes=2), [1 << 20], latency=1e-4, bandwidth=1e9)
    across = network_of(two, H100)
    assert across is not None
    # One span across nodes does not show how congestion grows.
    assert across.names == ("inter_node_share", "inter_node_collective_seconds")


def test_many_rows_are_predicted_in_blocks() -> None:
    few = LayoutTable.of([alone(1), alone(2), alone(4)])
    rows = np.arange(BLOCK_ROWS + 5) % 3
    for predicted, of_few in zip(
        Calibration.prior().expect(few.take(rows), cell(), H100, gpus_per_node=8),
        Calibration.prior().expect(few, cell(), H100, gpus_per_node=8),
        strict=True,
    ):
        assert predicted.tolist() == of_few[rows].tolist()
    parts = predict_memory(few.take(rows), cell(), Trainer())
    assert parts.loss.tolist() == predict_memory(few, cell(), Trainer()).loss[rows].tolist()


def test_memory_that_was_counted_is_known_more_closely() -> None:
    """The formula alone errs by 2 % instead of 8, and the constants by less."""
    table = LayoutTable.of([alone()])
    counted, declared = (
        Calibration.prior(replace(Trainer(), counted=counted), is_known=True).predict(
            table, cell(), H100, gpus_per_node=8
        )
        for counted in (True, False)
    )
    (low, high), (wide_low, wide_high) = (
        (float(ends[0]) for ends in found.memory_band()) for found in (counted, declared)
    )
    assert low == pytest.approx(exp(-1.2816 * 0.02), rel=1e-3)
    assert wide_low == pytest.approx(exp(-1.2816 * 0.08), rel=1e-3)
    assert high < wide_high
