"""Search for the rank, link or node at fault after a failed start."""
