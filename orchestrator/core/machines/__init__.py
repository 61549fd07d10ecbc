"""What nodes are fit for, and which gang goes where."""
