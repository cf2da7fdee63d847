"""One module per command: its options and its execution. Standard library only; other imports happen when a command runs."""
