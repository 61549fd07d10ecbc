"""Supervises: launchers, ranks, processes and GPUs of one machine."""
