"""The c10d backend ``staged``: accelerator tensors through pinned host memory. Needs only torch, not Ray.

Importing this module registers the backend, on Linux, Windows and macOS::

    import torch.distributed as dist
    import ray_fracbackend.staged

    dist.init_process_group("cpu:gloo,cuda:staged")  # under torchrun

A CUDA tensor is copied to pinned memory, the ranks run the collective there, and the result is copied back. The
collective uses shared host memory if all ranks are on one Linux machine, else Gloo. It supports collectives that FSDP
calls and Gloo lacks (AVG, reduce_scatter, all_gather_into_tensor, element types). It never passes a CUDA tensor to
Gloo, which would end the process on Windows (pytorch#186535). torch uses a Python backend for every device of its
group, so CPU tensors use the same path, without the copies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ray_fracbackend.ipc import knobs
from ray_fracbackend.ipc._torch import (
    HAS_PYTHON_GROUPS,
    STAGED_DEVICES,
    Backend,
    is_registered,
)
from ray_fracbackend.ipc.device.side import DeviceSide
from ray_fracbackend.ipc.errors import IpcUnavailableError
from ray_fracbackend.ipc.group.collective_group import CollectiveGroup
from ray_fracbackend.ipc.protocol.description import Terms, describe_call
from ray_fracbackend.ipc.protocol.gloo import GlooCollectives
from ray_fracbackend.ipc.protocol.setup import join, share

BACKEND_NAME = "staged"
_SET_UP = describe_call("set-up of staged")
logger = logging.getLogger(__name__)


def staged_support() -> str | None:
    """Check whether the backend can work in this process.

    Returns:
        None if it can, else the reason in one sentence.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        return "this torch was built without torch.distributed or without Gloo, which the staged backend needs"
    if not HAS_PYTHON_GROUPS:
        return f"torch {torch.__version__} does not support process groups written in Python; the staged backend needs torch 2.7"
    return None


class StagedProcessGroup(CollectiveGroup):
    """Process group of backend ``staged``.

    Args:
        store: The group's store.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        timeout: Default timeout of a collective.
        global_ranks: Global rank of each group rank, for messages; empty means the same numbers.

    Attributes:
        over: Backend that carries tensors between the ranks: ``ipc`` (shared host memory) or ``gloo``.

    Raises:
        IpcUnavailableError: This torch cannot create such a group, or an environment variable of a rank is wrong. Then
            every rank raises the error.
        IpcError: The ranks cannot connect.
    """

    _asked_as = frozenset({"staged", "gloo"})

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int] = ()) -> None:
        if (missing := staged_support()) is not None:
            raise IpcUnavailableError(f"The staged backend cannot be used: {missing}.")
        super().__init__(BACKEND_NAME, store, rank, size, timeout, global_ranks, STAGED_DEVICES)
        self.over, reason = "ipc", self._join_host_memory(rank, size)
        if reason is not None:
            self.over = "gloo"
            self._host = GlooCollectives(self._store, rank, self._names, timeout)
        share(self._host, self._names, self._prepare, Terms.within(_SET_UP, timeout.total_seconds()))
        over = "shared host memory" if reason is None else f"Gloo: {reason}"
        self._device_side = DeviceSide(self._host, self._names, staged_reason=f"over {over}")
        logger.debug("ray_fracbackend: staged process group of %d ranks over %s", size, over)

    def _join_host_memory(self, rank: int, size: int) -> str | None:
        """Share host memory with all ranks, or return the reason why not, which is the same on all ranks."""
        try:
            chosen = None if knobs.staged_may_use_shared_memory() else f"{knobs.STAGED_INNER_ENV_VAR}=gloo is set"
        except ValueError as error:  # all ranks raise it after they are connected
            chosen = str(error)
        try:
            self._host = join(self._store, rank, size, self._names, chosen)
        except IpcUnavailableError as error:
            return str(error)
        return None

    def _prepare(self) -> dict[str, Any]:
        knobs.staged_may_use_shared_memory()
        knobs.staged_chunk_bytes()
        self._executor.start()
        return {}


def _create(opts: Any, _backend_options: Any = None) -> StagedProcessGroup:
    return StagedProcessGroup(
        opts.store, opts.group_rank, opts.group_size, opts.timeout, tuple(opts.global_ranks_in_group or ())
    )


def register() -> None:
    """Register the backend ``staged`` with torch.distributed; runs on import and may be called again."""
    if not is_registered(BACKEND_NAME):
        Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=list(STAGED_DEVICES))


register()
