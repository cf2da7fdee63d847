"""Tests that run on emulated GPUs only."""

import sys
from pathlib import Path

# The ranks of the ipc tests.
sys.path.append(str(Path(__file__).parents[1] / "ipc"))
