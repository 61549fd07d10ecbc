"""Places: what a scheduler is, and the simulated and the replayed one."""
