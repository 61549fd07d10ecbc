"""Decides: the loop, attempts, what each came to, confirmation, placement, budgets and recovery."""
