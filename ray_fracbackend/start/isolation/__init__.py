"""Search for the rank, device or link at fault after a failed start."""
