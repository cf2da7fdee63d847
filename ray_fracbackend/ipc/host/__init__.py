"""Host memory that processes share, and the processes that share it."""
