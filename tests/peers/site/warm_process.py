"""Processes for torch's tests, forked from one that has imported torch and has run nothing."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import torch.testing._internal.distributed.distributed_test  # noqa: F401 (the largest of torch's suites; all tests import it)


class Process(multiprocessing.get_context("forkserver").Process):  # type: ignore[name-defined,misc]
    """Like torch's spawned processes, with the parent's current environment and import path."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._variables = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._variables)
        super().run()
