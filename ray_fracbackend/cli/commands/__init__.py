"""One module per command: its options, and what runs it. Standard library only; a command imports what it needs when it runs."""
