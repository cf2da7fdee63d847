"""Verification of a process group by collectives with known results. Without Ray."""
