"""End the process groups of a process without holding the GIL. Runs on the worker; imports no Ray."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ray_fracbackend.verify import backends_by_device


def destroy_process_groups() -> None:
    """Destroy all process groups of this process, as ``dist.destroy_process_group()`` does.

    Before torch 2.8 the end of a group holds the GIL while it waits for Gloo's threads (pytorch#154976). One of them may wait for the
    GIL, to drop a tensor of the last operation: the process hangs. The end of a backend releases the GIL, so the groups go first.
    """
    backends = [
        group._get_backend(torch.device(kind))
        for group in distributed_c10d._world.pg_map
        for kind, name in backends_by_device(group).items()
        if name == "gloo"
    ]
    try:
        dist.destroy_process_group()
    finally:
        backends.clear()  # an error keeps this frame
