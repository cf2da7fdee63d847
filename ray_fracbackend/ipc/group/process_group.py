"""The c10d process group ``ipc``: its parts and its lifecycle. Imports torch, never Ray.

How a call is run is in `launching`, the collectives themselves are in `operations`. CPU tensors go through host memory,
CUDA tensors through device memory. A real Gloo group is registered inside, so that everything that is not overridden
(send, recv, group names, object lookups from C++) and every tensor that shared memory does not carry (sparse, quantized,
of two devices) goes through it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .._torch import DEVICES, PrefixStore, ProcessGroup, ProcessGroupGloo, set_timeout
from ..device.setup import HostSide
from ..device.side import DeviceSide
from ..protocol.hierarchy import Collectives, HierarchicalCollectives, gloo_leaders
from ..protocol.reductions import Reduction
from ..protocol.setup import join
from .dynamo import hide_package
from .executor import Executor
from .work import keep_work_of_reducers

logger = logging.getLogger(__name__)

_groups: weakref.WeakSet[ProcessGroupBase] = weakref.WeakSet()


def _keep_groups() -> None:
    """In a forked child: the threads of the inner Gloo groups are the parent's, and a destructor would wait for them for ever."""
    for group in list(_groups):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_groups)

_GLOO_NAME = ProcessGroup.BackendType.CUSTOM
# How long shutdown waits for calls in progress; their own time limits may be half an hour.
_SHUTDOWN_S = 5.0


class ProcessGroupBase(ProcessGroup):  # type: ignore[misc]  # torch gives it no type
    """State and lifecycle of an ipc process group; `operations.IpcProcessGroup` is the whole.

    Args:
        store: The group's store.
        rank: This process's rank in the group.
        size: Ranks of the group.
        timeout: Default time limit of a collective.
        global_ranks: Global rank of each group rank, for messages; empty means the same numbers.

    Raises:
        IpcUnavailableError: Shared memory cannot be set up on some rank; every rank raises.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int] = ()) -> None:
        super().__init__(rank, size)
        _groups.add(self)
        hide_package()
        keep_work_of_reducers()
        store = _unused(store, size)
        self._num_ranks = size
        self._own_rank = rank
        self._num_calls = 0
        self._timeout = timeout
        names = tuple(f"rank {global_ranks[r] if global_ranks else r}" for r in range(size))
        self._gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        for device in DEVICES:
            self._register_backend(torch.device(device), _GLOO_NAME, self._gloo)
        self.membership, self._local = join(store, rank, size, names)
        self._set_default_backend(_GLOO_NAME)
        self._leaders = gloo_leaders(store, self.membership, timeout)
        self._collectives: Collectives = self._local
        if len(self.membership.hosts) > 1:
            self._collectives = HierarchicalCollectives(self.membership, self._local, self._leaders, self._gloo)
        host = HostSide(self.membership, self._local, self._collectives, self._gloo, store)
        self._device_side = DeviceSide(host, timeout)
        self._executor = Executor(f"ipc rank {rank}")
        self._reductions: dict[tuple[torch.dtype, Any], Reduction] = {}
        logger.log(
            logging.INFO if rank == 0 else logging.DEBUG,
            "ipc process group of %d ranks on %d hosts, %d here, chunks of %d bytes",
            size,
            len(self.membership.hosts),
            self._local.num_ranks,
            self._local.engine.transport.chunk_bytes,
        )

    def getBackendName(self) -> str:
        """Name of the backend."""
        return "ipc"

    def _gloo_base(self, operation: str, *args: Any) -> Any:
        """Call the single-tensor form of a Gloo operation under the name that this torch has."""
        names = {
            "all_gather": ("_allgather_base", "all_gather_single"),
            "reduce_scatter": ("_reduce_scatter_base", "reduce_scatter_single"),
            "all_to_all": ("alltoall_base", "all_to_all_single"),
        }[operation]
        method = next(getattr(self._gloo, name) for name in names if hasattr(self._gloo, name))
        return method(*args)

    def _gloo_all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Any:
        """All-to-all of lists, which Gloo itself has only for one tensor."""
        source = torch.cat([t.reshape(-1) for t in inputs])
        target = torch.empty(sum(t.numel() for t in outputs), dtype=source.dtype, device=source.device)
        work = self._gloo_base(
            "all_to_all", target, source, [t.numel() for t in outputs], [t.numel() for t in inputs], opts
        )
        work.wait()
        for output, part in zip(outputs, target.split_with_sizes([t.numel() for t in outputs]), strict=True):
            output.data.copy_(part.view(output.shape))  # as in `staging.flat`
        return work

    @property
    def gloo_reason(self) -> str | None:
        """Why Gloo carries this group's CUDA tensors, None where it does not or no CUDA tensor has come yet."""
        return self._device_side.gloo_reason

    @property
    def _timeout_s(self) -> float:
        """Default time limit of a collective: that of the inner Gloo group, which is all that torch's ``_set_pg_timeout`` sets."""
        timeout: timedelta = self._gloo.options._timeout
        if timeout != self._timeout:
            self.set_timeout(timeout)
        return timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the numbers begin at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has called. torch's ``_get_sequence_number_for_group`` asks for it."""
        return self._num_calls

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default time limit of later collectives."""
        self._timeout = timeout
        self._device_side.set_timeout(timeout)
        for gloo in (self._gloo, self._leaders):
            if gloo is not None:
                set_timeout(gloo, timeout)

    def abort(self) -> None:
        """Break the group: calls in progress and later ones raise on every rank. May be called again.

        In a forked child, as `shutdown` there, it does nothing: the group is the parent's.
        """
        if not self._executor.is_own():
            return
        reason = f"{self.membership.names[self._own_rank]} aborted the process group"
        self._device_side.abort(reason)
        self._local.engine.abort(reason)
        self._executor.close(_SHUTDOWN_S)
        self._stop_gloo("abort")

    def shutdown(self) -> None:
        """Leave the group after the calls in progress; later calls here raise. May be called again."""
        if not self._executor.is_own():
            return
        idle = self._executor.close(_SHUTDOWN_S)
        self._device_side.shutdown(idle)
        self._local.engine.close()
        if idle:
            self._local.engine.transport.close()
        self._stop_gloo("shutdown")

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: torch's own would end the process, because it clones a store that a group made in Python has not.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "A process group of backend ipc cannot be split; make the part with torch.distributed.new_group(ranks)."
        )

    def _warn_of_pair(self) -> None:
        """torch makes a group of a backend like this one, asked for as a part of a pair, the group for all devices."""
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a group that nobody registered
            asked = dist.get_backend_config(self)
            if self._own_rank == 0 and {part.partition(":")[2] for part in asked.split(",")} != {"ipc"}:
                logger.warning(
                    "This process group was asked for as %s, but torch.distributed makes a group with ipc in it ipc for all "
                    "devices. For another backend make a second group, such as new_group(backend='nccl').",
                    asked,
                )

    def _stop_gloo(self, verb: str) -> None:
        for gloo in (self._leaders, self._gloo):
            if gloo is not None:
                # Gloo has neither verb in every torch release.
                with contextlib.suppress(RuntimeError, AttributeError):
                    getattr(gloo, verb)()


def _unused(store: Any, size: int) -> Any:
    """A part of a group's store without the keys of an earlier group that had the same store, as under torchrun.

    All ranks of a group come before any rank comes for the next: none leaves set-up before all have come.
    """
    return PrefixStore(f"ipc/{(store.add('ipc/arrivals', 1) - 1) // size}", store)
