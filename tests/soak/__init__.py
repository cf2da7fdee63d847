"""A long run: a thousand starts in one process, ``python -m tests.soak.cycles``."""
