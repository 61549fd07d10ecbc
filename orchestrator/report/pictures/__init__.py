"""Pictures of sweeps: each module makes a picture's values of rows, and a figure of the values."""
