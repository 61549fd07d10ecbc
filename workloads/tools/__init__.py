"""Programs that are no training: a matmul, and traces of memory."""
