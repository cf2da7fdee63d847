"""Checkpoints of several ranks in one folder."""
