"""Trains a Llama of any size with the requested layout, and measures it.

Importing this package imports everything that a trial needs and touches no device: so ranks can be
forked from a process that has imported it.
"""

from workloads import rank
from workloads.llama.profiled import profile as profile_rank
from workloads.llama.train import train as train_rank


def main() -> int:
    """Run this rank's trial or profile; return the exit code."""
    return rank.run(lambda own: (profile_rank if own.request.profile else train_rank)(own))
