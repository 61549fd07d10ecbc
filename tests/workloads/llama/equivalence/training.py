"""What a rank does with a combination: it trains three steps, and compares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

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
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = loop.step(loop.micro_batches(step)).double()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(loss.item())
        norms.append(loop.gradient_norm())
    return loop, losses, norms


def _largest(values: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


@torch.no_grad()
def _of_weights(loop: TrainingLoop, reference: Training) -> float:
    """The relative distance of all weights of this rank together."""
    difference, size = 0.0, 0.0
    for name, weight in loop.named_weights():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        expected = loop.own_part(name, reference.weights[name]).double()
        difference += (whole.double() - expected).square().sum().item()
        size += expected.square().sum().item()
    return float((difference / size) ** 0.5)
