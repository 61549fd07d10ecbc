"""The problem: a model to train, a layout, and the hardware."""
