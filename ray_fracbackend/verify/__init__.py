"""Collectives with known results, and the devices of any processes. Without Ray."""
