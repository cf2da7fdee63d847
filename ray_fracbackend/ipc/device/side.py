"""A group's tensors on an accelerator: what carries them, and on which stream. Runs in every rank; imports torch.

That is set up at the first call with such tensors, not when the group is made: only then is the device known, and many groups
(of meshes, of sharded models) never move one. Two things are tried in turn: memory of the device that all its ranks have mapped,
then staging through pinned host memory, which always works.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch

from .._torch import set_timeout, stop
from ..errors import IpcUnavailableError
from ..protocol.collectives import Collectives, HostCollectives
from ..protocol.description import description_text
from . import runtime
from .memory import free_retired, give_up
from .runtime import CommunicationStream, wait_on_host
from .setup import DeviceLane, DeviceSetup, HostSide
from .staged import set_up_staging

logger = logging.getLogger(__name__)

# How long a clean shutdown waits for the device to finish the group's last call.
_SHUTDOWN_S = 5.0


class DeviceSide:
    """What a group does with tensors on an accelerator.

    Args:
        collectives: Collectives of the group's CPU tensors.
        names: How messages call each rank.
        timeout: Default timeout of the group's collectives.
        shared: What the ranks need to share memory of a device; or why all tensors are staged.

    Attributes:
        staged_reason: Why the tensors are staged, as far as that is known; None while nothing speaks against device memory.
    """

    def __init__(
        self, collectives: HostCollectives, names: Sequence[str], timeout: timedelta, shared: HostSide | str
    ) -> None:
        self.staged_reason = shared if isinstance(shared, str) else None
        self._host = collectives
        self._names = names
        self._timeout = timeout
        self._shared = None if isinstance(shared, str) else shared
        self._device: torch.device | None = None
        self._lane: DeviceLane | None = None
        self._collectives: Collectives | None = None
        self._streams: dict[torch.device, CommunicationStream] = {}

    @property
    def path(self) -> str | None:
        """How the tensors travel, and why so; None where none has come yet."""
        if self._collectives is None:
            return None
        if self._lane is not None:
            return "shared device memory"
        return f"staged through host memory ({self.staged_reason})"

    @property
    def _kind(self) -> type[runtime.AcceleratorRuntime]:
        return runtime.AcceleratorRuntime if self._shared is None else runtime.CudaRuntime

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of later collectives, the only one that NCCL knows."""
        self._timeout = timeout
        for group in self._lane.leaders if self._lane is not None else ():
            set_timeout(group, timeout)

    def device_of(self, tensors: Sequence[torch.Tensor]) -> torch.device | None:
        """Return the first device with streams among those of the tensors, or None."""
        return next((tensor.device for tensor in tensors if self._kind.owns(tensor)), None)

    def carries(self, tensors: Sequence[torch.Tensor]) -> torch.device | None:
        """Return the device of these tensors if the group's may carry them: all there, dense, not quantized."""
        device = self.device_of(tensors)
        if device is None or self._device not in (None, device):
            return None
        for tensor in tensors:
            if tensor.device != device or tensor.layout is not torch.strided or tensor.is_quantized:
                return None
        return device

    def stream_of(self, device: torch.device) -> CommunicationStream:
        """Return the group's stream on a device."""
        stream = self._streams.get(device)
        # Of several threads that make one, all use the first.
        return stream or self._streams.setdefault(device, CommunicationStream(self._kind(device)))

    def prepare(self, device: torch.device, description: bytes, timeout_s: float) -> None:
        """Set up what carries the tensors if this is the group's first call with one on an accelerator; in its turn.

        Raises:
            IpcError: The group is broken.
        """
        # The device's memory has a page of its own, which does not know of all failures.
        self._host.raise_if_unusable(description_text(description))
        if self._device is not None:
            return
        self._device = device
        if self._shared is not None:
            try:
                self._lane = DeviceSetup(self._shared, self.stream_of(device), self._timeout).run(
                    description, timeout_s
                )
                self._collectives = self._lane.collectives
                return
            except IpcUnavailableError as error:
                self.staged_reason = str(error)
                self.stream_of(device).renew()
                if self._host.rank == 0:
                    logger.warning(
                        "CUDA tensors of this ipc group are staged through host memory: %s", self.staged_reason
                    )
        self._collectives = set_up_staging(self._host, self._names, self.stream_of(device), description, timeout_s)

    def collectives(self, device: torch.device) -> Collectives | None:
        """Return the collectives for tensors on `device`, None where the group uses another one; after `prepare`."""
        return self._collectives if device == self._device else None

    def abort(self, reason: str) -> None:
        """Break the device's part of the group; touches no device. May be called again."""
        if self._lane is not None:
            self._lane.local.engine.abort(reason)
            give_up()
            stop(self._lane.leaders, "abort")

    def shutdown(self, idle: bool) -> None:
        """Leave the device's part of the group; `idle` says that no call is in progress. May be called again."""
        lane, self._lane = self._lane, None
        if lane is None:
            return
        engine = lane.local.engine
        if not (idle and not engine.waiter.is_poisoned() and self._is_through()):
            # What the device still does with the memory cannot be known; the end of the process frees it.
            give_up()
            engine.close(keeps_memory=True)
        else:
            engine.close(keeps_memory=not lane.memory.close_imports())
            lane.memory.retire(engine.waiter.is_alone)
        stop(lane.leaders, "shutdown")

    def _is_through(self) -> bool:
        with suppress(RuntimeError):
            for stream in self._streams.values():
                if stream.last is not None:
                    wait_on_host(stream.last, _SHUTDOWN_S)
            free_retired()
            return True
        return False
