"""The tokens of an optimizer step: they depend on seed, step and sequence, never on the layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.workload_options import TokenDtype

# Synthetic ids are floor(vocab * u^3): a skew like that of words, which a model learns.
_SKEW = 3.0


class Tokens:
    """Sequences of `sequence_length` + 1 token ids, synthetic or from a flat file of ids."""

    def __init__(
        self,
        *,
        vocab_size: int,
        sequence_length: int,
        seed: int,
        token_file: Path | None = None,
        dtype: TokenDtype = TokenDtype.UINT16,
    ) -> None:
        self._vocab_size, self._length, self._seed = vocab_size, sequence_length + 1, seed
        self._path, self._file = token_file, None
        if token_file is not None:
            size = token_file.stat().st_size
            if size < self._length * np.dtype(dtype.value).itemsize:
                raise ValueError(
                    f"token_file {token_file} has {size} bytes; "
                    f"one sequence needs {self._length} ids of {dtype}"
                )
            self._file = np.memmap(token_file, dtype=dtype.value, mode="r")

    def sequence(self, *, step: int, index: int, global_batch_size: int) -> NDArray[np.int64]:
        """Return the sequence_length + 1 ids of sequence `index` of a step's global batch."""
        if self._file is None:
            random = np.random.Generator(
                np.random.Philox(key=self._seed, counter=[0, 0, step, index])
            )
            return (self._vocab_size * random.random(self._length) ** _SKEW).astype(np.int64)
        # Sequences follow one another in the file: the last target of one is the first input of the
        # next.
        num_sequences = (len(self._file) - 1) // (self._length - 1)
        start = (step * global_batch_size + index) % num_sequences * (self._length - 1)
        ids = self._file[start : start + self._length].astype(np.int64)
        if ids.max() >= self._vocab_size:
            at = start + int(ids.argmax())
            raise ValueError(
                f"token_file {self._path}: id {ids.max()} at {at} is not below vocab_size "
                f"{self._vocab_size}; check token_dtype, or the model that the file was made for"
            )
        return ids

    def micro_batches(
        self,
        *,
        step: int,
        layout: Layout,
        data_parallel_rank: int,
        device: torch.device,
        positions: NDArray[np.int64] | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Return inputs and targets (micro_batch_size, sequence_length) of a rank's micro-batches.

        With `positions`, only those of each sequence.
        """
        per_rank = layout.micro_batch_size * layout.grad_accum_steps
        first = data_parallel_rank * per_rank
        ids = np.stack(
            [
                self.sequence(
                    step=step, index=first + i, global_batch_size=layout.global_batch_size
                )
                for i in range(per_rank)
            ]
        ).reshape(layout.grad_accum_steps, layout.micro_batch_size, self._length)
        taken = np.arange(self._length - 1) if positions is None else positions
        inputs, targets = _on(device, ids[..., taken]), _on(device, ids[..., taken + 1])
        return list(zip(inputs, targets, strict=True))


def _on(device: torch.device, ids: NDArray[np.int64]) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(ids))
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory the host would wait until the device has done all steps before.
    return tensor.pin_memory().to(device, non_blocking=True)
