"""What a rank does with a combination: it trains three steps, and compares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from orchestrator.core.problem.layout import Precision
from tests.workloads.llama.equivalence.combination import NUM_STEPS, Combination, Distance
from workloads.llama.mesh import RankPlace
from workloads.llama.training_loop import TrainingLoop

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Training:
    losses: list[float]
    gradient_norms: list[float]
    weights: Mapping[str, Tensor]  # whole, after the last step


def train_alone(combination: Combination) -> Training:
    """Train in this process."""
    loop, losses, norms = _train(combination, RankPlace())
    weights = {name: weight.detach() for name, weight in loop.named_weights()}
    return Training(losses=losses, gradient_norms=norms, weights=weights)


def distance_of(combination: Combination, place: RankPlace, reference: Training) -> Distance:
    """Train with the other ranks of the gang; all of them get the same result."""
    loop, losses, norms = _train(combination, place)
    own = torch.tensor(
        [
            _largest(losses, reference.losses),
            _largest(norms, reference.gradient_norms),
            _of_weights(loop, reference),
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    loss, gradient_norm, weights = own.tolist()
    return Distance(loss=loss, gradient_norm=gradient_norm, weights=weights)


def _train(
    combination: Combination, place: RankPlace
) -> tuple[TrainingLoop, list[float], list[float]]:
    loop = TrainingLoop(
        combination.request(),
        combination.llama_options,
        device=CPU,
        place=place,
        compile_backend="aot_eager",
    )
    if combination.layout.precision is Precision.FP8:
        kinds = {type(each).__name__ for each in _products(loop)}
        assert kinds == {"Float8Linear"}, kinds
    # Otherwise torch takes the layers of another layout for the same ones with other sizes, and
    # compiles them for any size.
    torch.compiler.reset()
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = loop.step(loop.micro_batches(step)).double()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(loss.item())
        norms.append(loop.gradient_norm())
    return loop, losses, norms


def _products(loop: TrainingLoop) -> Iterator[nn.Module]:
    """The matrix products of this rank's layers."""
    for model in loop.models:
        yield from (each for each in model.layers.modules() if isinstance(each, nn.Linear))


def _largest(values: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


@torch.no_grad()
def _of_weights(loop: TrainingLoop, reference: Training) -> float:
    """The relative distance of all weights of this rank together: of its shards, if it has them."""
    own, expected = [], []
    for name, weight in loop.named_weights():
        part = loop.own_part(name, reference.weights[name])
        if isinstance(weight, DTensor):
            # Each rank takes its shard of what it has: nothing is sent.
            part = distribute_tensor(
                part, weight.device_mesh, weight.placements, src_data_rank=None
            ).to_local()
            weight = weight.to_local()
        own.append(weight.flatten())
        expected.append(part.flatten())
    exact = torch.cat(expected).double()
    return float((torch.cat(own).double() - exact).norm() / exact.norm())
