"""Runs at the start of every Python process of a peer suite, including its child processes and Ray's workers."""

import os
import sys
import traceback
from pathlib import Path


def _prepare() -> None:
    if "PEERS_TORCH" in os.environ:
        import torch_tests

        torch_tests.provide(os.environ["PEERS_TORCH"])
    if "PEERS_RAY" in os.environ:
        import ray_tests

        ray_tests.provide(Path(os.environ["RAY_CHECKOUT"]))
        ray_tests.start_groups()
        config, _, backend = os.environ["PEERS_RAY"].partition(" ")
        if config == "FracTorchConfig":
            ray_tests.swap(backend or None)


try:
    _prepare()
except Exception:
    # Python would continue, and a suite that runs twice on stock's side looks like two equal sides.
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
