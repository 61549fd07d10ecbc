"""What a sweep file says."""
