"""Tables of training programs that nobody described: physics with constants that a search cannot
see.

A program keeps other bytes and takes other times than `core/physics` assumes, in ways that no
constant there can express: options with unknown words, layers that recompute only in part,
allocators that waste, kernels that crash. Random numbers follow from a seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

import numpy as np

from benchmarks.search_problem import Problem
from orchestrator.core.physics.memory import predict_memory
from orchestrator.core.physics.step_time import predict_step_time
from orchestrator.core.physics.step_time_constants import PRIORS, StepTimeConstants
from orchestrator.core.physics.trainer import GIB, Trainer
from orchestrator.core.pretend.run_table import MeasuredRun, RunStatus
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware, from_label
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import ModelShape

MOST_ROWS = 240
# Layers, hidden size, heads, key-value heads, ffn hidden size: 0.3 to 66 billion weights.
SHAPES = (
    (24, 1024, 16, 16, 4096),
    (16, 2048, 32, 8, 8192),
    (24, 2560, 20, 20, 6912),
    (28, 3072, 24, 8, 8192),
    (32, 4096, 32, 8, 14336),
    (40, 5120, 40, 40, 13824),
    (60, 6656, 52, 52, 17920),
    (80, 8192, 64, 8, 28672),
)
VOCABULARIES = (32_000, 50_304, 128_256)
DEVICES = (("A100-40GB", 40), ("A100-80GB", 80), ("H100-80GB", 80), ("H200", 141))
# Parameters, gradients and optimizer: 8 to 20 bytes a weight, as programs keep them.
STATES = ((2, 2, 4), (2, 2, 8), (2, 2, 12), (4, 4, 8), (2, 4, 12), (2, 6, 12))
# Factors of what a layer keeps: fused kernels keep half of what plain torch keeps.
ACTIVATION_FACTORS = (0.5, 1.15)
PIPELINES_WASTE = (1.0, 1.25)
# A loss in chunks, in bf16, in fp32.
LOGIT_BYTES = (1.0, 4.0, 6.0, 8.0, 12.0, 14.0)
RESERVE_GIB = (0.0, 4.0)
# A constant of time is at most this many of its standard deviations from its median.
MOST_SDS = 1.5
# Standard deviations of logarithms: of each value of each axis, and of a run.
TIME_OF_VALUE_SD, MEMORY_OF_VALUE_SD, TIME_SD, MEMORY_SD = 0.05, 0.03, 0.02, 0.03
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "attention_kernel": ("amber", "birch", "cedar"),
    "rms_kernel": ("no", "yes"),
    "compile": ("no", "yes"),
}
THRASHING = 0.97  # of the usable memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """What a value of an option does: factors on what layers keep, and on their time."""

    activations: float
    seconds: float
    keeps_scores: bool = False
    # It crashes from this tensor-parallel size on; None: it never does.
    crashes_from: int | None = None


@dataclass(frozen=True, kw_only=True)
class SimulatedTrainer:
    """The hidden constants of one program on one cluster."""

    trainer: Trainer
    constants: StepTimeConstants
    words: Mapping[tuple[str, str], Word]
    reports_memory: bool
    # Pipelines between nodes take longer than any formula says, in this share of their layouts.
    slow_pipelines: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> SimulatedTrainer:
        parameters, gradients, optimizer = STATES[rng.integers(len(STATES))]
        factor = float(np.exp(rng.uniform(*np.log(ACTIVATION_FACTORS))))
        trainer = Trainer(
            parameter_bytes=float(parameters),
            gradient_bytes=float(gradients),
            optimizer_bytes=float(optimizer),
            bucket_bytes=float(rng.choice([0.0, 2.0])),
            gathered_inputs=float(rng.choice([0.0, 1.0])),
            gathered_inputs_in_pipeline=float(rng.choice([0.0, 0.7, 1.0])),
            sequence_parallel=bool(rng.random() < 0.8),
            activation_factor=factor,
            pipeline_activation_factor=factor * float(rng.uniform(*PIPELINES_WASTE)),
            stages_by_work=bool(rng.random() < 0.3),
            logit_bytes=float(rng.choice(LOGIT_BYTES)),
            gathered_units=float(rng.uniform(2.0, 4.0)),
            reserve_bytes=float(rng.uniform(*RESERVE_GIB)) * GIB,
        )
        sds = np.clip(rng.normal(size=len(PRIORS)), -MOST_SDS, MOST_SDS)
        constants = StepTimeConstants(
            **{
                name: prior.median * float(np.exp(sd * prior.log_sd))
                for sd, (name, prior) in zip(sds, PRIORS.items(), strict=True)
            }
        )
        named = rng.permutation(sorted(OPTIONS))[: rng.integers(0, 3)].tolist()
        return cls(
            trainer=trainer,
            constants=constants,
            words=dict(_words(rng, named)),
            reports_memory=bool(rng.random() < 0.5),
            slow_pipelines=float(rng.choice([0.0] * 9 + [0.3])),
        )


def _words(rng: np.random.Generator, names: list[str]) -> Iterator[tuple[tuple[str, str], Word]]:
    for name in names:
        # One word is the plain one: eager attention, norms or graphs that are not fused.
        plain = rng.integers(len(OPTIONS[name]))
        for number, word in enumerate(OPTIONS[name]):
            is_plain = number == plain
            if name == "attention_kernel":
                yield (
                    (name, word),
                    Word(
                        activations=1.0,
                        seconds=float(rng.uniform(1.1, 1.5) if is_plain else rng.uniform(1.0, 1.1)),
                        keeps_scores=is_plain,
                        crashes_from=int(rng.choice([4, 8])) if rng.random() < 0.15 else None,
                    ),
                )
            else:
                activations = float(rng.uniform(1.15, 1.35)) if is_plain else 1.0
                seconds = float(rng.uniform(1.05, 1.2)) if is_plain else 1.0
                yield (name, word), Word(activations=activations, seconds=seconds)


def simulated_problem(seed: int, *, profile: str) -> Problem:
    """A cell with a hidden trainer, as a table: at least a tenth ran out of memory, and 8 ran.

    `profile` names the trainer that a search is told.
    """
    rng = np.random.default_rng((20_261_124, seed))
    while True:
        runs = _draw(rng, seed)
        if not runs:
            continue
        num_out = sum(run.status is RunStatus.OOM for run in runs)
        num_ran = sum(run.status is RunStatus.OK for run in runs)
        if num_ran >= 8 and 0.1 * len(runs) <= num_out <= 0.8 * len(runs):
            return Problem(table_id=f"simulated_{seed:03d}", runs=tuple(runs), profile=profile)


def _draw(rng: np.random.Generator, seed: int) -> list[MeasuredRun]:
    layers, hidden_size, heads, key_value_heads, ffn = SHAPES[rng.integers(len(SHAPES))]
    shape = ModelShape(
        name="simulated",
        num_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        ffn_hidden_size=ffn,
        vocab_size=int(rng.choice(VOCABULARIES)),
        tied_embeddings=bool(rng.random() < 0.3),
    )
    label, gib = DEVICES[rng.integers(len(DEVICES))]
    cell = Cell(
        model=shape,
        num_gpus=int(rng.choice([8, 16, 32, 64, 128])),
        sequence_length=int(rng.choice([1024, 2048, 4096, 8192])),
        global_batch_size=int(rng.choice([128, 256, 512])),
    )
    hidden = SimulatedTrainer.draw(rng)
    layouts = list(_layouts(cell, hidden, rng))
    if len(layouts) < 20:
        return []
    if len(layouts) > MOST_ROWS:
        layouts = [layouts[row] for row in rng.choice(len(layouts), MOST_ROWS, replace=False)]
    return _measured(cell, layouts, hidden, label, gib * float(GIB), seed, rng)


def _layouts(cell: Cell, hidden: SimulatedTrainer, rng: np.random.Generator) -> Iterator[Layout]:
    model, batch = cell.model, cell.global_batch_size
    recomputes = [["none", "full"], ["none", "selective_ops", "full"], ["none"]][rng.integers(3)]
    stages = [(0, 1), (1,), (0,), (1, 2, 3), (3,)][rng.integers(5)]
    names = sorted({name for name, _ in hidden.words})
    choices = product(
        (1, 2, 4, 8),
        (1, 2, 4, 8),
        (1, 2, 4, 8, 16),
        [Recompute.parse(word) for word in recomputes],
        stages,
        product(*([(name, word) for word in OPTIONS[name]] for name in names)),
    )
    for tp, pp, mbs, recompute, stage, options in choices:
        dp = cell.num_gpus // (tp * pp)
        if not dp or batch % (dp * mbs) or model.num_layers % pp or model.num_key_value_heads % tp:
            continue
        if pp > 1 and (stage > 1 or batch // (dp * mbs) < pp):
            continue
        yield Layout(
            data_parallel_size=dp,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            micro_batch_size=mbs,
            grad_accum_steps=batch // (dp * mbs),
            recompute=recompute,
            zero_stage=stage,
            precision=Precision.BF16,
            options=tuple(options),
        )


def _measured(
    cell: Cell,
    layouts: list[Layout],
    hidden: SimulatedTrainer,
    label: str,
    memory_bytes: float,
    seed: int,
    rng: np.random.Generator,
) -> list[MeasuredRun]:
    device = from_label(label, memory_bytes=memory_bytes)
    table = LayoutTable.of(layouts)
    words = [[hidden.words[pair] for pair in layout.options] for layout in layouts]
    peaks = _peaks(cell, table, hidden, words, rng)
    usable = device.memory_bytes * float(rng.uniform(0.95, 0.99))
    seconds = _seconds(cell, table, device, hidden, words, rng)
    seconds *= 1.0 + 4.0 * np.clip((peaks / usable - THRASHING) / (1 - THRASHING), 0.0, 1.0)
    found = []
    for row, layout in enumerate(layouts):
        crashes = any(
            word.crashes_from is not None and layout.tensor_parallel_size >= word.crashes_from
            for word in words[row]
        )
        status = (
            RunStatus.ERROR
            if crashes or rng.random() < 0.01
            else RunStatus.OOM
            if peaks[row] > usable
            else RunStatus.OK
        )
        ran = status is RunStatus.OK
        found.append(
            MeasuredRun(
                line=row + 2,
                table_id=f"simulated_{seed:03d}",
                model_name=cell.model.name,
                model=cell.model,
                num_parameters=float(cell.model.num_parameters),
                hardware=label,
                memory_bytes=memory_bytes,
                num_gpus=cell.num_gpus,
                gpus_per_node=8,
                sequence_length=cell.sequence_length,
                global_batch_size=cell.global_batch_size,
                layout=replace(layout, options=()),
                extra=tuple((name, str(word)) for name, word in layout.options),
                words=(),
                status=status,
                step_seconds=float(seconds[row]) if ran else None,
                tokens_per_second_per_gpu=cell.tokens_per_step / float(seconds[row]) / cell.num_gpus
                if ran
                else None,
                peak_memory_bytes=float(peaks[row]) if ran and hidden.reports_memory else None,
                peak_memory_kind="simulated",
                replay=True,
            )
        )
    return found


def _peaks(
    cell: Cell,
    table: LayoutTable,
    hidden: SimulatedTrainer,
    words: Sequence[Sequence[Word]],
    rng: np.random.Generator,
) -> np.ndarray:
    plain = predict_memory(table, cell, hidden.trainer)
    eager = predict_memory(table, cell, replace(hidden.trainer, eager_attention=True))
    scores = np.array([any(word.keeps_scores for word in row) for row in words])
    factor = np.array([np.prod([word.activations for word in row]) for row in words])
    # Layers that are recomputed keep their inputs, which no kernel makes smaller.
    all_recomputed = np.array([str(r).startswith("full") for r in table.recomputes])
    own = hidden.trainer.activation_factor
    factor = np.where(all_recomputed[table.recompute], (1 + 0.3 * (own - 1)) / own, factor)
    activations = np.where(scores, eager.activations, plain.activations) * factor
    activations *= _by_value(table, MEMORY_OF_VALUE_SD, rng)
    rest = np.where(scores, eager.total - eager.activations, plain.total - plain.activations)
    holes = 1.0 + np.abs(rng.normal(0, MEMORY_SD, len(table)))
    return np.asarray((activations + rest) * holes)


def _seconds(
    cell: Cell,
    table: LayoutTable,
    device: Hardware,
    hidden: SimulatedTrainer,
    words: Sequence[Sequence[Word]],
    rng: np.random.Generator,
) -> np.ndarray:
    time = predict_step_time(table, cell, device, gpus_per_node=8, constants=hidden.constants)
    factor = np.array([np.prod([word.seconds for word in row]) for row in words])
    work = time.compute + time.recompute + time.bubble
    seconds = (time.total + (factor - 1.0) * work) * _by_value(table, TIME_OF_VALUE_SD, rng)
    across = (table.pipeline_parallel_size > 1) & (cell.num_gpus > 8)
    slow = across & (rng.random(len(table)) < hidden.slow_pipelines)
    seconds *= np.where(slow, rng.uniform(1.5, 5.0, len(table)), 1.0)
    return np.asarray(seconds * np.exp(rng.normal(0, TIME_SD, len(table))))


def _by_value(table: LayoutTable, sd: float, rng: np.random.Generator) -> np.ndarray:
    """A factor for each value of each axis: what no formula says."""
    found = np.ones(len(table))
    same = ("options", "precision", "pipeline_schedule")
    for name in (f.name for f in fields(Layout) if f.name not in same):
        _, steps = np.unique(getattr(table, name), return_inverse=True)
        found *= np.exp(rng.normal(0, sd, steps.max() + 1))[steps]
    return found
