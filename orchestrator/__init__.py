"""Finds, by measuring, the fastest layout to train a language model on the GPUs at hand."""

__version__ = "0.1.0"
