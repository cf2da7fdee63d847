"""Code that runs in a Ray worker: the probe, rank 0's store, the process group."""
