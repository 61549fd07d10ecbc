"""Programs that measure this project. The tests rehearse those for GPUs."""
