"""The suite DistributedTest of the installed torch, run like its own test_distributed_spawn.py. Not collected by name."""

import torch
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class TestDistBackendWithSpawn(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()


# Only the class above is a test.
del TestDistBackend, DistributedTest
