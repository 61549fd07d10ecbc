"""One thread for torch: of the small tensors here several threads make nothing faster, and other
tests run beside.
"""

from __future__ import annotations

import torch

torch.set_num_threads(1)
