"""What is to be trained, in which layout, on which hardware."""
