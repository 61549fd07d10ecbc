"""One attempt: its order, its report, and the meaning of its failure."""
