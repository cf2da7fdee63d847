"""Behaviour of Windows, its builds of torch, and Ray on it, as far as the package relies on it; one fact per test.

Each test passes on Windows. Under Wine it passes too, or is skipped with a description of Wine's behaviour.
"""
