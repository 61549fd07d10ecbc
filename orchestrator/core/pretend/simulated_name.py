"""The name of a simulated sweep, which shows that nothing of it was measured."""

SIMULATED_SUFFIX = "-simulated"
