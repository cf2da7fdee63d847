"""Host memory shared between processes, and checks of the processes that share it."""
