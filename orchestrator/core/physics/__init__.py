"""What a layout should need: memory, time, and how both are calibrated."""
