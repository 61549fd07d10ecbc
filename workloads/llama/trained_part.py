"""The part of a model that a rank trains: built by the layout, with what reduces its gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from orchestrator.core.problem.layout import Precision
from orchestrator.core.problem.loss_chunks import chunk_tokens
from orchestrator.core.sweepfile.workload_options import (
    AttentionKind,
    GradientDtype,
    LlamaOptions,
    ReduceDtype,
)
from orchestrator.core.trial.protocol import TrialRequest
from workloads.llama.context_parallel import ContextParallel
from workloads.llama.data_parallel import Replica
from workloads.llama.fp8 import check_fp8, use_fp8_products
from workloads.llama.fully_sharded import Shards
from workloads.llama.mesh import RankPlace
from workloads.llama.model import Llama, LlamaPart
from workloads.llama.pipeline import MicroBatch, Pipeline, parts_of_rank
from workloads.llama.stage_replica import StageReplica
from workloads.llama.tensor_parallel import TensorParallel

# The types of activations and, without sharding, of weights.
DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.FP8: torch.bfloat16,
}
TrainedPart = Replica | Shards | Pipeline


@dataclass(frozen=True, kw_only=True)
class PartBuilder:
    """Builds the part of a rank at its place in the mesh."""

    request: TrialRequest
    options: LlamaOptions
    attention: AttentionKind
    place: RankPlace
    device: torch.device
    compile_backend: str

    @property
    def is_sharded(self) -> bool:
        """True if ZeRO shards over more than one rank."""
        return self.request.layout.zero_stage > 0 and self.place.shards.size > 1

    @cached_property
    def tensor_parallel(self) -> TensorParallel:
        """This rank's place among those that share each layer."""
        tp = self.place.tp
        return TensorParallel(size=tp.size, rank=tp.index, group=tp.group)

    @cached_property
    def context_parallel(self) -> ContextParallel:
        """This rank's place among those that share each sequence."""
        return ContextParallel(self.request.sequence_length, self.place.cp)

    def build(self) -> TrainedPart:
        """Build the model of this rank, or its stages, with what reduces the gradients."""
        if self.place.pp.size > 1:
            return self._pipeline()
        model = self._model(LlamaPart.whole(self.request.model))
        if self.is_sharded:
            return self._shards(model)
        model.materialise(self.device, seed=self.request.seed)
        return Replica(
            model,
            group=self.place.data.group,
            accumulate_in_fp32=self._accumulates_in_fp32,
            reduce_dtype=self._reduce_dtype,
            bucket_megabytes=self._bucket_megabytes,
            frees_gradients=self._frees_gradients,
        )

    def _pipeline(self) -> Pipeline:
        layout, place = self.request.layout, self.place
        parts = parts_of_rank(
            self.request.model.num_layers,
            schedule=layout.pipeline_schedule,
            num_ranks=place.pp.size,
            rank=place.pp.index,
        )
        return Pipeline(
            [self._stage(part) for part in parts],
            schedule=layout.pipeline_schedule,
            line=place.pp,
            num_micro_batches=layout.grad_accum_steps,
            micro_batch=self._micro_batch,
            device=self.device,
        )

    def _stage(self, part: LlamaPart) -> StageReplica | Shards:
        model = self._model(part)
        if self.is_sharded:
            return self._shards(model)
        model.materialise(self.device, seed=self.request.seed)
        return StageReplica(
            model,
            group=self.place.data.group,
            accumulate_in_fp32=self._accumulates_in_fp32,
            reduce_dtype=self._reduce_dtype,
            bucket_megabytes=self._bucket_megabytes,
        )

    def _shards(self, model: Llama) -> Shards:
        return Shards(
            model,
            mesh=self.place.shard_mesh(self.device),
            device=self.device,
            seed=self.request.seed,
            zero_stage=self.request.layout.zero_stage,
            dtype=self._dtype,
            reduce_dtype=self._reduce_dtype,
            accumulate=self.options.accumulate,
            frees_gradients=self._frees_gradients,
        )

    def _model(self, part: LlamaPart) -> Llama:
        model = Llama(
            self.request.model,
            sequence_length=self.request.sequence_length,
            attention=self.attention,
            recompute=self.request.layout.recompute,
            loss_chunk_tokens=self._loss_chunk_tokens,
            dtype=torch.float32 if self.is_sharded else self._dtype,
            device=self.device,
            part=part,
            tensor_parallel=self.tensor_parallel,
            context_parallel=self.context_parallel,
        )
        if self.request.layout.precision is Precision.FP8:
            if self._is_cuda:
                check_fp8(self.device)
            # A trial on a CPU is refused before; tests of layouts are not.
            use_fp8_products(model, emulated=not self._is_cuda)
        if self.options.compiles(on_gpu=self._is_cuda):
            for layer in model.layers.values():
                layer.compile(fullgraph=True, backend=self.compile_backend)
        return model

    @property
    def _micro_batch(self) -> MicroBatch:
        batch, length = self.request.layout.micro_batch_size, len(self.context_parallel.positions)
        return MicroBatch(
            tokens=(batch, length),
            hidden_states=(
                batch,
                length // self.tensor_parallel.size,
                self.request.model.hidden_size,
            ),
            dtype=self._dtype,
        )

    @property
    def _loss_chunk_tokens(self) -> int | None:
        if self.options.loss_chunks is None:
            return None
        tokens = np.array([math.prod(self._micro_batch.tokens)])
        return int(chunk_tokens(tokens, self.options.loss_chunks)[0])

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.request.layout.precision]

    @property
    def _reduce_dtype(self) -> torch.dtype:
        return torch.float32 if self.options.reduce_dtype is ReduceDtype.FP32 else self._dtype

    @property
    def _accumulates_in_fp32(self) -> bool:
        return self.options.gradient_dtype is GradientDtype.FP32

    @property
    def _bucket_megabytes(self) -> int:
        return self.options.bucket_megabytes or (200 if self._is_cuda else 25)

    @property
    def _frees_gradients(self) -> bool:
        return self.request.layout.grad_accum_steps == 1

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"
