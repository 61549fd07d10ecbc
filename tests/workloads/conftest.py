"""One thread for torch: more make small tensors no faster, and other tests run meanwhile."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
