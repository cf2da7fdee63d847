"""Processes of torch's tests, forked from one that has imported torch and nothing has run in."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import torch.testing._internal.distributed.distributed_test  # noqa: F401 (the largest of torch's suites, and what all import)


class Process(multiprocessing.get_context("forkserver").Process):  # type: ignore[name-defined,misc]
    """As torch's spawned ones, with the environment and the folder for imports that the parent has now."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._variables = dict(os.environ)

    def run(self) -> None:
        """Run the target."""
        os.environ.clear()
        os.environ.update(self._variables)
        super().run()
