"""Decides: the loop, attempts and verdicts, confirmation, placement, budgets and recovery."""
