"""Long runs: thousands of starts in one process, and starts and training under random faults.

Each is a program: ``python -m tests.soak.cycles``, ``tests.soak.trials``, ``tests.soak``.
"""

import sys
from pathlib import Path

# The network namespaces' programs import their modules by bare names.
sys.path.append(str(Path(__file__).parents[1] / "net"))
