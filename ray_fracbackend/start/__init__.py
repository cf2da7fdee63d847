"""A start of one worker group on the driver: the Ray Train backend, and the answers of the workers."""
