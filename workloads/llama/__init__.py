"""Trains a Llama of any size with the layout that it is asked for, and measures it.

Importing this package imports everything that a trial needs and touches no device, so that ranks
can be forked from an importer.
"""

from workloads import rank
from workloads.llama.train import train as train_rank


def main() -> int:
    return rank.run(train_rank)
