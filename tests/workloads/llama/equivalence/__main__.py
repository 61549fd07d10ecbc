"""Trains all combinations, prints the table, and keeps it: python -m tests....equivalence.

Needs torchao for the rows in fp8.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.workloads.llama.equivalence import table
from tests.workloads.llama.equivalence.combinations import COMBINATIONS
from tests.workloads.llama.equivalence.gang import run_gang


def main() -> int:
    torch.set_num_threads(1)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results = {
            num_ranks: (
                combinations,
                run_gang(num_ranks, combinations, Path(folder) / str(num_ranks)),
            )
            for num_ranks, combinations in COMBINATIONS.items()
        }
    kept = table.to_json(results, seconds=time.perf_counter() - begin)
    table.write(kept)
    print(table.text_of(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
